"""Splits reasoning between <think> and </think> from the answer, for Qwen3, QwQ, DeepSeek-R1 and their relatives.

    START ──<think>──▶ REASONING ──</think>──▶ ANSWER
      └──anything else──▶ ANSWER
If the chat template itself writes <think>, the text begins in REASONING. White space around reasoning is dropped.
"""

from enum import Enum, auto

_OPEN, _CLOSE = "<think>", "</think>"


class _State(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningReader:
    """Parses one answer as it streams. `begins_within`: the text begins inside the reasoning block."""

    def __init__(self, *, begins_within: bool = False) -> None:
        self._state = _State.REASONING if begins_within else _State.START
        self._buffer = ""
        self._is_blank = True  # nothing of the current state's text has been emitted yet

    def push(self, text: str) -> tuple[str, str]:
        """Return what the text adds to the reasoning and to the answer. Text that may begin a marker is held back."""
        self._buffer += text
        reasoning = ""
        if self._state is _State.START:
            first = self._buffer.lstrip()
            if first.startswith(_OPEN):
                self._state, self._buffer = _State.REASONING, first
            elif _OPEN.startswith(first):
                return "", ""  # empty, or a possible prefix of <think>
            else:
                self._state, self._is_blank = (
                    _State.ANSWER,
                    False,
                )  # without reasoning, leading white space belongs to the answer
        if self._state is _State.REASONING:
            reasoning = self._read_reasoning()
        return reasoning, self._read_answer() if self._state is _State.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the answer that are still held back."""
        remaining, self._buffer = self._buffer, ""
        if self._state is _State.REASONING:
            return remaining.rstrip().removeprefix(_OPEN) if self._is_blank else remaining.rstrip(), ""
        return ("", remaining) if self._state is _State.START else ("", "")

    def _read_reasoning(self) -> str:
        if self._is_blank:
            first = self._buffer.lstrip()
            if _OPEN.startswith(first):
                return ""
            self._buffer = first.removeprefix(_OPEN).lstrip()
            if not self._buffer:
                self._buffer = first  # more white space may follow
                return ""
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
