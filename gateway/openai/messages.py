"""What an assistant's message is made of: text, and calls of functions."""

from collections.abc import Iterable
from typing import Any, Protocol
from uuid import uuid4

from gateway.openai.call_reader import CallArguments, Piece, Text
from gateway.openai.envelope import finish_reason
from gateway.openai.tool_choice import ToolUse
from gateway.openai.tool_parser import ToolCallParser
from tandem import FinishReason

Json = dict[str, Any]


class Deltas(Protocol):
    """Makes the deltas of one choice."""

    def push(self, text: str) -> list[Json]:
        """What the text adds."""
        ...

    def finish(self) -> list[Json]:
        """What was held back."""
        ...

    def reason(self, reason: FinishReason) -> str:
        """Why the choice ended."""
        ...


def deltas_of(use: ToolUse | None) -> Deltas:
    """For one choice."""
    parser = None if use is None else use.parser()
    return TextDeltas() if use is None or parser is None else CallDeltas(parser, use.num_id_chars)


class TextDeltas:
    """Of answers that are nothing but text."""

    def push(self, text: str) -> list[Json]:
        """See Deltas.push."""
        return [{"content": text}] if text else []

    def finish(self) -> list[Json]:
        """Nothing is held back."""
        return []

    def reason(self, reason: FinishReason) -> str:
        """See Deltas.reason."""
        return finish_reason(reason)


class CallDeltas:
    """Of answers that may have calls."""

    def __init__(self, parser: ToolCallParser, num_id_chars: int) -> None:
        self._parser = parser
        self._num_id_chars = num_id_chars

    def push(self, text: str) -> list[Json]:
        """See Deltas.push."""
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[Json]:
        """See Deltas.finish."""
        return self._deltas(self._parser.finish())

    def reason(self, reason: FinishReason) -> str:
        """`tool_calls` if there are any, unless they were cut off."""
        ended = reason is not FinishReason.LENGTH
        return "tool_calls" if ended and self._parser.num_calls else finish_reason(reason)

    def _deltas(self, pieces: Iterable[Piece]) -> list[Json]:
        return [self._delta(piece) for piece in _joined(pieces)]

    def _delta(self, piece: Piece) -> Json:
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        call_id = f"call_{uuid4().hex}" if self._num_id_chars > 9 else uuid4().hex
        function = {"name": piece.name, "arguments": ""}
        entry = {"index": piece.index, "id": call_id[: self._num_id_chars], "type": "function", "function": function}
        return {"tool_calls": [entry]}


def message_of(deltas: Iterable[Json]) -> Json:
    """The whole message that the deltas make."""
    texts: list[str] = []
    calls: dict[int, Json] = {}
    for delta in deltas:
        texts.append(delta.get("content", ""))
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls[part["index"]] = {key: part[key] for key in ("id", "type")} | {"function": dict(part["function"])}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    text = "".join(texts)
    message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind as one: arguments come character by character."""
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
