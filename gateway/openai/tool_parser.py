"""Streaming parser for tool calls in a model's text.

    text ─▶ TEXT ──marker──▶ BETWEEN ──{──▶ CALL ──}──▶ BETWEEN ──end marker, or anything else──▶ TEXT

A call is a JSON object with `name` and `arguments` (or `parameters`), or, in some formats, a name before a JSON object
of arguments. It is emitted as soon as its function is known and its arguments begin. An object that names no known
function, or has other members before that, is not a call and is emitted as text: no text of the model is lost.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from gateway.openai.call_reader import CallReader, NotACall, Piece, Text, read_pieces
from gateway.openai.tagged_calls import find_begun_mark

_BETWEEN_CALLS = " \t\r\n,;[]}"
"""Separators between calls, and a superfluous brace after one."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a family of models writes calls.

    `start`, `end`: markers around the calls. `bare`: a text that begins with JSON may be calls without a marker.
    `only_calls`: the text has calls only. `named`: a call may also be a name, then its arguments. `has_control_marks`:
    in some checkpoints the markers are control tokens, without which calls after other text would be taken for text.
    `around`: for grammars, the texts before the first call, between two, and after the last; None if control tokens
    are among them.
    """

    start: str
    end: str = ""
    bare: bool = False
    only_calls: bool = False
    named: bool = False
    has_control_marks: bool = False
    arguments_key: str = "arguments"
    num_id_chars: int = 24
    around: tuple[str, str, str] | None = None


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(
            "<tool_call>",
            "</tool_call>",
            has_control_marks=True,
            around=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        ),
        "llama3_json": ToolFormat("<|python_tag|>", bare=True, arguments_key="parameters", around=("", "; ", "")),
        "mistral": ToolFormat("[TOOL_CALLS]", bare=True, named=True, has_control_marks=True, num_id_chars=9),
        "phi4_mini_json": ToolFormat("functools", bare=True, around=("functools[", ", ", "]")),
        "granite": ToolFormat("<|tool_call|>", bare=True),
        "hunyuan_a13b": ToolFormat("<tool_calls>", "</tool_calls>", around=("<tool_calls>[", ", ", "]</tool_calls>")),
    }
)
"""Keys are the names of vLLM's parsers."""

FORCED_FORMAT = ToolFormat("", bare=True, only_calls=True)
"""The format of forced calls: the structure allows nothing else."""


# Between the name and the arguments of a call: an id and marks. Special tokens may be missing from the text.
_BEFORE_ARGUMENTS = re.compile(r"\s*(?:(?:\[CALL_ID\])?\s*[A-Za-z0-9]{9})?\s*(?:\[ARGS\])?\s*")
_BEGINS_BEFORE_ARGUMENTS = re.compile(r"[\[\]A-Za-z0-9_\s]{0,32}")


class _State(Enum):
    TEXT = auto()
    BETWEEN = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class _NamedCall:
    """The beginning of a call whose name is before its arguments. `num_chars`: how much is before these."""

    name: str = ""
    num_chars: int = 0


