"""Streaming parser for tool calls between tags, and for calls written as in Python (tagged_formats.py).

    text ─▶ TEXT ──start──▶ HEAD ──name──▶ BETWEEN ◀──▶ VALUE ──end──▶ AFTER ─▶ HEAD or TEXT
                             └──name──▶ JSON ──}──▶ AFTER

A head that names no known function is not a call and is emitted as text, with its marks: no text of the model is lost.
Once a call has begun, its arguments are emitted as JSON while the model writes them: texts piece by piece, other values
once they are complete, because their type depends on the function's schema. Text between the
parameters of a call is dropped.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from typing import NoReturn

from gateway.openai.call_reader import CallArguments, CallBegun, CallReader, NotACall, Piece, Text, read_pieces
from gateway.openai.python_values import PythonValue
from gateway.openai.quoted_values import QuotedValue
from gateway.openai.tagged_formats import TaggedFormat
from gateway.schema import Json
from mesh.domain.json_text import parse_json

_MAX_HEAD_CHARS = 128  # no head is longer, without its name; text that is no call is held back for as long
_MAX_TAG_CHARS = 512  # no tag of a parameter is longer
_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TEXT_ONLY = frozenset({"string"})
# What models write for these, in any case: chat templates show them Python's spelling.
_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_MAX_SCHEMAS = 256
"""The search for a parameter's type ends after this many schemas, which clients write and may link in circles."""


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    BETWEEN = auto()
    VALUE = auto()
    JSON = auto()
    AFTER = auto()


