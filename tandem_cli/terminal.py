"""The commands' output on a terminal: streamed answers whose tokens are coloured by confidence, and tables.

Colours go from red (low probability) to green (high probability). All have medium lightness, so that they are readable
on black and on white.
"""

import json
import math
import re
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

import tandem
from tandem.models import confidence

# Lower bound of the probability, and the colour in the 256-colour palette.
SCALE = ((0.9, 28), (0.6, 64), (0.3, 136), (0.1, 130), (0.0, 160))
_KEPT_CONTROLS = "\n\t"
_UNESCAPED = re.compile("[\x7f-\x9f]")
_FILE_COLUMNS = 200
_UNLIMITED_COLUMNS = 10_000
_SEPARATOR = " · "
_INDENT = "  "


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


def show_confidence(confidence: float) -> str:
    """`confidence` with three digits, cut off rather than rounded: only certainty is 1."""
    return f"{math.floor(confidence * 1000) / 1000:.3f}"


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


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(escape_json_controls(json.dumps(value, ensure_ascii=False)) + "\n")
    sys.stdout.flush()


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc" and char not in _KEPT_CONTROLS


def wide_console() -> Console:
    """A console on stdout. In a file or a pipe its width is fixed, so that no cell is cut to the width of a
    terminal.
    """
    console = Console(markup=False, emoji=False)
    return console if console.is_terminal else Console(width=_FILE_COLUMNS, markup=False, emoji=False)


def error_console() -> Console:
    """A console on stderr. Like `wide_console`, it shows text as it is: names and errors may have square brackets and
    colons, which are no markup.
    """
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def progress_bar(console: Console, *more: ProgressColumn) -> Progress:
    """A description, a bar, and more columns, on a terminal; nothing elsewhere. It disappears at its end."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *more)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def optional_cell(value: float | None, form: str) -> str:
    """The cell of a figure that may be missing."""
    return "" if value is None else format(value, form)


def figures_table(*columns: str) -> Table:
    """A table without lines: names in the first column, figures in the others."""
    table = Table(box=None, pad_edge=False)
    for column, name in enumerate(columns):
        table.add_column(name, justify="left" if column == 0 else "right")
    return table


@dataclass(frozen=True, slots=True)
class FittingTable:
    """A table that loses nothing on a narrow terminal: if it is wider than the terminal, each row becomes a few lines
    of names and values, as in psql's expanded display. Cells are strings or `Text`.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = self.table
        whole = Measurement.get(console, options.update(width=_UNLIMITED_COLUMNS), table)
        if whole.maximum <= options.max_width:
            yield table
            return
        if table.title:
            yield table.title
        names = [" ".join(str(column.header).split()) for column in table.columns]
        for row in zip(*(column.cells for column in table.columns), strict=True):
            values = [
                cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False) for cell in row
            ]
            pairs = [
                Text.assemble((f"{name} " if name else "", "dim"), value)
                for name, value in zip(names, values, strict=True)
                if value
            ]
            yield Text("\n", overflow="fold").join(_lines_of(pairs, options.max_width))
        if table.caption:
            yield table.caption


def _lines_of(pairs: Iterable[Text], width: int) -> list[Text]:
    """Put as many pairs on a line as fit into `width`, and indent all lines but the first."""
    lines: list[Text] = []
    for pair in pairs:
        if lines and lines[-1].cell_len + len(_SEPARATOR) + pair.cell_len <= width:
            lines[-1].append(_SEPARATOR, "dim").append_text(pair)
        else:
            lines.append(Text(_INDENT if lines else "").append_text(pair))
    return lines


@dataclass
class StreamedAnswer:
    """The part of an answer that has arrived so far. Times are in seconds of the monotonic clock."""

    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    request_id: str = ""
    texts: list[str] = field(default_factory=list)
    tokens: list[tandem.Token] = field(default_factory=list)
    finish_reason: str = "interrupted"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, event: tandem.TokenEvent) -> None:
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.request_id = event.request_id
        self.texts.append(event.text)
        if event.token:
            self.tokens.append(event.token)
        if event.finish_reason:
            self.finish_reason = event.finish_reason

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, as this client saw it; None before it arrives."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None for fewer than two tokens."""
        if len(self.tokens) < 2 or self.first_s is None or self.last_s is None:
            return None
        return (len(self.tokens) - 1) / max(self.last_s - self.first_s, 1e-9)

    @property
    def confidence(self) -> float | None:
        return confidence(self.tokens)

    def summary(self) -> str:
        """One line of statistics to print below the answer."""
        statistics = [self.finish_reason, f"{len(self.tokens)} tokens"]
        if self.confidence is not None:
            statistics.append(f"confidence {show_confidence(self.confidence)}")
        if self.ttft_s is not None:
            statistics.append(f"first token {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            statistics.append(f"{self.tokens_per_s:.1f} tokens/s")
        return " · ".join(statistics)


def show_answer(events: Iterable[tandem.TokenEvent], answer: StreamedAnswer, painter: Painter) -> None:
    """Print the events to stdout as they arrive, and add each of them to `answer`."""
    for event in events:
        answer.add(event)
        sys.stdout.write(painter.paint(event.echo, None))
        if event.token:
            sys.stdout.write(painter.paint(event.token.text, event.token.logprob))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
