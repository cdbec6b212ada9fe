"""Streaming parser for tool calls in a model's text.

    text ─▶ TEXT ──marker──▶ BETWEEN ──{──▶ CALL ──}──▶ BETWEEN ──end marker, or anything else──▶ TEXT

A call is a JSON object with `name` and `arguments` (or `parameters`), or, in some formats, a name before a JSON object
of arguments. It is emitted as soon as its function is known
and its arguments begin. An object that names no known function, or has other members, is not a call and is emitted as
text: no text of the model is lost.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

_BETWEEN_CALLS = " \t\r\n,;[]"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENTS)
# Half of a surrogate pair, which no answer can be encoded with. As an escape it is JSON.
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside of tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call, as soon as its function is known."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Text | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a family of models writes calls.

    `start`, `end`: markers around the calls. `bare`: a text that begins with JSON may be calls without a marker.
    `only_calls`: the text has calls only. `named`: a call may also be a name, then its arguments. `has_control_marks`:
    in some checkpoints the markers are control tokens, without which calls behind other text would be text.
    """

    start: str
    end: str = ""
    bare: bool = False
    only_calls: bool = False
    named: bool = False
    has_control_marks: bool = False
    arguments_key: str = "arguments"
    num_id_chars: int = 24


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat("<tool_call>", "</tool_call>", has_control_marks=True),
        "llama3_json": ToolFormat("<|python_tag|>", bare=True, arguments_key="parameters"),
        "mistral": ToolFormat("[TOOL_CALLS]", bare=True, named=True, has_control_marks=True, num_id_chars=9),
        "phi4_mini_json": ToolFormat("functools", bare=True),
        "granite": ToolFormat("<|tool_call|>", bare=True),
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
        return list(self._read())

    def finish(self) -> list[Piece]:
        """End of the text: return what is still held back.

        A forced call that is cut off before its function is known is dropped: it is no text for a client.
        """
        text = self._raw + self._buffer
        is_call = self._state is _State.CALL and self._reader.has_begun
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
        start, end = self._style.start, self._style.end
        first = self._buffer.lstrip()
        if start and not end and self.num_calls and not self._raw and start.startswith(first[: len(start)]):
            if len(first) < len(start):
                return
            num_chars = len(self._buffer) - len(first) + len(start)
            self._raw, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
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
                if not self._reader.has_begun:
                    # What was read is text and not searched again: the work must not grow with the square of a text.
                    self._raw, self._buffer = self._raw + self._buffer[:number], self._buffer[number:]
                    yield from self._give_up()
                    return
                self._state = _State.BETWEEN
            if self._reader.has_begun and not has_begun:
                has_begun = True
                self.num_calls += 1
            if self._reader.is_done or self._state is _State.BETWEEN:
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

    def _skip(self, count: int) -> None:
        """Skip separators. They are dropped only if calls are around them."""
        if self._raw or not self.num_calls:
            self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> Iterator[Piece]:
        """Emit the supposed beginning of a call as text."""
        self._state = _State.TEXT
        if self._raw:
            yield Text(self._raw)
        self._raw = ""


def _num_held(text: str, marker: str) -> int:
    """Count the characters at the end that may be a prefix of the marker, or the white space before it."""
    if not marker:
        return 0
    longest = next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip())


class NotACall(Exception):
    """The JSON object is not a tool call."""


class CallReader:
    """Parses one call, character by character. `names`: the known functions. Arguments before the name are buffered.

    With a `name`, which was read already, the call is only the object of its arguments: the reader begins where it
    would be after the name and the key of the arguments.
    """

    def __init__(self, index: int, names: Collection[str], name: str = "") -> None:
        self.is_done = False
        self.has_begun = False
        """True once CallBegun was emitted: from then on the call cannot be turned back into text."""
        self._index = index
        self._names = names
        self._name = name
        self._is_only_arguments = bool(name)
        self._depth = 1 if name else 0
        self._key = _ARGUMENTS[0] if name else ""
        self._is_value = bool(name)
        self._in_string = False
        self._is_escaped = False
        self._member: list[str] = []  # the key or the value that is being read
        self._member_start = ""  # its first character that is not white space
        self._arguments: list[str] = []  # not emitted yet
        self._had_arguments = False

    def push(self, char: str) -> Iterator[Piece]:
        """Return the pieces that the character completes. Raises NotACall."""
        yield from self._read(char)
        if self._is_only_arguments and self._depth == 1 and char == "}":
            yield from self._end_value()
            yield from self._end()

    def _read(self, char: str) -> Iterator[Piece]:
        was_in_string, before = self._in_string, self._depth
        self._track_nesting(char)
        is_mark = not was_in_string and before == 1 and not self._in_string
        if before == 0:
            return
        if self._depth == 0:
            yield from self._end_value()
            yield from self._end()
        elif is_mark and char == ":" and not self._is_value:
            self._key = _parse_string("".join(self._member))
            if self._key not in _KEYS:
                raise NotACall
            self._begin_member(is_value=True)
        elif is_mark and char == ",":
            yield from self._end_value()
        else:
            self._member.append(char)
            self._member_start = self._member_start or char.strip()
            if self._is_value and self._key in _ARGUMENTS and max(before, self._depth) > 1 and self._is_object:
                yield from self._emit(char)

    @property
    def _is_object(self) -> bool:
        """True if the arguments are an object. They may also be a string with JSON in it, emitted once complete."""
        return self._member_start == "{"

    def _track_nesting(self, char: str) -> None:
        if self._in_string:
            if self._is_escaped or char == "\\":
                self._is_escaped = not self._is_escaped
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _begin_member(self, *, is_value: bool) -> None:
        self._member, self._member_start, self._is_value = [], "", is_value

    def _end_value(self) -> Iterator[Piece]:
        text = "".join(self._member)
        if not self._is_value:
            if text.strip() or not self._key:
                raise NotACall
            return
        if self._key == "name":
            yield from self._set_name(_parse_string(text))
        elif self._key in _ARGUMENTS:
            if not self._is_object:
                yield from self._emit(_unwrap_arguments(text))
            self._had_arguments = True
        self._begin_member(is_value=False)

    def _set_name(self, name: str) -> Iterator[Piece]:
        if self._name or name not in self._names:
            raise NotACall
        self._name = name
        yield from self._emit("")

    def _emit(self, text: str) -> Iterator[Piece]:
        if text:
            self._arguments.append(text)
        if self._name and self._arguments:
            if not self.has_begun:
                self.has_begun = True
                yield CallBegun(self._index, self._name)
            yield CallArguments(self._index, "".join(self._arguments))
            self._arguments.clear()

    def _end(self) -> Iterator[Piece]:
        if not self._name:
            raise NotACall
        if not self._had_arguments:
            yield from self._emit("{}")
        self.is_done = True


def _parse_string(text: str) -> str:
    """Parse a JSON string. Raises NotACall."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value


def _unwrap_arguments(text: str) -> str:
    """Return the JSON inside a string, or {} for null. Raises NotACall."""
    if text.strip() == "null":
        return "{}"
    inner = _parse_string(text)
    try:
        value = json.loads(inner)
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", inner)
