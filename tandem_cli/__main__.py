"""The process of the `tandem` command, and of `python -m tandem_cli`: Ctrl-C ends it without a traceback, whenever it
comes.
"""

import signal
import sys

_HANDLER = signal.getsignal(signal.SIGINT)
# Python would raise KeyboardInterrupt in whatever is imported or cleaned up. A shell ignores SIGINT in background jobs,
# and so do they.
_OUTSIDE = signal.SIG_DFL if _HANDLER is signal.default_int_handler else _HANDLER
signal.signal(signal.SIGINT, _OUTSIDE)


def run() -> int:
    """Run the command line of this process; returns the exit status."""
    from tandem_cli.main import execute, parse_arguments

    args = parse_arguments()
    try:
        signal.signal(signal.SIGINT, _HANDLER)
        return execute(args)
    except KeyboardInterrupt:  # while an error was handled
        return 130
    finally:
        signal.signal(signal.SIGINT, _OUTSIDE)


if __name__ == "__main__":
    sys.exit(run())
