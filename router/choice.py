"""One choice: a continuation of the prompt, with its tokens, text, and events that the client has not read. No I/O.

    SequenceOutput ─▶ TokenOrder ─▶ token_ids ─▶ TextStream ─▶ pending TokenEvents ─▶ take() ─▶ ChoiceEvents

Every token makes exactly one event, in order and at once; its text is empty while it is held back. Text that is
released only at the end is added to the last token, so that the joined texts of all events are the result. A text may
thus be that of other tokens: with `own_bytes`, an event has the bytes of the token itself beside it.

Sibling choices of one prompt start together: the prompt is computed and sent once, and the choices share its KV.

    first choice    waits for its siblings ─▶ is placed, with capacity for all ─▶ starts them as forks ─▶ computed
    other choices   wait for a fork ─────────────▶ an attempt on the same decode worker ──▶ fork from the prompt there

A choice that replays before the first choice has its first token asks for a fork again, and starts with the first
choice's next attempt. A choice is placed alone if it has tokens of its own, or if the first choice has its first token:
the prompt is in prefix caches by then.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from mesh.domain.errors import AttemptsFailed
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, SequenceOutput, TokenLogprob
from router.admission.fair_queue import QueueEntry
from router.tenants import Tenant
from router.text.chat import ChatPrompt
from router.text.text_stream import TextStream
from router.text.tokenizer import Tokenizer
from router.timeline import Timeline, Timing
from router.validation import ValidRequest

if TYPE_CHECKING:
    from router.attempt import Attempt

_Batch = tuple[tuple[SampledToken, ...], FinishReason | None]
# Finish reasons that are caused by the last token, whose text is then not part of the answer.
_TOKEN_ENDS = (FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE)


@dataclass(eq=False, slots=True)
class WaitingFork:
    """A choice that waits to be forked. `attempt` resolves to its attempt, or to None if it must be placed alone."""

    choice: "Choice"
    spec: SequenceSpec
    timeline: Timeline
    attempt: "asyncio.Future[Attempt | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Siblings:
    """The `num_choices` choices of one request. Used by one event loop."""

    def __init__(self, num_choices: int) -> None:
        self._num_missing = num_choices - 1
        self._all_waiting = asyncio.Event()
        self._forks: list[WaitingFork] = []
        self._has_started = False

    @property
    def num_seqs(self) -> int:
        """Sequences that the first choice must be placed with: itself and the waiting forks."""
        return 1 + len(self._forks)

    async def wait_for_fork(self, fork: WaitingFork) -> "Attempt | None":
        """Return the forked attempt, which the caller owns, or None if the choice must be placed alone."""
        if self._has_started or fork.spec.num_generated:
            return None
        self._forks.append(fork)
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._all_waiting.set()
        try:
            return await fork.attempt
        except asyncio.CancelledError:
            if fork.attempt.done() and not fork.attempt.cancelled():
                attempt = fork.attempt.result()
                if attempt is not None:
                    attempt.close()
            raise

    async def wait_for_all(self) -> None:
        """Return once every sibling has asked for a fork for the first time."""
        await self._all_waiting.wait()

    def take_forks(self, num_forks: int) -> list[WaitingFork]:
        """Return up to `num_forks` waiting forks; the caller must resolve the attempt of each."""
        forks, self._forks = self._forks[:num_forks], self._forks[num_forks:]
        return [fork for fork in forks if not fork.attempt.done()]

    def first_token(self) -> None:
        """The first choice has its first token: forks that still wait are placed alone."""
        self._has_started = True
        for fork in self.take_forks(len(self._forks)):
            fork.attempt.set_result(None)


class TokenOrder:
    """Puts generated tokens in order and drops duplicates.

    Two workers report on one sequence, so a later token may come before the first, and a replay may repeat tokens.
    Early tokens are kept until the gap is closed. Beyond `max_early` tokens, more than the sequence can have, they are
    dropped: the worker that sends them is faulty.
    """

    def __init__(self, max_early: int) -> None:
        self.next_index = 0
        self._max_early = max_early
        self._num_early = 0
        self._early: list[SequenceOutput] = []

    def accept(self, output: SequenceOutput) -> list[_Batch]:
        """Return the tokens that are in order now, with the finish reason that follows the last one, if any."""
        if output.first_index > self.next_index:
            if self._num_early + _size(output) <= self._max_early:
                self._num_early += _size(output)
                self._early.append(output)
            return []
        due = [self._cut(output)]
        while self._early and (early := self._pop_due()) is not None:
            due.append(self._cut(early))
        return due

    def restart(self) -> None:
        """Drop early tokens: a new attempt will send them again."""
        self._early.clear()
        self._num_early = 0

    def _pop_due(self) -> SequenceOutput | None:
        for index, output in enumerate(self._early):
            if output.first_index <= self.next_index:
                self._num_early -= _size(output)
                return self._early.pop(index)
        return None

    def _cut(self, output: SequenceOutput) -> _Batch:
        """Drop tokens seen before. The finish reason counts only if no later token is known."""
        num_seen = self.next_index - output.first_index
        tokens = output.tokens[num_seen:] if num_seen else output.tokens
        self.next_index += len(tokens)
        is_last = output.first_index + len(output.tokens) == self.next_index
        return tokens, output.finish_reason if is_last else None


def _size(output: SequenceOutput) -> int:
    """Number of tokens; 1 for an output that only ends the sequence, so that it is kept too."""
    return max(1, len(output.tokens))


@dataclass(frozen=True, slots=True)
class TopToken:
    """An alternative token with its log-prob."""

    id: int
    text: str
    logprob: float
    own_bytes: bytes | None = None

    @classmethod
    def of(
        cls, entry: TokenLogprob, tokenizer: Tokenizer, *, begins: bool = False, with_bytes: bool = False
    ) -> "TopToken":
        """`begins`: the token would begin a text. `with_bytes`: with its bytes, if they are not those of its text."""
        text = tokenizer.text_of(entry.id, begins=begins)
        own_bytes = unless_same(tokenizer.bytes_of(entry.id, text), text) if with_bytes else None
        return cls(entry.id, text, entry.logprob, own_bytes)


def unless_same(own_bytes: bytes, text: str) -> bytes | None:
    """Return a token's own bytes, or None if they are those of `text`, which is sent anyway."""
    return None if own_bytes == text.encode() else own_bytes


