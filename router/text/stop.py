"""Stop strings in a stream of text.

The match that is complete first wins, and of those complete at the same character the longest: the result does not
depend on how the text was cut into pieces. Each stop string is followed by its own automaton (Knuth, Morris and Pratt
1977). Its state is the length of the longest end of the text that begins the stop string, which is just what has to
be held back. Linear in the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Pattern:
    text: str
    fallback: tuple[int, ...]

    @classmethod
    def compile(cls, text: str) -> "_Pattern":
        """`fallback[i]` is the state to try after a mismatch in state i+1."""
        fallback = [0] * len(text)
        state = 0
        for index in range(1, len(text)):
            while state and text[index] != text[state]:
                state = fallback[state - 1]
            state += text[index] == text[state]
            fallback[index] = state
        return cls(text, tuple(fallback))

    def advance(self, state: int, char: str) -> int:
        """State after one more character; `state` is below the pattern's length."""
        while state and char != self.text[state]:
            state = self.fallback[state - 1]
        return state + (char == self.text[state])


class StopMatcher:
    """Looks for stop strings, and holds back text that may be the start of one. `keep` lets the one that is met out."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._patterns = [_Pattern.compile(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may go out, and whether a stop string was met; it, if not kept, and what follows are dropped."""
        if not self._patterns:
            return text, False
        buffer = self._held + text
        start = len(self._held)
        for offset, char in enumerate(text):
            matched = self._advance(char)
            if matched:
                self._held = ""
                return buffer[: start + offset + 1 - (0 if self._keep else matched)], True
        held = max(self._states)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held], False

    def flush(self) -> str:
        """What is still held back: there will be no more text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Follow one character. Returns the length of the longest stop string now complete, or 0."""
        longest = 0
        for index, pattern in enumerate(self._patterns):
            state = pattern.advance(self._states[index], char)
            self._states[index] = state
            if state == len(pattern.text):
                longest = max(longest, state)
        return longest