class ToolCallParser:
    """Parses one answer. `names`: the known functions."""

    def __init__(self, style: ToolFormat, names: Collection[str]) -> None:
        self._style = style
        # The longest first: the end of a longer name looks like the id behind a shorter one.
        self._names = tuple(sorted(set(names), key=len, reverse=True))
        self._state = _State.TEXT
        self._buffer = ""
        self._raw = ""  # text since the marker, until a call has begun
        self._may_be_bare = style.bare
        self._reader = CallReader(0, self._names)
        self.num_calls = 0
        """Number of calls that have begun."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that the text completes."""
        self._buffer += text
        return read_pieces(self._read(), lambda: len(self._raw) + len(self._buffer))

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End of the text: return what is still held back. `is_cut`: by a limit; else the model ended it.

        A forced call that is cut off before its function is known is dropped: it is no text for a client.
        """
        text = self._raw + self._buffer
        is_call = self._state is _State.CALL and self._reader.has_begun
        if is_call and not is_cut:
            return list(self._reader.close())
        is_rest = self._state is _State.BETWEEN and not self._raw
        if not self._style.end:  # the text may have begun with a mark, or with the name of a function
            is_rest = is_rest and not self._buffer.strip(_BETWEEN_CALLS)
        is_blank = self.num_calls > 0 and not text.strip()
        self._buffer = self._raw = ""
        is_shown = not (is_call or is_rest or is_blank or self._style.only_calls)
        return [Text(text)] if text and is_shown else []

    def _read(self) -> Iterator[Piece]:
        """Run the state machine until it needs more text."""
        previous = None
        while previous != (self._state, len(self._buffer)):
            previous = self._state, len(self._buffer)
            if self._state is _State.TEXT:
                yield from self._read_text()
            elif self._state is _State.BETWEEN:
                yield from self._read_between()
            else:
                yield from self._read_call()

    def _read_text(self) -> Iterator[Piece]:
        start = self._style.start
        if self._may_be_bare:
            first = self._buffer.lstrip()
            if start.startswith(first):
                return  # empty, or a possible prefix of the marker
            named = self._find_named(first)
            if named is None:
                return
            self._may_be_bare = False
            if named.name or (first[0] in "{[" and not (start and first.startswith(start))):
                self._state = _State.BETWEEN
                return
        text, marker, remaining = self._buffer.partition(start) if start else (self._buffer, "", "")
        if marker:
            blank = text[len(text.rstrip()) :]
            self._state, self._raw, self._buffer = _State.BETWEEN, blank + marker, remaining
            text = text.rstrip()
        else:
            num_held = _num_held(text, start)
            self._buffer = text[len(text) - num_held :]
            text = text[: len(text) - num_held]
        if text:
            yield Text(text)

    def _read_between(self) -> Iterator[Piece]:
        end = self._style.end
        if self._style.start and not end and self.num_calls and not self._raw and not self._skip_to_mark():
            return
        self._skip(len(self._buffer) - len(self._buffer.lstrip(_BETWEEN_CALLS)))
        named = self._find_named(self._buffer)
        if named is None:
            return
        if end and self._buffer.startswith(end) and not self._raw:
            self._state, self._buffer = _State.TEXT, self._buffer[len(end) :]
        elif self._buffer.startswith("{"):
            self._reader = CallReader(self.num_calls, self._names)
            self._state = _State.CALL
        elif named.name:
            self._raw, self._buffer = (
                self._raw + self._buffer[: named.num_chars],
                self._buffer[named.num_chars :],
            )
            self._reader = CallReader(self.num_calls, self._names, named.name)
            self._state = _State.CALL
        elif self._buffer and not end.startswith(self._buffer):
            yield from self._give_up()

    def _read_call(self) -> Iterator[Piece]:
        has_begun = self._reader.has_begun
        for number, char in enumerate(self._buffer):
            try:
                yield from self._reader.push(char)
            except NotACall:
                # What was read is not searched again: the work must not grow with the square of a text.
                before, self._buffer = self._buffer[:number], self._buffer[number:]
                if not self._reader.has_begun:
                    self._raw += before
                    yield from self._give_up()
                    return
                yield from self._reader.close()
                self._state, self._raw = _State.BETWEEN, ""
                return
            if self._reader.has_begun and not has_begun:
                has_begun = True
                self.num_calls += 1
            if self._reader.is_done:
                self._state, self._raw, self._buffer = _State.BETWEEN, "", self._buffer[number + 1 :]
                return
        self._raw = "" if has_begun else self._raw + self._buffer
        self._buffer = ""

    def _find_named(self, text: str) -> "_NamedCall | None":
        """Return the call with which the text begins, nameless if none begins; None if only more text can tell."""
        is_open = False
        for name in self._names if self._style.named and text else ():
            if text.startswith(name):
                num_chars = _BEFORE_ARGUMENTS.match(text, len(name)).end()  # type: ignore[union-attr]
                if text.startswith("{", num_chars):
                    return _NamedCall(name, num_chars)
                is_open = is_open or _BEGINS_BEFORE_ARGUMENTS.fullmatch(text, len(name)) is not None
            else:
                is_open = is_open or name.startswith(text)
        return None if is_open else _NamedCall()

    def _skip_to_mark(self) -> bool:
        """Read the next mark, with the white space before it, if there are only separators before these: a mark may
        begin like a separator. False if only more text can tell.
        """
        if not self._buffer.strip():
            return False
        start, buffer, at = self._style.start, self._buffer, 0
        while at < len(buffer) and buffer[at] in _BETWEEN_CALLS and not start.startswith(buffer[at : at + len(start)]):
            at += 1
        first = buffer[at : at + len(start)]
        if not start.startswith(first):
            return True
        self._skip(len(buffer[:at].rstrip()))
        if first == start:
            num_chars = self._buffer.index(start) + len(start)
            self._raw, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return first == start

    def _skip(self, count: int) -> None:
        """Skip separators. They are dropped only if calls are around them."""
        if self._raw or not self.num_calls:
            self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> Iterator[Piece]:
        """Emit the supposed beginning of a call as text."""
        self._state = _State.TEXT
        text, self._raw = self._raw, ""
        if text:
            yield Text(text)


def _num_held(text: str, marker: str) -> int:
    """Count the characters at the end that may be a prefix of the marker, or the white space before it."""
    return len(text) - len(text[: find_begun_mark(text, (marker,))].rstrip()) if marker else 0
