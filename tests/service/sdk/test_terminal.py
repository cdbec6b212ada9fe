"""What commands write to a terminal when a model, or a server, tries to drive it."""

import os
import subprocess
import sys
from contextlib import suppress

import grpc
import pytest

from tests.defects import Repaired
from tests.fakes.sdk_router import FakeRouter, Refusal
from tests.waiting import LIMIT_S

ATTACK = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\x7f"
FORBIDDEN = ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\x7f")


def in_terminal(router: FakeRouter, *command: str, typed: str = "") -> str:
    """What a command shows in a terminal of its own."""
    reading, terminal = os.openpty()
    environ = os.environ | {"TANDEM_ADDRESS": router.address, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "150"}
    try:
        process = subprocess.Popen(
            (sys.executable, "-m", "tandem_cli", *command),
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=terminal,
            env=environ,
            text=True,
        )
    finally:
        os.close(terminal)
    shown = b""
    try:
        assert process.stdin is not None
        process.stdin.write(typed)
        process.stdin.close()
        with suppress(OSError):  # the last writer has left
            while piece := os.read(reading, 1 << 16):
                shown += piece
        process.wait(LIMIT_S)
    finally:
        os.close(reading)
        process.kill()
        process.wait()
    return shown.decode()


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        (("generate", "hi"), ""),
        (("generate", "hi", "--json"), ""),
        (("chat",), "hi\n"),
        (("breakdown", "--requests=1"), ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_model_text_cannot_drive_a_terminal(
    command: tuple[str, ...], typed: str, threaded_router: FakeRouter, repaired: Repaired
) -> None:
    threaded_router.script.story = f"a{ATTACK}\tb\nc"
    shown = in_terminal(threaded_router, *command, typed=typed)
    assert [each for each in FORBIDDEN if each in shown] == []
    if command in (("generate", "hi"), ("chat",)):
        assert "\tb\r\nc" in shown, "line ends and tabs stay"
        assert "PWNED" in shown
    repaired("D19", "generate, generate --json, chat, breakdown: no control character but line ends and tabs")


def test_errors_of_a_server_cannot_drive_a_terminal(threaded_router: FakeRouter, repaired: Repaired) -> None:
    threaded_router.script.refusals.extend([Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"bad {ATTACK}")] * 2)
    for command, typed in ((("generate", "hi"), ""), (("chat",), "hi\n")):
        shown = in_terminal(threaded_router, *command, typed=typed)
        assert "bad" in shown
        assert [each for each in FORBIDDEN if each in shown] == []
    repaired("D19", "errors of a server: the same")
