"""From the model's text to the parts of a chat's answer (content, reasoning, calls), for every API that answers chats.

token events ─▶ AnswerParser ─▶ pieces (reasoning, text, calls) ─▶ chunks of chat completions
                                                                └▶ BlockParser ─▶ Anthropic's blocks, items of Responses
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import uuid4

from gateway.exchange import Exchange
from gateway.openai.call_reader import CallArguments, CallBegun, Piece, Text, Thought
from gateway.openai.completion_members import finish_reason
from gateway.openai.harmony import HarmonyFormat, HarmonyParser
from gateway.openai.harmony_structure import in_harmony
from gateway.openai.reasoning import REASONING_FORMATS, ReasoningParser
from gateway.openai.requests import ChatBody
from gateway.openai.sdk_arguments import chat_arguments
from gateway.openai.tool_choice import CALL_FORMATS, CallParser, ToolUse, parse_tool_use
from gateway.schema import structure_arguments
from gateway.settings import REASONING_PARSERS
from tandem import FinishReason, GenerateArguments, TokenEvent, Usage


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parsers of the model's text: for tool calls, and for reasoning. One of harmony parses both."""

    tool_use: ToolUse | None
    reasoning_parser: str
    is_harmony: bool = False

    def parser(self, *, in_reasoning: bool = False) -> "AnswerParser":
        """Return a parser for one choice. `in_reasoning`: the prompt ends inside a reasoning block."""
        use = self.tool_use
        reasoning: ReasoningParser | None = None
        if self.is_harmony:
            names = [function.name for function in use.functions] if use is not None else []
            calls: CallParser | None = HarmonyParser(names, joins_thoughts=self.reasoning_parser == "none")
        else:
            calls = None if use is None else use.parser()
            if self.reasoning_parser != "none":
                style = REASONING_FORMATS[self.reasoning_parser]
                reasoning = ReasoningParser(style, begins_within=in_reasoning or style.begins_within)
        if use is None:
            return AnswerParser(calls, reasoning)
        return AnswerParser(calls, reasoning, num_id_chars=use.num_id_chars, is_parallel=use.is_parallel)


async def plan_chat(exchange: Exchange, body: ChatBody) -> tuple[GenerateArguments, AnswerFormat]:
    """Return the router call for a chat, and how to parse its text. Raises InvalidRequest.

    Large bodies are worked on a thread: the schema of forced calls, sent as text, is made of all their tools.
    """
    return await exchange.read(lambda _: _plan(exchange, body))


def _plan(exchange: Exchange, body: ChatBody) -> tuple[GenerateArguments, AnswerFormat]:
    style = CALL_FORMATS.get(_call_format(exchange, body.model))
    tool_use = parse_tool_use(body, style)
    arguments = chat_arguments(body, exchange.model(body.model), tool_use)
    if isinstance(style, HarmonyFormat):
        parser = "openai_gptoss" if body.separate_reasoning else "none"
        return in_harmony(arguments, tool_use), AnswerFormat(tool_use, parser, is_harmony=True)
    if isinstance(arguments.get("json_schema"), dict):
        arguments["json_schema"] = json.dumps(arguments["json_schema"])
    parser = _reasoning_parser(exchange, body, tool_use)
    if parser != "none" and REASONING_FORMATS[parser].has_control_marks and body.skip_special_tokens is None:
        arguments |= GenerateArguments(skip_special_tokens=False, include_eos=False)
    return arguments, AnswerFormat(tool_use, parser)


def _call_format(exchange: Exchange, model: str) -> str:
    """Return a key of CALL_FORMATS: the configured one, else that of the chat template; "" if unknown."""
    if exchange.settings.tool_call_parser != "auto":
        return exchange.settings.tool_call_parser
    served = exchange.model(model)
    return served.tool_call_format if served is not None else ""


def _reasoning_parser(exchange: Exchange, body: ChatBody, tool_use: ToolUse | None) -> str:
    """Return a key of REASONING_FORMATS, or "none". Structured output has no reasoning before it. Without a configured
    parser, a template with reasoning gets that of the model's call format, or `qwen3`.
    """
    if not body.separate_reasoning or structure_arguments(body) or (tool_use is not None and tool_use.is_forced):
        return "none"
    if exchange.settings.reasoning_parser != "auto":
        return exchange.settings.reasoning_parser
    served = exchange.model(body.model)
    if served is None or not served.has_reasoning:
        return "none"
    return served.tool_call_format if served.tool_call_format in REASONING_PARSERS else "qwen3"


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
    """`num_behind` is that of Text."""

    block: Block
    text: str
    num_behind: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class BlockEnded:
    block: Block


BlockStep = BlockBegun | BlockAdded | BlockEnded


