"""Streaming parser for harmony, the format in which gpt-oss answers: messages, each with a head and a body.

    text ─▶ HEAD ──<|message|>──▶ BODY ──<|end|>, <|call|> or <|return|>──▶ HEAD

A head names a channel, and a recipient if the message is a call: `<|channel|>analysis`, `<|channel|>final`,
`<|channel|>commentary to=functions.NAME <|constrain|>json`. The prompt ends with `<|start|>assistant`, so that the
first head begins behind it. A text without a head is the body of a final message: that of a continued message is one.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

from gateway.openai.call_reader import CallArguments, CallBegun, Piece, Text, Thought, read_pieces
from gateway.openai.tagged_calls import find_mark

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>", _BODY, "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_MAX_HEAD_CHARS = 512


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """gpt-oss's format, with the members that all formats of calls have."""

    has_control_marks: ClassVar[bool] = True
    arguments_key: ClassVar[str] = "arguments"
    num_id_chars: ClassVar[int] = 24


HARMONY_FORMATS = {"openai": HarmonyFormat()}
"""The key is the name of vLLM's parser."""


class HarmonyParser:
    """Parses one answer. `names`: the known functions. A call of another one is text. With `joins_thoughts`, messages
    of the channel `analysis` are text, too.
    """

    def __init__(self, names: Collection[str], *, joins_thoughts: bool) -> None:
        self._names = frozenset(names)
        self._joins_thoughts = joins_thoughts
        self._buffer = ""
        self._kind: type[Text | Thought] | type[CallArguments] | None = None  # of the body; None in a head
        self._is_blank = True  # nothing of the body has been emitted
        self._emitted: set[type] = set()
        self.num_calls = 0
        """Number of calls that have begun."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that the text completes."""
        self._buffer += text
        return read_pieces(self._read(), lambda: len(self._buffer))

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End of the text: return what is still held back. A head that has no body is dropped. A call that a limit cut
        (`is_cut`) keeps its arguments.
        """
        if self._kind is None:
            is_text = not is_cut and self._buffer.strip() and not self._buffer.lstrip().startswith(_HEADS)
            self._kind = Text if is_text else None
        if self._kind is None:
            return []
        pieces = [*self._body(self._buffer)] if self._buffer else []
        self._buffer = ""
        return pieces if is_cut else [*pieces, *self._end()]

    def _read(self) -> Iterator[Piece]:
        """Read heads and bodies until more text is needed."""
        previous = None
        while previous != (self._kind, len(self._buffer)):
            previous = self._kind, len(self._buffer)
            if self._kind is None:
                yield from self._read_head()
                continue
            at, mark = find_mark(self._buffer, _ENDS)
            body, self._buffer = self._buffer[:at], self._buffer[at:]
            if body:
                yield from self._body(body)
            if mark:
                yield from self._end()
                is_head = mark in _HEADS
                self._buffer = self._buffer if is_head else self._buffer[len(mark) :]

    def _read_head(self) -> Iterator[Piece]:
        head, mark, rest = self._buffer.partition(_BODY)
        if not _may_be_head(head):
            self._kind = Text
        elif len(head) > _MAX_HEAD_CHARS:  # text with its mark, which would begin the head again
            self._kind, self._buffer = Text, self._buffer[_MAX_HEAD_CHARS:]
            yield from self._body(head[:_MAX_HEAD_CHARS])
        elif mark:
            self._buffer = rest
            yield from self._begin(head)

    def _begin(self, head: str) -> Iterator[Piece]:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._names:
            self._kind = CallArguments
            self.num_calls += 1
            yield CallBegun(self.num_calls - 1, recipient[1])
        elif channel is not None and channel[1] == "analysis" and not self._joins_thoughts:
            self._kind = Thought
        else:
            self._kind = Text

    def _body(self, text: str) -> Iterator[Piece]:
        kind, is_first, self._is_blank = self._kind, self._is_blank, False
        if kind is CallArguments:
            yield CallArguments(self.num_calls - 1, text)
            return
        made = Thought if kind is Thought else Text
        yield made("\n" + text if is_first and made in self._emitted else text)
        self._emitted.add(made)

    def _end(self) -> Iterator[Piece]:
        if self._kind is CallArguments and self._is_blank:
            yield CallArguments(self.num_calls - 1, "{}")
        self._kind, self._is_blank = None, True


def _may_be_head(text: str) -> bool:
    first = text.lstrip()
    return any(first.startswith(mark) or mark.startswith(first) for mark in _HEADS)
