"""Colours tokens by confidence, from red (low probability) to green (high probability).

All colours have medium lightness, so that they are readable on black and on white.
"""

import math
import re
import unicodedata
from dataclasses import dataclass

from rich.console import Console

# Lower bound of the probability, and the colour in the 256-colour palette.
SCALE = ((0.9, 28), (0.6, 64), (0.3, 136), (0.1, 130), (0.0, 160))

_KEPT_CONTROLS = "\n\t"
_UNESCAPED = re.compile("[\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Painter:
    """Colours text for a terminal. Output to files and pipes stays unchanged."""

    is_terminal: bool
    use_colour: bool

    @classmethod
    def of(cls, console: Console) -> "Painter":
        """A painter for `console`. Rich handles NO_COLOR, FORCE_COLOR and dumb terminals."""
        is_terminal = console.is_terminal or console.file.isatty()
        return cls(is_terminal, console.color_system is not None and not console.no_color)

    def paint(self, text: str, logprob: float | None) -> str:
        """`text` in the colour of its log-prob (natural log), without control characters on a terminal."""
        if self.is_terminal:
            text = strip_controls(text)
        if not self.use_colour or logprob is None or not text:
            return text
        return f"\x1b[38;5;{colour_of(logprob)}m{text}\x1b[39m"


def colour_of(logprob: float) -> int:
    """The number in the 256-colour palette for a log-prob (natural log)."""
    probability = math.exp(min(0.0, logprob))
    return next(colour for lower_bound, colour in SCALE if probability >= lower_bound)


def strip_controls(text: str) -> str:
    """`text` with control characters replaced, so that neither a model nor a server can control the terminal."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(char) else char for char in text)


def escape_json_controls(text: str) -> str:
    """JSON text with the control characters U+007F to U+009F escaped, which json.dumps does not do."""
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc" and char not in _KEPT_CONTROLS
