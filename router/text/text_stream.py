"""The text of one choice as its tokens arrive: detokenising, special tokens, then stop strings.

The first complete match of a stop string wins, and of matches complete at the same character the longest, so the result
does not depend on how the text was split. Each stop string has its own automaton (Knuth, Morris and Pratt 1977), whose
state is the length of the longest suffix of the text that begins the stop string: exactly the text to hold back. Linear
in the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.tokenizer import Tokenizer


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
    """Finds stop strings and holds back text that may begin one. `keep` keeps the match in the text."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._patterns = [_Pattern.compile(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text to send and whether a stop string has matched.

        The text after a match is dropped, and so is the match itself unless `keep`. Without `may_stop` a stop string
        that is complete with this text does not count; one that only begins in it may.
        """
        if not self._patterns:
            return text, False
        buffer = self._held + text
        start = len(self._held)
        for offset, char in enumerate(text):
            matched = self._advance(char)
            if matched and may_stop:
                self._held = ""
                return buffer[: start + offset + 1 - (0 if self._keep else matched)], True
        held = max(self._states)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held], False

    def flush(self) -> str:
        """Return the text still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Advance all automata by one character. Returns the length of the longest complete stop string, or 0."""
        longest = 0
        for index, pattern in enumerate(self._patterns):
            state = pattern.advance(self._states[index], char)
            if state == len(pattern.text):
                longest = max(longest, state)
                state = pattern.fallback[-1]
            self._states[index] = state
        return longest


class TextStream:
    """All stages for one choice, whose text continues that of the tokens `before`. Stop strings count if they are
    complete behind the first `min_tokens`, as in vLLM. `stopped` is True once one has matched. `added` is what the last
    token has added to the text in which stop strings are looked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._skips_special = skip_special_tokens
        self._spaces_special = spaces_between_special_tokens
        self._detokenizer = tokenizer.detokenizer(before)
        self._matcher = StopMatcher(stop, keep=include_stop)
        self._num_tokens = 0
        self._after_special = False
        self.added = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Return the text to send now. Sets `stopped` after a match; push nothing after that."""
        self._num_tokens += 1
        is_special = token_id in self._tokenizer.special_ids
        self.added = self._special(token_id) if is_special else self._plain(token_id)
        return self._match(self.added)

    def flush(self) -> str:
        """Return the remaining text, at the end of the sequence."""
        if self.stopped:
            return ""
        text = self._match(self._detokenizer.flush())
        return text if self.stopped else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        text, self.stopped = self._matcher.push(text, may_stop=self._num_tokens > self._min_tokens)
        return text

    def _plain(self, token_id: int) -> str:
        self._after_special = False
        return self._detokenizer.push(token_id)

    def _special(self, token_id: int) -> str:
        if self._skips_special:
            return ""
        text = self._detokenizer.push(token_id)  # always: the text of later tokens depends on it
        if self._after_special and not self._spaces_special:
            text = self._tokenizer.text_of(token_id)
        self._after_special = True
        return text
