"""Confidence as colour."""

import io
import math

import pytest
from rich.color import Color
from rich.console import Console

from tandem_cli.terminal import SCALE, Painter, colour_of, strip_controls


def test_surer_is_greener() -> None:
    seen = [colour_of(math.log(probability)) for probability in (0.95, 0.7, 0.4, 0.2, 0.01)]
    assert seen == [colour for _, colour in SCALE]
    assert colour_of(0.0) == SCALE[0][1]
    assert colour_of(-math.inf) == SCALE[-1][1]


@pytest.mark.parametrize("colour", [colour for _, colour in SCALE])
def test_every_colour_can_be_read_on_black_and_on_white(colour: int) -> None:
    channels = [value / 255 for value in Color.from_ansi(colour).get_truecolor()]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / 0.05 >= 3
    assert 1.05 / (luminance + 0.05) >= 3


def test_only_terminals_get_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert Painter.of(Console(file=io.StringIO())).paint("a", -0.01) == "a"
    assert Painter.of(Console(file=io.StringIO(), force_terminal=True)).paint("a", -0.01) == "\x1b[38;5;28ma\x1b[39m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Painter.of(Console(file=io.StringIO(), force_terminal=True)).paint("a", -0.01) == "a"


def test_a_model_cannot_drive_the_terminal() -> None:
    assert strip_controls("a\x1b[2Jb\n\tc\u00a0é") == "a\ufffd[2Jb\n\tc\u00a0é"
    assert Painter(is_terminal=False, use_colour=False).paint("\x1b", None) == "\x1b"
