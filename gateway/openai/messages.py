"""Chat messages and their deltas from a model's text: content, reasoning and tool calls."""

from collections.abc import Iterable
from enum import Enum, auto
from typing import Protocol
from uuid import uuid4

from gateway.openai.response_parts import finish_reason
from gateway.openai.tool_choice import CallParser, ToolUse
from gateway.openai.tool_parser import CallArguments, Piece, Text
from gateway.schema import Json
from tandem import FinishReason

_OPEN, _CLOSE = "<think>", "</think>"


class _State(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningReader:
    """Splits reasoning between <think> and </think> from one streamed answer: Qwen3, QwQ, DeepSeek-R1 and relatives.

        START ──<think>──▶ REASONING ──</think>──▶ ANSWER
          └──anything else──▶ ANSWER; REASONING if `begins_within`
    `begins_within`: the chat template itself writes <think>. Only the first <think> is a mark. White space around
    reasoning is dropped.
    """

    def __init__(self, *, begins_within: bool = False) -> None:
        self._begins_within = begins_within
        self._state = _State.START
        self._buffer = ""
        self._is_blank = True  # nothing of the current state's text has been emitted yet

    def push(self, text: str) -> tuple[str, str]:
        """Return what the text adds to the reasoning and to the answer. Text that may begin a marker is held back."""
        self._buffer += text
        if self._state is _State.START:
            self._read_start()
        reasoning = self._read_reasoning() if self._state is _State.REASONING else ""
        return reasoning, self._read_answer() if self._state is _State.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the answer that are still held back."""
        remaining, self._buffer = self._buffer, ""
        if self._state is _State.REASONING:
            return remaining.rstrip(), ""
        if self._state is _State.START:
            return (remaining.strip(), "") if self._begins_within else ("", remaining)
        return "", ""

    def _read_start(self) -> None:
        """Leave START, without its mark, once the text shows whether it begins with <think>."""
        first = self._buffer.lstrip()
        if first.startswith(_OPEN):
            self._state, self._buffer = _State.REASONING, first.removeprefix(_OPEN)
        elif _OPEN.startswith(first):
            return  # empty, or a possible prefix of <think>
        elif self._begins_within:
            self._state = _State.REASONING
        else:
            # Without reasoning, leading white space belongs to the answer.
            self._state, self._is_blank = _State.ANSWER, False

    def _read_reasoning(self) -> str:
        if self._is_blank:
            self._buffer = self._buffer.lstrip()
        text, mark, remaining = self._buffer.partition(_CLOSE)
        if mark:
            self._state, self._buffer, self._is_blank = _State.ANSWER, remaining, True
            return text.rstrip()
        text = text[: len(text) - _num_held(text)]
        self._buffer = self._buffer[len(text) :]
        self._is_blank = self._is_blank and not text
        return text

    def _read_answer(self) -> str:
        text = self._buffer.lstrip() if self._is_blank else self._buffer
        self._buffer = ""
        self._is_blank = self._is_blank and not text
        return text


def _num_held(text: str) -> int:
    """Count the characters at the end that may belong to </think>, or to the white space before it."""
    mark = next((size for size in range(min(len(_CLOSE) - 1, len(text)), 0, -1) if text.endswith(_CLOSE[:size])), 0)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip())


class Deltas(Protocol):
    """Turns one choice's text into deltas. Stateful."""

    def push(self, text: str) -> list[Json]:
        """Return the deltas that the text adds; text may be held back."""
        ...

    def finish(self) -> list[Json]:
        """Return the deltas of the text that is still held back."""
        ...

    def reason(self, reason: FinishReason) -> str:
        """Return OpenAI's finish reason. Call it after `finish`."""
        ...


def make_deltas(tool_use: ToolUse | None, reader: ReasoningReader | None = None) -> Deltas:
    """Return the Deltas of one choice. `reader` splits off reasoning, if the model may write any."""
    parser = None if tool_use is None else tool_use.parser()
    if tool_use is None or parser is None:
        deltas: Deltas = TextDeltas()
    else:
        deltas = CallDeltas(parser, tool_use.num_id_chars, is_parallel=tool_use.is_parallel)
    return deltas if reader is None else ReasoningDeltas(reader, deltas)


class TextDeltas:
    """Deltas of answers that are only text."""

    def push(self, text: str) -> list[Json]:
        return [{"content": text}] if text else []

    def finish(self) -> list[Json]:
        return []

    def reason(self, reason: FinishReason) -> str:
        return finish_reason(reason)


class ReasoningDeltas:
    """Deltas of answers that may begin with reasoning; `answer` has the rest."""

    def __init__(self, reader: ReasoningReader, answer: Deltas) -> None:
        self._reader = reader
        self._answer = answer

    def push(self, text: str) -> list[Json]:
        return self._deltas(*self._reader.push(text))

    def finish(self) -> list[Json]:
        return [*self._deltas(*self._reader.finish()), *self._answer.finish()]

    def reason(self, reason: FinishReason) -> str:
        return self._answer.reason(reason)

    def _deltas(self, reasoning: str, text: str) -> list[Json]:
        return [*([{"reasoning_content": reasoning}] if reasoning else []), *self._answer.push(text)]


class CallDeltas:
    """Deltas of answers that may contain tool calls: of the first one only, unless `is_parallel`."""

    def __init__(self, parser: CallParser, num_id_chars: int, *, is_parallel: bool = True) -> None:
        self._parser = parser
        self._is_parallel = is_parallel
        self._num_id_chars = num_id_chars

    def push(self, text: str) -> list[Json]:
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[Json]:
        return self._deltas(self._parser.finish())

    def reason(self, reason: FinishReason) -> str:
        """`tool_calls` if there are any, unless the length limit cut them off."""
        ended = reason is not FinishReason.LENGTH
        return "tool_calls" if ended and self._parser.num_calls else finish_reason(reason)

    def _deltas(self, pieces: Iterable[Piece]) -> list[Json]:
        shown = (piece for piece in pieces if self._is_parallel or isinstance(piece, Text) or piece.index == 0)
        return [self._delta(piece) for piece in _joined(shown)]

    def _delta(self, piece: Piece) -> Json:
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        call_id = f"call_{uuid4().hex}" if self._num_id_chars > 9 else uuid4().hex
        function = {"name": piece.name, "arguments": ""}
        entry = {"index": piece.index, "id": call_id[: self._num_id_chars], "type": "function", "function": function}
        return {"tool_calls": [entry]}


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent pieces of one kind: the parser emits arguments character by character."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
            joined[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def build_message(deltas: Iterable[Json]) -> Json:
    """Merge deltas into the message of a non-streaming answer."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, Json] = {}
    for delta in deltas:
        texts.append(delta.get("content", ""))
        reasoning.append(delta.get("reasoning_content", ""))
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls[part["index"]] = {key: part[key] for key in ("id", "type")} | {"function": dict(part["function"])}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    text, thoughts = "".join(texts), "".join(reasoning)
    content = text if text or not (calls or thoughts) else None
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    return message | ({"tool_calls": list(calls.values())} if calls else {})
