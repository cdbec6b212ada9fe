"""The process of the `tandem` command, and of `python -m tandem_cli`: Ctrl-C ends it without a traceback, whenever it
comes.
"""

from typing import NoReturn

from mesh.interrupts import end_at_ctrl_c, run_program

end_at_ctrl_c()


def run() -> NoReturn:
    """Run the command line of this process, and end the process with its status."""
    from tandem_cli.main import execute, parse_arguments

    args = parse_arguments()
    run_program(lambda: execute(args))


if __name__ == "__main__":
    run()
