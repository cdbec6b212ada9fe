"""The process of the `tandem` command, and of `python -m tandem_cli`: Ctrl-C ends it without a traceback, whenever it
comes.
"""

import os
import sys
from typing import NoReturn

from mesh.interrupts import end_at_ctrl_c, run_program

end_at_ctrl_c()


def run() -> NoReturn:
    """Run the command line of this process, and end the process with its status."""
    _open_standard_streams()
    from tandem_cli.main import execute, parse_arguments

    args = parse_arguments()
    run_program(lambda: execute(args))


def _open_standard_streams() -> None:
    """Replace standard streams that the caller has closed (`>&-`) by /dev/null. Python has None for them, and the next
    file or connection would get their numbers.
    """
    for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    run()
