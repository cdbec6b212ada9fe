"""Confidence as colour: from red (the model was guessing) to green (it was sure).

The tones are of middle lightness, so that each can be read on black and on white.
"""

import math
import unicodedata
from dataclasses import dataclass

from rich.console import Console

# Least probability and its colour in the 256-colour palette.
SCALE = ((0.9, 28), (0.6, 64), (0.3, 136), (0.1, 130), (0.0, 160))

_KEPT_CONTROLS = "\n\t"


@dataclass(frozen=True, slots=True)
class Painter:
    """Puts colours on text for a terminal; leaves it alone for everything else."""

    is_terminal: bool
    use_colour: bool

    @classmethod
    def of(cls, console: Console) -> "Painter":
        """What `console` can show. Rich knows NO_COLOR, FORCE_COLOR and dumb terminals."""
        return cls(console.is_terminal, console.color_system is not None and not console.no_color)

    def paint(self, text: str, logprob: float | None) -> str:
        """`text` in the colour of its log-prob."""
        if self.is_terminal:
            text = harmless(text)
        if not self.use_colour or logprob is None or not text:
            return text
        return f"\x1b[38;5;{colour_of(logprob)}m{text}\x1b[39m"


def colour_of(logprob: float) -> int:
    """The palette's number for a natural log-prob."""
    probability = math.exp(min(0.0, logprob))
    return next(colour for least, colour in SCALE if probability >= least)


def harmless(text: str) -> str:
    """`text` without control characters: a model must not drive the terminal."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc" and char not in _KEPT_CONTROLS
