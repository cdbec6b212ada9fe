"""`python -m tandem_cli` is the `tandem` command."""

import sys

from tandem_cli.main import main

sys.exit(main())
