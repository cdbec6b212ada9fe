"""One continuation of a prompt: its tokens, its text, and what of it the client has not taken yet. No I/O.

    StepOutput ─▶ TokenOrder ─▶ token_ids ─▶ TextStream ─▶ pending TokenEvents ─▶ take() ─▶ Chunk

Every token makes exactly one event, in order and at once; its text is empty while held back. Text that comes out only
at the end goes with the last token, whatever that is: the texts of all events, joined, are the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mesh.domain.request import Request
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, StepOutput, TokenLogprob
from router.claim import Claim
from router.phases import Timing
from router.siblings import Siblings
from router.tenants import Tenant
from router.text.stream import TextStream
from router.text.tokenizer import Tokenizer
from router.token_order import TokenOrder
from router.validation import ValidRequest

# A worker ends a sequence for these because of its last token, which is then no part of the text.
_TOKEN_ENDS = (FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE)


@dataclass(frozen=True, slots=True)
class TopToken:
    """An alternative the model considered."""

    id: int
    text: str
    logprob: float


class TokenEvent(NamedTuple):
    """A token with the text it adds: none while text is held back, and as a rule none for special tokens."""

    id: int
    text: str
    logprob: float | None
    top: tuple[TopToken, ...]
    special: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """New events of one choice; `finish_reason`, `usage` and `timing` come with its last one."""

    index: int
    tokens: list[TokenEvent]
    finish_reason: FinishReason | None
    usage: Usage | None
    timing: Timing | None


class Choice:
    """State of one choice over all its attempts. `on_change` is called when there is something to take. `siblings` are
    the choices it begins with; None if it is the only one."""

    def __init__(self, index: int, valid: ValidRequest, tokenizer: Tokenizer, siblings: Siblings | None = None) -> None:
        self.index = index
        self.siblings = siblings
        self.request_id = valid.request_id if index == 0 else f"{valid.request_id}-{index}"
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: tuple[PromptLogprob, ...] | None = None
        self.cached_tokens: int | None = None
        self.timing: Timing | None = None
        """Where the time went; known once the last token is here."""
        self.on_change: Callable[[], None] = lambda: None
        self.traceparent = ""
        """The trace that workers' spans belong to, if there is one."""
        self._valid = valid
        seed = valid.sampling.seed or 0
        self._sampling = replace(valid.sampling, seed=(seed + index) % 2**64)
        self._max_new_tokens = valid.sampling.max_new_tokens or 0
        self._order = TokenOrder()
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, valid.text_rules)
        self._pending: list[TokenEvent] = []
        self._logprob_sum = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt."""
        return len(self._valid.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, as workers count them."""
        return len(self._valid.worker_prompt) + len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Events the client has not taken, alternatives counted too: what a slow reader costs."""
        return len(self._pending) * (1 + self._valid.asked.top_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens so far: what choices are ranked by. There is at least one."""
        return self._logprob_sum / len(self.token_ids)

    @property
    def tenant(self) -> Tenant:
        """On whose behalf it runs."""
        return self._valid.asked.tenant

    @property
    def claim(self) -> Claim:
        """What it may ask of the queue."""
        claim = self._valid.claim
        return claim if self.index == 0 else replace(claim, first_token_by_s=None)

    def next_request(self, attempt: int, *, eos_token_ids: frozenset[int], namespace: str) -> Request:
        """What to dispatch now: the prompt and all that has been generated."""
        self._order.restart()
        asked = self._valid.asked
        return Request(
            request_id=self.request_id,
            attempt=attempt,
            token_ids=(*self._valid.worker_prompt, *self.token_ids),
            num_prompt_tokens=len(self._valid.worker_prompt),
            sampling=self._sampling,
            eos_token_ids=eos_token_ids,
            top_logprobs=asked.top_logprobs,
            prompt_logprobs=asked.prompt_logprobs and self.index == 0 and self.prompt_logprobs is None,
            cache_namespace=namespace,
            traceparent=self.traceparent,
        )

    def accept(self, output: StepOutput) -> None:
        """Take in what a worker reports. What comes after the end is dropped."""
        if self.finish_reason is not None:
            return
        if output.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = output.prompt_logprobs
        for tokens, reason in self._order.accept(output):
            self._extend(tokens, reason)
            if self.finish_reason is not None:
                break
        if self.siblings is not None and self.index == 0 and self.token_ids:
            self.siblings.begun()
        self.on_change()

    def note_cached(self, num_tokens: int) -> None:
        """The first attempt found this much of the prompt in a prefix cache."""
        self.cached_tokens = max(num_tokens, self.cached_tokens or 0)

    def take(self) -> Chunk | None:
        """What is ready for the client; None if nothing is. The last chunk has the finish reason."""
        if not self._pending and self.finish_reason is None:
            return None
        tokens, self._pending = self._pending, []
        usage = self.usage() if self.finish_reason is not None else None
        return Chunk(self.index, tokens, self.finish_reason, usage, self.timing)

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(len(self._valid.prompt_ids), len(self.token_ids), self.cached_tokens or 0)

    def _extend(self, tokens: tuple[SampledToken, ...], reason: FinishReason | None) -> None:
        for place, token in enumerate(tokens):
            is_end = reason in _TOKEN_ENDS and place == len(tokens) - 1
            self._add(token, hide_text=is_end and not self._valid.asked.include_stop)
            if self._text.stopped:
                reason = FinishReason.STOP_SEQUENCE
                break
        if reason is None and len(self.token_ids) >= self._max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(reason)

    def _add(self, token: SampledToken, *, hide_text: bool) -> None:
        self.token_ids.append(token.id)
        self._logprob_sum += token.logprob
        special = token.id in self._tokenizer.special_ids
        text = "" if hide_text else self._text.push(token.id)
        self._pending.append(TokenEvent(token.id, text, token.logprob, self._top(token.top), special))

    def _finish(self, reason: FinishReason) -> None:
        rest = self._text.flush()
        if rest and self._pending:  # the token that ends a sequence comes with the reason
            last = self._pending[-1]
            self._pending[-1] = last._replace(text=last.text + rest)
        self.finish_reason = reason

    def _top(self, top: tuple[TokenLogprob, ...]) -> tuple[TopToken, ...]:
        if not top:
            return ()
        text_of = self._tokenizer.text_of
        return tuple(TopToken(entry.id, text_of(entry.id), entry.logprob) for entry in top)
