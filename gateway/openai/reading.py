"""From the model's text to the parts of a chat's answer (content, reasoning, calls), for every API that answers chats.

token events ─▶ Deltas (reasoning, text, calls) ─▶ chunks of chat completions
                                                └▶ BlockReader ─▶ Anthropic's content blocks, items of /v1/responses
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol
from uuid import uuid4

from gateway.exchange import Exchange
from gateway.openai.call_reader import CallArguments, Piece, Text, Thought
from gateway.openai.harmony import HarmonyFormat, HarmonyParser
from gateway.openai.harmony_structure import in_harmony
from gateway.openai.parameters import chat_arguments
from gateway.openai.reasoning import REASONING_FORMATS, ReasoningReader
from gateway.openai.requests import ChatBody
from gateway.openai.response_parts import finish_reason
from gateway.openai.tool_choice import CALL_FORMATS, CallParser, ToolUse, parse_tool_use
from gateway.schema import Json, structure_arguments
from tandem import FinishReason, GenerateArguments, TokenEvent, Usage


@dataclass(frozen=True, slots=True)
class Reading:
    """The parsers of the model's text: for tool calls, and for reasoning. One of harmony parses both."""

    tool_use: ToolUse | None
    reasoning_parser: str
    is_harmony: bool = False

    def deltas(self, *, in_reasoning: bool = False) -> "Deltas":
        """Return a new parser for one choice. `in_reasoning`: the prompt ends inside a reasoning block."""
        if self.is_harmony:
            names = [] if self.tool_use is None else [function.name for function in self.tool_use.functions]
            is_parallel = self.tool_use is None or self.tool_use.is_parallel
            parser = HarmonyParser(names, joins_thoughts=self.reasoning_parser == "none")
            return CallDeltas(parser, HarmonyFormat.num_id_chars, is_parallel=is_parallel)
        if self.reasoning_parser == "none":
            return make_deltas(self.tool_use)
        style = REASONING_FORMATS[self.reasoning_parser]
        reader = ReasoningReader(style, begins_within=in_reasoning or style.begins_within)
        return make_deltas(self.tool_use, reader)


async def plan_chat(exchange: Exchange, body: ChatBody) -> tuple[GenerateArguments, Reading]:
    """Return the router call for a chat, and how to read its text. Raises InvalidRequest.

    Large bodies are worked on a thread: the schema of forced calls, sent as text, is made of all their tools.
    """
    return await exchange.read(lambda _: _plan(exchange, body))


def _plan(exchange: Exchange, body: ChatBody) -> tuple[GenerateArguments, Reading]:
    style = CALL_FORMATS.get(exchange.tool_call_format(body.model))
    tool_use = parse_tool_use(body, style)
    arguments = chat_arguments(body, exchange.model(body.model), tool_use)
    if isinstance(style, HarmonyFormat):
        parser = "openai_gptoss" if body.separate_reasoning else "none"
        return in_harmony(arguments, tool_use), Reading(tool_use, parser, is_harmony=True)
    if isinstance(arguments.get("json_schema"), dict):
        arguments["json_schema"] = json.dumps(arguments["json_schema"])
    parser = _reasoning_parser(exchange, body, tool_use)
    if parser != "none" and REASONING_FORMATS[parser].has_control_marks and body.skip_special_tokens is None:
        arguments |= GenerateArguments(skip_special_tokens=False, include_eos=False)
    return arguments, Reading(tool_use, parser)


def _reasoning_parser(exchange: Exchange, body: ChatBody, tool_use: ToolUse | None) -> str:
    """Return the parser to use: none for structured output, which has no reasoning before it."""
    if not body.separate_reasoning or structure_arguments(body) or (tool_use is not None and tool_use.is_forced):
        return "none"
    return exchange.reasoning_parser(body.model)


@dataclass(slots=True)
class Block:
    """A part of an answer. `call_id` and `name` are those of a call, whose text is its arguments."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class BlockBegun:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockAdded:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    block: Block


BlockStep = BlockBegun | BlockAdded | BlockEnded


class BlockReader:
    """Reads the events of one choice as blocks, one after the other. Its attributes are the answer so far.

    `reason` is OpenAI's finish reason, "" until the end. Reasoning tokens include the mark that ends the reasoning.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._deltas = reading.deltas()
        self.blocks: list[Block] = []
        self.usage = Usage()
        self.num_reasoning_tokens = 0
        self.reason = ""

    def read(self, event: TokenEvent, text: str) -> list[BlockStep]:
        """Return what an event changes. `text` is the event's text as the client may see it."""
        if event.in_reasoning:  # set on the first event only
            self._deltas = self._reading.deltas(in_reasoning=True)
        steps = list(self._steps(self._deltas.push(text)))
        if event.token is not None and self.blocks and self.blocks[-1].kind == "reasoning":
            self.num_reasoning_tokens += 1
        if event.finish_reason is not None:
            steps += self._steps(self._deltas.finish(event.finish_reason))
            steps += [BlockEnded(block) for block in self.blocks[-1:]]
            self.usage = event.usage or self.usage
            self.reason = self._deltas.reason(event.finish_reason)
        return steps

    def _steps(self, deltas: Iterable[Json]) -> Iterator[BlockStep]:
        for delta in deltas:
            if "reasoning_content" in delta:
                yield from self._add("reasoning", delta["reasoning_content"])
            elif "content" in delta:
                yield from self._add("text", delta["content"])
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    yield from self._begin(Block(len(self.blocks), "call", part["id"], part["function"]["name"]))
                if part["function"]["arguments"]:
                    yield from self._add("call", part["function"]["arguments"])

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[BlockStep]:
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._begin(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.texts.append(text)
        yield BlockAdded(block, text)

    def _begin(self, block: Block) -> Iterator[BlockStep]:
        if self.blocks:
            yield BlockEnded(self.blocks[-1])
        self.blocks.append(block)
        yield BlockBegun(block)


class Deltas(Protocol):
    """Turns one choice's text into deltas. Stateful."""

    def push(self, text: str) -> list[Json]:
        """Return the deltas that the text adds; text may be held back."""
        ...

    def finish(self, reason: FinishReason) -> list[Json]:
        """Return the deltas of the text that is still held back. A call that the model left open is closed, unless
        the length limit cut it off.
        """
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

    def finish(self, reason: FinishReason) -> list[Json]:
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

    def finish(self, reason: FinishReason) -> list[Json]:
        return [*self._deltas(*self._reader.finish()), *self._answer.finish(reason)]

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

    def finish(self, reason: FinishReason) -> list[Json]:
        return self._deltas(self._parser.finish(is_cut=reason is FinishReason.LENGTH))

    def reason(self, reason: FinishReason) -> str:
        """`tool_calls` if there are any, unless the length limit cut them off."""
        ended = reason is not FinishReason.LENGTH
        return "tool_calls" if ended and self._parser.num_calls else finish_reason(reason)

    def _deltas(self, pieces: Iterable[Piece]) -> list[Json]:
        shown = (
            piece for piece in pieces if self._is_parallel or isinstance(piece, Text | Thought) or piece.index == 0
        )
        return [self._delta(piece) for piece in _joined(shown)]

    def _delta(self, piece: Piece) -> Json:
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text}
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
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + piece.text)
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
