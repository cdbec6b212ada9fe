"""`tandem up` with paced workers (tandem_cli/load_test/paced.py).

python -m tandem_cli.load_test.paced_up PACE FLAGS
"""

import os
import sys

from tandem_cli.load_test.paced import PACE_ENV
from tandem_cli.main import build_parser, execute
from tandem_cli.up import PROGRAMS


def main() -> int:
    """Serve until a signal arrives; returns the exit status."""
    _, pace, *flags = sys.argv
    os.environ[PACE_ENV] = pace
    args = build_parser().parse_args(["up", *flags])
    paced = {role: (sys.executable, "-m", "tandem_cli.load_test.paced", role) for role in ("prefill", "decode")}
    args.programs = {**PROGRAMS, **paced}
    return execute(args)


if __name__ == "__main__":
    sys.exit(main())