class TokenEvent(NamedTuple):
    """A token with the text it adds: empty while text is held back, and by default for special tokens.

    `own_bytes`: the token's own, if they are requested and not those of `text`. Empty if it is left out of the text.
    """

    id: int
    text: str
    logprob: float | None
    top: tuple[TopToken, ...]
    special: bool
    own_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class ChoiceEvents:
    """New events of one choice; `finish_reason`, `usage` and `timing` come with its last one."""

    index: int
    tokens: list[TokenEvent]
    finish_reason: FinishReason | None
    usage: Usage | None
    timing: Timing | None


class Choice:
    """State of one choice over all its attempts. `on_change` is called when there is something to take.

    `siblings` are the choices of the same request, which start together; None if it is the only one.
    """

    def __init__(self, index: int, valid: ValidRequest, tokenizer: Tokenizer, siblings: Siblings | None = None) -> None:
        self.index = index
        self.siblings = siblings
        self.request_id = valid.request_id if index == 0 else f"{valid.request_id}-{index}"
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[PromptLogprob] = []
        """Log-probs of the prompt received so far; complete once the first token is here."""
        self.cached_tokens: int | None = None
        self.timing: Timing | None = None
        """Set once the last token is here."""
        self.on_change: Callable[[], None] = lambda: None
        self.ended_by = ""
        """Name of the error with which the router has ended its stream, if it has."""
        self.traceparent = ""
        """Parent of the workers' spans; "" without tracing."""
        self._valid = valid
        seed = valid.sampling.seed or 0
        self._sampling = replace(valid.sampling, seed=(seed + index) % 2**64)
        self._num_worker_prompt = len(valid.worker_prompt)
        self._max_new_tokens = valid.sampling.max_new_tokens or 0
        self._order = TokenOrder(max_early=self._max_new_tokens + 1)
        self._tokenizer = tokenizer
        self._begins_text = _begins_text(valid)
        self._text = TextStream(
            tokenizer,
            () if self._begins_text else valid.prompt_ids,
            stop=valid.sampling.stop,
            include_stop=valid.params.include_stop,
            min_tokens=valid.sampling.min_new_tokens,
            skip_special_tokens=valid.params.skip_special_tokens,
            spaces_between_special_tokens=valid.params.spaces_between_special_tokens,
        )
        self._with_bytes = valid.params.own_bytes
        self._pending: list[TokenEvent] = []
        self._logprob_sum = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt, without the decoder's start tokens."""
        return len(self._valid.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, including the decoder's start tokens."""
        return self._num_worker_prompt + len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Unread events, alternatives included: the memory that a slow reader costs."""
        return len(self._pending) * (1 + self._valid.params.top_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Mean log-prob of the tokens so far, by which choices are ranked. There must be at least one token."""
        return self._logprob_sum / len(self.token_ids)

    @property
    def tenant(self) -> Tenant:
        return self._valid.params.tenant

    @property
    def queue_entry(self) -> QueueEntry:
        """The queue entry; only the first choice has a first-token target."""
        queue_entry = self._valid.queue_entry
        return queue_entry if self.index == 0 else replace(queue_entry, first_token_by_s=None)

    def next_spec(self, attempt: int, *, eos_token_ids: frozenset[int], namespace: str) -> SequenceSpec:
        """Return the request of the next attempt: the prompt and all tokens generated so far."""
        self._order.restart()
        params = self._valid.params
        if not self._knows_prompt:
            self.prompt_logprobs = []
        return SequenceSpec(
            request_id=self.request_id,
            attempt=attempt,
            token_ids=(*self._valid.worker_prompt, *self.token_ids),
            num_prompt_tokens=self._num_worker_prompt,
            sampling=self._sampling,
            eos_token_ids=eos_token_ids,
            top_logprobs=params.top_logprobs,
            prompt_logprobs=params.prompt_logprobs and self.index == 0 and not self._knows_prompt,
            cache_namespace=namespace,
            traceparent=self.traceparent,
            adapter=self._valid.adapter,
            cache_hints=params.cache_hints,
        )

    def accept(self, output: SequenceOutput) -> None:
        """Take in a worker's output.

        Output after the end is dropped. Raises AttemptsFailed for an unknown finish reason.
        """
        if self.finish_reason is not None:
            return
        if output.prompt_logprobs and not self._knows_prompt:
            self.prompt_logprobs.extend(output.prompt_logprobs)
        for tokens, reason in self._order.accept(output):
            if reason is FinishReason.UNKNOWN:
                raise AttemptsFailed("a worker has ended the sequence for a reason that this router does not know")
            self._extend(tokens, reason)
            if self.finish_reason is not None:
                break
        if self.siblings is not None and self.index == 0 and self.token_ids:
            self.siblings.first_token()
        self.on_change()

    @property
    def _knows_prompt(self) -> bool:
        """True if all log-probs of the prompt have come."""
        return len(self.prompt_logprobs) >= self._num_worker_prompt

    def note_cached(self, num_tokens: int) -> None:
        """Record how many prompt tokens the first attempt found in a prefix cache."""
        self.cached_tokens = max(num_tokens, self.cached_tokens or 0)

    def take(self) -> ChoiceEvents | None:
        """Return the unread events, or None without any. The last ones have the finish reason."""
        if not self._pending and self.finish_reason is None:
            return None
        tokens, self._pending = self._pending, []
        usage = self.usage() if self.finish_reason is not None else None
        return ChoiceEvents(self.index, tokens, self.finish_reason, usage, self.timing)

    def usage(self) -> Usage:
        """Token counts of prompt and answer so far."""
        return Usage(len(self._valid.prompt_ids), len(self.token_ids), self.cached_tokens or 0)

    def _extend(self, tokens: tuple[SampledToken, ...], reason: FinishReason | None) -> None:
        for index, token in enumerate(tokens):
            is_end = reason in _TOKEN_ENDS and index == len(tokens) - 1
            self._add(token, hide_text=is_end and not self._shows_end(reason))
            if self._text.stopped:
                reason = FinishReason.STOP_SEQUENCE
                break
        if reason is None and len(self.token_ids) >= self._max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(reason)

    def _shows_end(self, reason: FinishReason | None) -> bool:
        """True if the client wants the text of the token that ends the choice."""
        params = self._valid.params
        if reason is FinishReason.EOS_TOKEN and params.include_eos is not None:
            return params.include_eos
        return params.include_stop

    def _add(self, token: SampledToken, *, hide_text: bool) -> None:
        self.token_ids.append(token.id)
        self._logprob_sum += token.logprob
        special = token.id in self._tokenizer.special_ids
        text = "" if hide_text else self._text.push(token.id)
        event = TokenEvent(token.id, text, token.logprob, self._top(token.top) if token.top else (), special)
        if self._with_bytes and not hide_text:
            added = self._text.added
            own_bytes = added.lstrip("\ufffd").encode() if special else self._tokenizer.bytes_of(token.id, added)
            event = event._replace(own_bytes=unless_same(own_bytes, text))
        self._pending.append(event)

    def _finish(self, reason: FinishReason) -> None:
        text = self._text.flush()
        if text and self._pending:  # the finish reason comes with the last token
            last = self._pending[-1]
            own_bytes = last.own_bytes
            if self._with_bytes and own_bytes is None:
                own_bytes = last.text.encode()
            self._pending[-1] = last._replace(text=last.text + text, own_bytes=own_bytes)
        self.finish_reason = FinishReason.STOP_SEQUENCE if self._text.stopped else reason  # U+FFFD may stop it

    def _top(self, top: tuple[TokenLogprob, ...]) -> tuple[TopToken, ...]:
        begins = self._begins_text and len(self.token_ids) == 1
        return tuple(TopToken.of(entry, self._tokenizer, begins=begins, with_bytes=self._with_bytes) for entry in top)


def _begins_text(valid: ValidRequest) -> bool:
    """True if the answer is a text of its own: a turn of a conversation, or the text of a decoder."""
    prompt = valid.params.prompt
    is_turn = isinstance(prompt, ChatPrompt) and not prompt.how.continues_final
    return is_turn or bool(valid.decoder_prompt)
