"""The text of one choice as its tokens arrive: detokenising, special tokens, then stop strings."""

from dataclasses import dataclass

from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What becomes of a choice's text. Stop strings count from the token after `min_tokens` on, as in vLLM."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class TextStream:
    """All stages of one choice. Linear in the text."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(rules.stop, keep=rules.include_stop)
        self._num_tokens = 0
        self._after_special = False
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that may go out now. Sets `stopped` if a stop string was met; nothing may be pushed after that."""
        self._num_tokens += 1
        text = self._special(token_id) if token_id in self._tokenizer.special_ids else self._plain(token_id)
        if self._num_tokens <= self._rules.min_tokens:
            return text
        text, self.stopped = self._matcher.push(text)
        return text

    def flush(self) -> str:
        """The rest: there will be no more tokens."""
        if self.stopped:
            return ""
        rest = self._detokenizer.flush()
        if self._num_tokens <= self._rules.min_tokens:
            return rest
        text, self.stopped = self._matcher.push(rest)
        return text if self.stopped else text + self._matcher.flush()

    def _plain(self, token_id: int) -> str:
        self._after_special = False
        return self._detokenizer.push(token_id)

    def _special(self, token_id: int) -> str:
        if self._rules.skip_special_tokens:
            return ""
        text = self._detokenizer.push(token_id)  # in any case: what follows depends on it
        if self._after_special and not self._rules.spaces_between_special_tokens:
            text = self._tokenizer.text_of(token_id)
        self._after_special = True
        return text
