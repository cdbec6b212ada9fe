"""`tandem` whose `up` starts fake services: `python -m tests.fakes.sdk_up up --flags`."""

import sys
from typing import NoReturn

from mesh.interrupts import run_program
from tandem_cli.main import execute, parse_arguments


def main() -> NoReturn:
    args = parse_arguments()
    args.programs = {
        role: (sys.executable, "-m", "tests.fakes.sdk_child", role)
        for role in ("router", "prefill", "decode", "gateway")
    }
    run_program(lambda: execute(args))


if __name__ == "__main__":
    main()
