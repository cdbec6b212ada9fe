"""A program for `test_unsearchable_folders.py`: runs commands, and prints what they returned and said.

    python -m tests.component.weights.unsearchable_folders COMMANDS

COMMANDS is a JSON list of lists of words. It is a process of its own because one that runs as
root must give up the right to enter all folders.
"""

import contextlib
import ctypes
import io
import json
import os
import sys

from tandem_cli.main import main

_CAPABILITIES_V3 = 0x20080522
_PR_SET_SECUREBITS, _SECBIT_NOROOT = 28, 1


def become_ordinary() -> None:
    """Give up root's capabilities, also in programs that this process executes. capset(2), capabilities(7)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    if libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NOROOT, 0, 0, 0) or libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def said(words: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as output, contextlib.redirect_stdout(io.StringIO()):
        status = main(words)
    return status, output.getvalue()


if __name__ == "__main__":
    if os.geteuid() == 0:
        become_ordinary()
    json.dump([said(words) for words in json.loads(sys.argv[1])], sys.stdout)
