"""`python -m tandem_cli` is the `tandem` command."""

import sys

from tandem_cli.main import run_process

if __name__ == "__main__":
    sys.exit(run_process())