class BlockParser:
    """Parses the events of one choice into blocks, one after the other. Its attributes are the answer so far.

    `reason` is OpenAI's finish reason, "" until the end. Reasoning tokens include the mark that ends the reasoning.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._answer = answer_format.parser()
        self.blocks: list[Block] = []
        self.usage = Usage()
        self.num_reasoning_tokens = 0
        self.reason = ""

    def read(self, event: TokenEvent, text: str) -> list[BlockStep]:
        """Return what an event changes. `text` is the event's text as the client may see it."""
        if event.in_reasoning:  # set on the first event only
            self._answer = self._format.parser(in_reasoning=True)
        steps = list(self._steps(self._answer.push(text)))
        if event.token is not None and self.blocks and self.blocks[-1].kind == "reasoning":
            self.num_reasoning_tokens += 1
        if event.finish_reason is not None:
            steps += self._steps(self._answer.finish(event.finish_reason))
            steps += [BlockEnded(block) for block in self.blocks[-1:]]
            self.usage = event.usage or self.usage
            self.reason = self._answer.reason(event.finish_reason)
        return steps

    def _steps(self, pieces: Iterable[Piece]) -> Iterator[BlockStep]:
        for piece in pieces:
            if isinstance(piece, CallBegun):
                yield from self._begin(Block(len(self.blocks), "call", piece.call_id, piece.name))
            elif isinstance(piece, Thought):
                yield from self._add("reasoning", piece.text)
            elif isinstance(piece, Text):
                yield from self._add("text", piece.text, piece.num_behind)
            elif piece.text:
                yield from self._add("call", piece.text)

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str, num_behind: int = 0) -> Iterator[BlockStep]:
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._begin(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.texts.append(text)
        yield BlockAdded(block, text, num_behind)

    def _begin(self, block: Block) -> Iterator[BlockStep]:
        if self.blocks:
            yield BlockEnded(self.blocks[-1])
        self.blocks.append(block)
        yield BlockBegun(block)


class AnswerParser:
    """Parses the text of one choice into pieces: reasoning, text and calls. Stateful.

    `reasoning` splits off reasoning in front, if the model may write any there; `calls` finds the calls in the rest.
    The answer has the first call only, unless `is_parallel`. `num_id_chars` is the length of the ids of calls.
    """

    def __init__(
        self,
        calls: CallParser | None,
        reasoning: ReasoningParser | None = None,
        *,
        num_id_chars: int = HarmonyFormat.num_id_chars,
        is_parallel: bool = True,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._num_id_chars = num_id_chars
        self._is_parallel = is_parallel

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that the text adds; text may be held back."""
        return self._pieces("", text) if self._reasoning is None else self._pieces(*self._reasoning.push(text))

    def finish(self, reason: FinishReason) -> list[Piece]:
        """Return the pieces of the text that is still held back. A call that the model left open is closed, unless the
        length limit cut it off.
        """
        pieces = [] if self._reasoning is None else self._pieces(*self._reasoning.finish())
        if self._calls is not None:
            pieces += self._shown(self._calls.finish(is_cut=reason is FinishReason.LENGTH))
        return pieces

    def reason(self, reason: FinishReason) -> str:
        """Return OpenAI's finish reason: `tool_calls` if there are any, unless the length limit cut them off. Call it
        after `finish`.
        """
        ended = reason is not FinishReason.LENGTH
        has_calls = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if ended and has_calls else finish_reason(reason)

    def _pieces(self, reasoning: str, text: str) -> list[Piece]:
        pieces: list[Piece] = [Thought(reasoning)] if reasoning else []
        num_held = 0 if self._reasoning is None else self._reasoning.num_held
        if self._calls is not None:
            return pieces + self._shown(self._calls.push(text), num_held)
        return [*pieces, Text(text, num_held)] if text else pieces

    def _shown(self, pieces: Iterable[Piece], num_held: int = 0) -> list[Piece]:
        """The pieces of calls that the answer has. Adjacent ones of one kind are merged, because parsers emit arguments
        character by character. `num_held` characters behind them are held back before calls are looked for.
        """
        shown: list[Piece] = []
        for piece in pieces:
            last = shown[-1] if shown else None
            if not isinstance(piece, Text | Thought) and piece.index > 0 and not self._is_parallel:
                continue
            if isinstance(piece, CallBegun):
                shown.append(replace(piece, call_id=self._new_id()))
            elif isinstance(piece, Text):
                before = last.text if isinstance(last, Text) else ""
                shown[len(shown) - bool(before) :] = [Text(before + piece.text, piece.num_behind + num_held)]
            elif isinstance(piece, Thought) and isinstance(last, Thought):
                shown[-1] = Thought(last.text + piece.text)
            elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
                shown[-1] = CallArguments(piece.index, last.text + piece.text)
            else:
                shown.append(piece)
        return shown

    def _new_id(self) -> str:
        call_id = f"call_{uuid4().hex}" if self._num_id_chars > 9 else uuid4().hex
        return call_id[: self._num_id_chars]
