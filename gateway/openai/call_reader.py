"""Reads one tool call in JSON, character by character, into the pieces that all parsers of calls emit."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from mesh.domain.json_text import parse_json

_ARGUMENTS = ("arguments", "parameters")
_WITHOUT_MEANING = "id"
_KEYS = ("name", _WITHOUT_MEANING, "type", *_ARGUMENTS)
_HALF = re.compile("[\ud800-\udfff]")
# Marks around calls begin with these. JSON has them in texts only: elsewhere, the call ended without its braces.
_MARK_BEGINNINGS = "<`"
_CLOSING = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside of tool calls. `num_behind` characters behind it were read before it was known to be text: a mark,
    or what may be the beginning of one.
    """

    text: str
    num_behind: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning, where the parser of calls tells it from text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call, as soon as its function is known. AnswerParser sets `call_id`."""

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Text | Thought | CallBegun | CallArguments


def read_pieces(pieces: Iterator[Piece], num_unread: Callable[[], int]) -> list[Piece]:
    """Run a parser. `num_unread` counts the characters that it has beyond the piece that it has just made."""
    return [Text(piece.text, num_unread()) if isinstance(piece, Text) else piece for piece in pieces]


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
        self._closings = ["}"] if name else []  # of all that is open
        self._key = _ARGUMENTS[0] if name else ""
        self._is_value = bool(name)
        self._in_string = False
        self._is_escaped = False
        self._member: list[str] = []  # the key or the value that is being read
        self._member_start = ""  # its first character that is not white space
        self._arguments: list[str] = []  # not emitted yet
        self._had_arguments = False

    @property
    def _depth(self) -> int:
        return len(self._closings)

    def push(self, char: str) -> Iterator[Piece]:
        """Return the pieces that the character completes. Raises NotACall for one that no call can have there: if the
        call has begun, it ended before that character, without its last braces.
        """
        yield from self._read(char)
        if self._is_only_arguments and self._depth == 1 and char == "}":
            yield from self._end_value()
            yield from self._end()

    def close(self) -> Iterator[Piece]:
        """End a call without its last braces: return those of its arguments, if they make these JSON."""
        missing = "".join(reversed(self._closings[1:]))
        is_cut = missing and self.has_begun and self._is_value and self._key in _ARGUMENTS
        if is_cut and _is_json("".join(self._member) + missing):
            yield from self._emit(missing)

    def _read(self, char: str) -> Iterator[Piece]:
        was_in_string, before = self._in_string, self._depth
        if before and not was_in_string and self._is_out_of_place(char):
            raise NotACall
        self._track_nesting(char)
        is_mark = not was_in_string and before == 1 and not self._in_string
        if before == 0:
            return
        if self._depth == 0:
            yield from self._end_value()
            yield from self._end()
        elif is_mark and char == ":" and not self._is_value:
            # A call that has begun stays one: what it has beside its arguments means nothing.
            self._key = _WITHOUT_MEANING if self.has_begun else _parse_string("".join(self._member))
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

    def _is_out_of_place(self, char: str) -> bool:
        """True for a character that cannot be here: outside of texts, after an object of arguments, or before a key."""
        if char in _MARK_BEGINNINGS:
            return True
        if self._depth > 1 or not char.strip() or char in ",}]":
            return False
        is_behind_object = self._is_value and self._key in _ARGUMENTS and self._is_object
        is_before_key = not self._is_value and not self._member_start
        return is_behind_object or (is_before_key and char != '"')

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
        elif char in _CLOSING:
            self._closings.append(_CLOSING[char])
        elif char in "}]":
            self._closings.pop()

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


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _parse_string(text: str) -> str:
    """Parse a JSON string. Raises NotACall."""
    try:
        value = parse_json(text)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value


def _unwrap_arguments(text: str) -> str:
    """Return the JSON inside a string, or {} for null and for an empty string. Raises NotACall."""
    if text.strip() in ("null", '""'):
        return "{}"
    inner = _parse_string(text)
    try:
        value = parse_json(inner)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return escape_halves(inner)


def escape_halves(text: str) -> str:
    """JSON text with halves of surrogate pairs, which no answer can be encoded with, as escapes."""
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