class TaggedCallParser:
    """Parses one answer. `parameters`: the schemas of the known functions' arguments, by name."""

    def __init__(self, style: TaggedFormat, parameters: Mapping[str, Json]) -> None:
        self._style = style
        self._parameters = parameters
        self._state = _State.HEAD if style.bare else _State.TEXT
        self._next_start = style.starts[-1] if style.next_start is None else style.next_start
        self._buffer = ""
        self._raw = ""  # the mark before a head, with white space before it
        self._names = sorted(parameters, key=len, reverse=True)
        self._heads = [re.compile(head) for head in style.heads]
        self._behind_name = re.compile(style.behind_name)
        self._max_head_chars = _MAX_HEAD_CHARS + max(map(len, parameters), default=0)
        ends = "|".join(re.escape(mark) for mark in style.call_ends)
        self._item = re.compile(f"{style.parameter}|{ends}")
        self._name = ""
        self._num_parameters = 0
        self._value: _Value | PythonValue | QuotedValue = _Value(style, TEXT_ONLY)
        self._reader = CallReader(0, ())
        self.num_calls = 0
        """Number of calls that have begun."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that the text completes."""
        self._buffer += text
        return read_pieces(self._read(), self._num_unread)

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End of the text: return what is still held back. A call that a limit cut (`is_cut`) keeps its arguments."""
        pieces: list[Piece] = []
        while self._state is _State.HEAD:
            pieces += read_pieces(chain(self._give_up(), self._read()), self._num_unread)
        text, self._buffer = self._buffer, ""
        if not is_cut:
            pieces += self._close_call(text)
        if self._state is _State.AFTER:
            text = "" if self._may_go_on(text.lstrip()) else text
        is_text = self._state in (_State.TEXT, _State.AFTER) and not (self.num_calls and not text.strip())
        return [*pieces, Text(text)] if text and is_text else pieces

    def _num_unread(self) -> int:
        return len(self._raw) + len(self._buffer)

    def _read(self) -> Iterator[Piece]:
        """Run the state machine until it needs more text."""
        previous = None
        while previous != (self._state, len(self._buffer)):
            previous = self._state, len(self._buffer)
            if self._state is _State.TEXT:
                yield from self._read_text()
            elif self._state is _State.HEAD:
                yield from self._read_head()
            elif self._state is _State.BETWEEN:
                yield from self._read_between()
            elif self._state is _State.VALUE:
                yield from self._read_value()
            elif self._state is _State.JSON:
                yield from self._read_json()
            else:
                self._read_after()

    def _read_text(self) -> Iterator[Piece]:
        at, mark = find_mark(self._buffer, self._style.starts)
        text = self._buffer[:at].rstrip()
        if mark:
            self._state, self._raw = _State.HEAD, self._buffer[len(text) : at + len(mark)]
            self._buffer = self._buffer[at + len(mark) :]
        else:
            self._buffer = self._buffer[len(text) :]
        if text:
            yield Text(text)

    def _read_head(self) -> Iterator[Piece]:
        name, num_chars = self._find_name() if self._may_be_call() else ("", 0)
        if not name:
            if len(self._buffer) >= self._max_head_chars or not self._may_be_call():
                yield from self._give_up()
            return
        self._name, self._num_parameters, self._raw = name, 0, ""
        self._buffer = self._buffer[num_chars:]
        if not self._style.parameter:
            self._reader = CallReader(self.num_calls, (self._name,), self._name)
            self._state = _State.JSON
        else:
            yield CallBegun(self.num_calls, self._name)
            self._state = _State.BETWEEN
        self.num_calls += 1

    def _may_be_call(self) -> bool:
        """False for a text that begins without a mark and not as calls do."""
        has_mark = bool(self._raw) or self.num_calls > 0
        return has_mark or not self._buffer.strip() or self._buffer.lstrip().startswith(self._style.bare)

    def _find_name(self) -> tuple[str, int]:
        """Return the function's name and the length of the head, or "" and 0. Names are compared and not compiled into
        an expression, which for hundreds of long ones takes a quarter of a second.
        """
        for head in filter(None, (head.match(self._buffer) for head in self._heads)):
            for name in self._names:
                if self._buffer.startswith(name, head.end()):
                    behind = self._behind_name.match(self._buffer, head.end() + len(name))
                    if behind is not None:
                        return name, behind.end()
        return "", 0

    def _give_up(self) -> Iterator[Piece]:
        """Emit the supposed beginning of a call as text."""
        self._state = _State.TEXT
        text, self._raw = self._raw, ""
        if text:
            yield Text(text)

    def _read_between(self) -> Iterator[Piece]:
        item = self._item.search(self._buffer)
        if item is None:
            self._buffer = self._buffer[-_MAX_TAG_CHARS:]
            return
        self._buffer = self._buffer[item.end() :]
        if item.group(1) is None:
            yield self._arguments("}" if self._num_parameters else "{}")
            self._state = _State.AFTER if item.group() not in self._style.closings[-1:] else _State.TEXT
            return
        key = item.group(1).strip()
        yield self._arguments(f"{', ' if self._num_parameters else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        types = parameter_types(self._parameters[self._name], key)
        if self._style.value_ends:
            self._value = _Value(self._style, types)
        else:
            self._value = QuotedValue(self._style.quote) if self._style.quote else PythonValue()
        self._state = _State.VALUE

    def _read_value(self) -> Iterator[Piece]:
        text, num_read = self._value.read(self._buffer)
        self._buffer = self._buffer[num_read:]
        if self._value.is_done:
            self._state = _State.BETWEEN
        if text:
            yield self._arguments(text)

    def _read_json(self) -> Iterator[Piece]:
        for number, char in enumerate(self._buffer):
            try:
                yield from self._reader.push(char)
            except NotACall:
                yield from self._reader.close()
                self._state, self._buffer = _State.AFTER, self._buffer[number:]
                return
            if self._reader.is_done:
                self._state, self._buffer = _State.AFTER, self._buffer[number + 1 :]
                return
        self._buffer = ""

    def _read_after(self) -> None:
        """Skip the marks after a call, up to the next call or to other text."""
        text = self._buffer.lstrip()
        closing = next(filter(text.startswith, self._style.closings), "")
        if closing:
            self._buffer = text[len(closing) :]
            self._state = _State.TEXT if closing == self._style.closings[-1] else _State.AFTER
        elif text.startswith(self._next_start) and (self._next_start or not self._may_go_on(text)):
            self._buffer, self._state = text, _State.HEAD
        elif not self._may_go_on(text):
            self._state = _State.TEXT

    def _may_go_on(self, text: str) -> bool:
        """True if more text may make it a mark."""
        return any(mark.startswith(text) for mark in (*self._style.closings, self._next_start))

    def _close_call(self, text: str) -> Iterator[Piece]:
        """Return the rest of the arguments of a call without its last marks. `text`: the rest of the last value."""
        if self._state is _State.VALUE:
            yield self._arguments(self._value.last(text.removesuffix("\n") if self._style.has_lines else text) + "}")
        elif self._state is _State.BETWEEN:
            yield self._arguments("}" if self._num_parameters else "{}")
        elif self._state is _State.JSON:
            yield from self._reader.close()

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_calls - 1, text)


class _Value:
    """Reads one value. Texts are returned as they come, other types once the value is complete."""

    def __init__(self, style: TaggedFormat, types: frozenset[str]) -> None:
        self.is_done = False
        self._is_open = False  # the quote in front of a text has been returned
        self._style = style
        self._types = types
        self._marks = (*style.value_ends, *(f"\n{mark}" for mark in style.value_ends if style.has_lines))
        self._num_read = 0
        self._texts: list[str] = []

    def read(self, buffer: str) -> tuple[str, int]:
        """Return the JSON text that the buffer completes, and the number of characters that are read."""
        at, mark = find_mark(buffer, self._marks)
        text = buffer[:at]
        if self._style.has_lines and not self._num_read:
            text = text.removeprefix("\n")
        self._num_read += at
        if not mark:
            return self._part(text), at
        self.is_done = True
        is_own = mark.lstrip("\n") == self._style.value_ends[0]
        return self.last(text), at + (len(mark) if is_own else 0)

    def _part(self, text: str) -> str:
        if self._types != TEXT_ONLY:
            self._texts.append(text)
            return ""
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        quote = '"' if text and not self._is_open else ""
        self._is_open = self._is_open or bool(text)
        return quote + escaped

    def last(self, text: str) -> str:
        """Return the rest of the value's JSON, where `text` is the rest of it."""
        if self._types != TEXT_ONLY:
            return as_json("".join(self._texts) + text, self._types)
        part = self._part(text)
        return f'{part}"' if self._is_open else '""'


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first mark and the mark; without one, how much of the text cannot belong to a mark."""
    matches = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(matches) if matches else (find_begun_mark(text, marks), "")


def find_begun_mark(text: str, marks: Sequence[str]) -> int:
    """Return the place of the first end of the text that may begin a mark; the text's length if none may."""
    longest = min(max(map(len, marks)) - 1, len(text))
    places = range(len(text) - longest, len(text))
    return next((at for at in places if any(mark.startswith(text[at:]) for mark in marks)), len(text))


