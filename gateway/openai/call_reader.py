"""One call of a function, read character by character."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is part of no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose function is known."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Text | CallBegun | CallArguments


class NotACall(Exception):
    """The object is something else."""


class CallReader:
    """`names`: functions that there are. Arguments that come before the name wait for it."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.is_done = False
        self.has_begun = False
        """Function and the beginning of the arguments are told, so the call can no longer be taken back."""
        self._index = index
        self._names = names
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key = ""
        self._is_value = False
        self._member: list[str] = []  # the key or the value that is being read
        self._name = ""
        self._arguments = ""  # not told yet
        self._had_arguments = False

    def push(self, char: str) -> Iterator[Piece]:
        """What the character completes. Raises NotACall."""
        was_in_string, before = self._in_string, self._depth
        self._follow(char)
        is_mark = not was_in_string and before == 1 and not self._in_string
        if before == 0:
            return
        if self._depth == 0:
            yield from self._end_value()
            yield from self._end()
        elif is_mark and char == ":" and not self._is_value:
            self._begin_value()
        elif is_mark and char == ",":
            yield from self._end_value()
        else:
            self._member.append(char)
            if self._is_value and self._key in _ARGUMENTS and max(before, self._depth) > 1 and self._is_object:
                yield from self._tell(char)

    @property
    def _is_object(self) -> bool:
        """Arguments may be a text with JSON in it, too; that is told when it is whole."""
        return next((char for char in self._member if not char.isspace()), "") == "{"

    def _follow(self, char: str) -> None:
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

    def _begin_value(self) -> None:
        self._key = _read("".join(self._member))
        if self._key not in _KEYS:
            raise NotACall
        self._member, self._is_value = [], True

    def _end_value(self) -> Iterator[Piece]:
        text = "".join(self._member)
        if not self._is_value:
            if text.strip() or not self._key:
                raise NotACall
            return
        if self._key == "name":
            yield from self._named(_read(text))
        elif self._key in _ARGUMENTS:
            if not self._is_object:
                yield from self._tell(_arguments(text))
            self._had_arguments = True
        self._member, self._is_value = [], False

    def _named(self, name: str) -> Iterator[Piece]:
        if self._name or name not in self._names:
            raise NotACall
        self._name = name
        yield from self._tell("")

    def _tell(self, text: str) -> Iterator[Piece]:
        self._arguments += text
        if self._name and self._arguments:
            if not self.has_begun:
                self.has_begun = True
                yield CallBegun(self._index, self._name)
            yield CallArguments(self._index, self._arguments)
            self._arguments = ""

    def _end(self) -> Iterator[Piece]:
        if not self._name:
            raise NotACall
        if not self._had_arguments:
            yield from self._tell("{}")
        self.is_done = True


def _read(text: str) -> str:
    """A JSON string. Raises NotACall."""
    try:
        value = json.loads(text)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value


def _arguments(text: str) -> str:
    """Of arguments that are no object: the JSON in a text, or none. Raises NotACall."""
    if text.strip() == "null":
        return "{}"
    inner = _read(text)
    try:
        value = json.loads(inner)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return inner
