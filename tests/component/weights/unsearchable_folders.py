"""A program for `test_unsearchable_folders.py`: runs commands, and prints what they returned and said.

    python -m tests.component.weights.unsearchable_folders COMMANDS

COMMANDS is a JSON list of lists of words. It is a process of its own because a test that runs as root must give up the
right to enter all folders.
"""

import contextlib
import io
import json
import sys

from tandem_cli.main import main


def said(words: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as output, contextlib.redirect_stdout(io.StringIO()):
        status = main(words)
    return status, output.getvalue()


if __name__ == "__main__":
    json.dump([said(words) for words in json.loads(sys.argv[1])], sys.stdout)