def parameter_types(parameters: object, name: str) -> frozenset[str]:
    """Return the JSON types that a function's schema allows for one parameter: all if it does not say."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return _types(properties.get(name), parameters, {}) if isinstance(properties, dict) else _ALL


def _types(schema: object, root: object, types_by_schema: dict[int, frozenset[str]]) -> frozenset[str]:
    """`types_by_schema`: those of schemas that were met before, by `id`; all types for one that is not finished."""
    if not isinstance(schema, dict):
        return _ALL
    if id(schema) in types_by_schema or len(types_by_schema) >= _MAX_SCHEMAS:
        return types_by_schema.get(id(schema), _ALL)
    types = types_by_schema[id(schema)] = _ALL
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types = frozenset(str(name) for name in names)
        types = types if types <= _ALL else _ALL  # "float" and the like are no types of JSON schemas
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            types &= {_type_of(value) for value in values}
    if isinstance(schema.get("$ref"), str):
        types &= _types(_resolve(schema["$ref"], root), root, types_by_schema)
    for key in ("anyOf", "oneOf"):
        if members := _members(schema, key):
            types &= frozenset().union(*(_types(member, root, types_by_schema) for member in members))
    for member in _members(schema, "allOf"):
        types &= _types(member, root, types_by_schema)
    types_by_schema[id(schema)] = types or _ALL
    return types_by_schema[id(schema)]


def _members(schema: Json, key: str) -> list[object]:
    """Return the schemas that `key` combines; none if it is no list, or too long to look at."""
    members = schema.get(key)
    return members if isinstance(members, list) and len(members) <= _MAX_SCHEMAS else []


def _resolve(reference: str, root: object) -> object:
    """Return the part of the schema that `#/...` names, None if there is none."""
    node = root if reference.startswith("#") else None
    for key in reference.removeprefix("#").split("/")[1:]:
        node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the value as JSON text: as the model wrote it if that is JSON of an allowed type, else as a string."""
    if types == TEXT_ONLY:
        return json.dumps(text, ensure_ascii=False)
    written = text.strip()
    written = _LITERALS.get(written.lower(), written)
    try:
        kind = _type_of(parse_json(written, parse_constant=_refuse_constant))
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind == "integer" and "number" in types)
    if "string" in types and (kind == "string" or not fits):
        return json.dumps(text, ensure_ascii=False)
    return written


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
