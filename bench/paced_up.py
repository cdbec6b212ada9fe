"""`tandem up` with workers that compute nothing (bench/paced.py): `python -m bench.paced_up PACE FLAGS`."""

import os
import sys

from bench.paced import PACE_ENV
from cli.main import build_parser, execute
from cli.up import PROGRAMS


def main() -> int:
    """Serve until a signal comes."""
    _, pace, *flags = sys.argv
    os.environ[PACE_ENV] = pace
    args = build_parser().parse_args(["up", *flags])
    paced = {role: (sys.executable, "-m", "bench.paced", role) for role in ("prefill", "decode")}
    args.programs = {**PROGRAMS, **paced}
    return execute(args)


if __name__ == "__main__":
    sys.exit(main())
