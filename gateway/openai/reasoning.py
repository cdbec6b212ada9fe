"""Reasoning in front of an answer, between marks."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from gateway.openai.tagged_calls import find_begun_mark, find_mark


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How models mark reasoning.

    `marks`: the pairs that may be around it. `begins_within`: the first mark is always missing. `calls`: marks of
    calls, which end the reasoning, too, because models leave out its own. `around`: pairs of marks that may be around
    the rest of the answer, and are no part of it. `has_control_marks`: some of these may be control tokens, which
    detokenising drops unless it is asked not to.
    """

    marks: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    begins_within: bool = False
    calls: tuple[str, ...] = ()
    around: tuple[tuple[str, str], ...] = ()
    has_control_marks: bool = False


_THINK = ReasoningFormat()
_COHERE = ReasoningFormat(
    (("<|START_THINKING|>", "<|END_THINKING|>"),),
    around=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    has_control_marks=True,
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": _THINK,
        "deepseek_r1": ReasoningFormat(begins_within=True),
        "mistral": ReasoningFormat((("[THINK]", "[/THINK]"), ("<think>", "</think>")), has_control_marks=True),
        "kimi_k2": ReasoningFormat(calls=("<|tool_calls_section_begin|>",), has_control_marks=True),
        "minimax_m2": ReasoningFormat(calls=("<minimax:tool_call>",), has_control_marks=True),
        "seed_oss": ReasoningFormat((("<seed:think>", "</seed:think>"),), has_control_marks=True),
        "cohere_command3": _COHERE,
        "cohere_command4": _COHERE,
        "hunyuan_a13b": ReasoningFormat(around=(("<answer>", "</answer>"),)),
        "gemma4": ReasoningFormat(
            (("<|channel>thought\n", "<channel|>"),), calls=("<|tool_call>",), has_control_marks=True
        ),
        "apertus": ReasoningFormat((("<|inner_prefix|>", "<|inner_suffix|>"),), has_control_marks=True),
    }
)
"""Keys are the names of vLLM's parsers; for Apertus it has none."""


class _State(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits reasoning from one streamed answer.

        START ──opening mark──▶ REASONING ──closing mark──▶ ANSWER
          └──anything else──▶ ANSWER; REASONING if `begins_within`
    `begins_within`: the chat template itself writes the opening mark. Only the first one is a mark. White space around
    reasoning is dropped.
    """

    def __init__(self, style: ReasoningFormat, *, begins_within: bool) -> None:
        self._style = style
        self._begins_within = begins_within
        self._closings = [closing for _, closing in style.marks]
        self._answer = _Answer(style)
        self._state = _State.START
        self._buffer = ""
        self._is_blank = True  # nothing of the reasoning has been emitted yet

    @property
    def num_held(self) -> int:
        """Characters behind the answer so far that may be a mark, or are one."""
        return self._answer.num_held

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
        return "", self._answer.finish()

    def _read_start(self) -> None:
        """Leave START, without its mark, once the text shows whether it begins with one."""
        first = self._buffer.lstrip()
        for opening, closing in self._style.marks:
            if first.startswith(opening):
                self._state, self._buffer = _State.REASONING, first.removeprefix(opening)
                self._closings = [closing]
                return
        if any(opening.startswith(first) for opening, _ in self._style.marks):
            return  # empty, or a possible prefix of a mark
        if self._begins_within:
            self._state = _State.REASONING
        else:
            # Without reasoning, leading white space belongs to the answer.
            self._state, self._answer = _State.ANSWER, _Answer(self._style, keeps_blanks=True)

    def _read_reasoning(self) -> str:
        if self._is_blank:
            self._buffer = self._buffer.lstrip()
        at, mark = find_mark(self._buffer, [*self._closings, *self._style.calls])
        text = self._buffer[:at].rstrip()
        if mark:
            at += len(mark) if mark in self._closings else 0
            self._state, self._buffer = _State.ANSWER, self._buffer[at:]
            return text
        self._buffer = self._buffer[len(text) :]
        self._is_blank = self._is_blank and not text
        return text

    def _read_answer(self) -> str:
        text, self._buffer = self._buffer, ""
        return self._answer.push(text)


class _Answer:
    """The answer after reasoning, without the marks around it (`around` of the format), and without white space before
    it unless it `keeps_blanks`.
    """

    def __init__(self, style: ReasoningFormat, *, keeps_blanks: bool = False) -> None:
        self._openings = [opening for opening, _ in style.around]
        self._closings = [closing for _, closing in style.around]
        self._is_blank = not keeps_blanks
        self._may_open = bool(style.around)
        self._buffer = ""
        self.num_held = 0
        """Characters that were read behind what was returned last."""

    def push(self, text: str) -> str:
        self._buffer += text
        if self._may_open:
            self._read_opening()
        if self._may_open:
            return ""
        if self._is_blank:
            self._buffer = self._buffer.lstrip()
        held = self._num_held()
        text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        self.num_held = held
        self._is_blank = self._is_blank and not text
        return text

    def finish(self) -> str:
        """Return what is still held back, without a closing mark at the end."""
        text = self._buffer.lstrip() if self._is_blank else self._buffer
        end = text.rstrip()
        closing = next(filter(end.endswith, self._closings), "")
        answer = end.removesuffix(closing).rstrip() if closing else text
        self.num_held = len(text) - len(answer)
        return answer

    def _read_opening(self) -> None:
        first = self._buffer.lstrip()
        opening = next(filter(first.startswith, self._openings), "")
        if opening:
            self._buffer, self._is_blank = first.removeprefix(opening), True
        self._may_open = not opening and any(mark.startswith(first) for mark in self._openings)

    def _num_held(self) -> int:
        """Count the characters at the end that may be a closing mark, and the white space around it."""
        if not self._closings:
            return 0
        end = self._buffer.rstrip()
        closing = next(filter(end.endswith, self._closings), "")
        at = len(end) - len(closing)
        if not closing:
            at = find_begun_mark(self._buffer, self._closings)
        return len(self._buffer) - len(self._buffer[:at].rstrip())
