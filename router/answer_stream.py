"""The answer to one request: its choices run side by side, and the reader gets their tokens merged.

    Choice.accept ─▶ _notify ─▶ AnswerStream.events() ─▶ Answer.deltas() ─▶ messages to the client

A choice only signals that it has something ready; the reader takes everything at once, so tokens that are ready
together share a message. With `best_of` the choices are ranked and returned once all have ended. The stream ends after
the last choice, or with the first error. A client that reads nothing for too long, or lets too many events pile up, is
cut off: its attempts are aborted, its unread events are freed at once, and its next read raises the error. If it still
does not read, `on_stuck` is called, which ends the call.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from mesh.domain.errors import SlowReader
from mesh.domain.tokens import PromptLogprob
from router.admission.limiter import Permit
from router.choice import Choice, ChoiceEvents, TokenEvent, TopToken, unless_same
from router.text.input_processor import PromptEncoder
from router.text.tokenizer import TextToken
from router.validation import ValidRequest

# Over all choices of a stream, alternatives included. An event takes about 200 bytes, so this is less than 1 MiB.
MAX_PENDING_EVENTS = 4096
# With log-probs of the prompt: sending them to the client takes as long as thousands of tokens. At most 13 MiB.
MAX_PENDING_BEHIND_PROMPT = 2**16
# Prompt tokens, with their alternatives, in one message.
_MAX_PART_EVENTS = 2048
_SENT = PromptLogprob(None)
# Looks at a client in the time that it may read nothing.
_LOOKS_PER_LIMIT = 4
# Time for a client that was cut off to take the message that blocks its stream, and then the error.
_LAST_READ_S = 10.0

RunChoice = Callable[[Choice], Coroutine[Any, Any, None]]


class AnswerStream:
    """Runs the choices, each by `run`. Read `events()` to the end, or call `close()`.

    Each choice has a permit, which is released when the choice has ended. With `num_best`, only that many choices are
    returned, each whole, the best with index 0.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        permits: Sequence[Permit],
        run: RunChoice,
        *,
        slow_reader_s: float,
        num_best: int | None,
        max_pending_events: int = MAX_PENDING_EVENTS,
    ) -> None:
        self._choices = choices
        self._run = run
        self._num_best = num_best
        self._max_pending = max_pending_events
        self._slow_reader_s = slow_reader_s
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Choice, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._reading_since_s: float | None = None
        self._num_open = len(choices)
        self._tasks = [self._start(choice, permit) for choice, permit in zip(choices, permits, strict=True)]
        self._watchdog = self._watch_after(slow_reader_s / _LOOKS_PER_LIMIT)
        self.on_stuck: Callable[[BaseException], object] = _ignore
        """Called with the error if a client that was cut off reads nothing for _LAST_READ_S more."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when no choice runs any more."""

    async def events(self) -> AsyncGenerator[ChoiceEvents, None]:
        """Yield the events of a choice as they become ready. Raises the error that the stream ends with."""
        try:
            while self._num_open or self._ready or self._error is not None:
                await self._wait_ready()
                for events in self._take_ready():
                    self._reading_since_s = self._loop.time()
                    yield events
                    self._reading_since_s = None
                if self._error is not None:
                    raise self._error
        finally:
            self.close()

    def note_read(self) -> None:
        """The client has read one of the messages with parts of the prompt, which go before the first events."""
        self._reading_since_s = self._loop.time()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, if it has none yet. The client is watched until it has read the error."""
        if self._error is None:
            self._error = error
            for choice in self._choices:
                choice.ended_by = type(error).__name__
        self._cancel_choices()
        self._wake()

    def close(self) -> None:
        """Cancel the choices that still run; nobody reads any more. Idempotent."""
        self._watchdog.cancel()
        self._cancel_choices()

    def _cancel_choices(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, choice: Choice, permit: Permit) -> "asyncio.Task[None]":
        choice.on_change = lambda: self._notify(choice)
        task = self._loop.create_task(self._run(choice))
        task.add_done_callback(lambda done: self._choice_ended(choice, permit, done))
        return task

    def _notify(self, choice: Choice) -> None:
        if self._num_best is not None:
            return  # ranked choices are returned once all have ended
        self._ready[choice] = None
        if not self._wake() and sum(choice.num_pending for choice in self._ready) > self._max_pending:
            self._cut_off("the client reads too slowly")

    def _wake(self) -> bool:
        """Wake the reader. Returns False if it does not wait, because it has more to read, or writes to the client."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        return True

    async def _wait_ready(self) -> None:
        if not self._ready and self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter

    def _take_ready(self) -> list[ChoiceEvents]:
        choices, self._ready = self._ready, {}
        ready = [events for choice in choices if (events := choice.take()) is not None]
        return ready if self._num_best is None else [replace(events, index=i) for i, events in enumerate(ready)]

    def _choice_ended(self, choice: Choice, permit: Permit, task: "asyncio.Task[None]") -> None:
        permit.release()
        choice.on_change = _ignore  # breaks the reference cycle between choice and stream
        self._num_open -= 1
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)
        if self._num_open == 0:
            if self._num_best is not None and self._error is None:
                self._rank(self._num_best)
            self.ended.set_result(None)
        self._wake()

    def _rank(self, num_best: int) -> None:
        """Keep the best choices; ties stay in order. Cancelled choices are left out: nobody reads any more then."""
        ended = [choice for choice in self._choices if choice.finish_reason is not None]
        ended.sort(key=lambda choice: -choice.mean_logprob)
        self._ready = dict.fromkeys(ended[:num_best])

    def _watch_after(self, delay_s: float) -> asyncio.TimerHandle:
        due_s = self._loop.time() + delay_s
        return self._loop.call_at(due_s, self._watch_reader, due_s)

    def _watch_reader(self, due_s: float) -> None:
        """One timer for the whole stream instead of one per message. It was due at `due_s`: the time since then, in
        which the event loop stood still (a process that was stopped, a machine that swaps), counts against no client.
        """
        now_s, waited_s = self._loop.time(), 0.0
        if self._reading_since_s is not None:
            self._reading_since_s = min(now_s, self._reading_since_s + now_s - due_s)
            waited_s = now_s - self._reading_since_s
        if waited_s >= self._slow_reader_s:
            self._cut_off(f"the client took nothing for {waited_s:.0f} s")
        else:
            next_s = min(self._slow_reader_s - waited_s, self._slow_reader_s / _LOOKS_PER_LIMIT)
            self._watchdog = self._watch_after(max(0.1, next_s))

    def _cut_off(self, message: str) -> None:
        error = self._error or SlowReader(message)
        self._ready.clear()
        self.fail(error)
        for choice in self._choices:
            choice.take()
        self._watchdog.cancel()
        self._watchdog = self._loop.call_later(_LAST_READ_S, lambda: self.on_stuck(error))


def _ignore(*_: object) -> None:
    """Nobody waits for this any more, or yet."""


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Facts about the prompt. `tokens` is empty unless log-probs were requested; each message carries the next part.

    `in_reasoning`: the prompt ends within the model's reasoning. `revision`: see GenerateParams.
    """

    request_id: str
    num_tokens: int
    tokens: list[TokenEvent]
    in_reasoning: bool = False
    revision: str = ""


class Delta(NamedTuple):
    """One message to the client. `echo` precedes the choice's first token.

    A delta without events carries a part of the prompt's tokens, and more deltas follow.
    """

    events: ChoiceEvents | None
    prompt: PromptInfo | None
    echo: str = ""


class Answer:
    """Read `deltas()` to the end, or close its `stream`.

    `first_choice` receives the prompt's log-probs. `echo` is the prompt's text, repeated before each choice.
    """

    def __init__(
        self, stream: AnswerStream, valid: ValidRequest, *, first_choice: Choice, encoder: PromptEncoder, echo: str
    ) -> None:
        self.stream = stream
        self._valid = valid
        self._choice = first_choice
        self._encoder = encoder
        self._echo = echo

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield all messages; each choice's first one carries the echo. Raises the error that the request ends with."""
        waiting: list[ChoiceEvents] = []
        prompt_sent = False
        echoed: set[int] = set()
        async with aclosing(self.stream.events()) as ready_events:
            async for events in ready_events:
                waiting.append(events)
                if not prompt_sent and not self._knows_prompt(events):
                    continue
                prompt: PromptInfo | None = None
                if not prompt_sent:
                    parts = self._prompt_parts()
                    prompt = await anext(parts)
                    async for next_part in parts:
                        yield Delta(None, prompt)
                        self.stream.note_read()
                        prompt = next_part
                    prompt_sent = True
                for ready in waiting:
                    echo = "" if ready.index in echoed else self._echo
                    echoed.add(ready.index)
                    yield Delta(ready, prompt, echo)
                    prompt = None
                waiting.clear()

    def _knows_prompt(self, events: ChoiceEvents) -> bool:
        """The prompt's log-probs come with the first tokens of the first choice; other choices wait for them."""
        return not self._valid.params.prompt_logprobs or events.index == 0

    async def _prompt_parts(self) -> AsyncIterator[PromptInfo]:
        """Yield at least one part; a part takes a few milliseconds to build and to convert."""
        valid, params = self._valid, self._valid.params
        request_id, ids, in_reasoning = valid.request_id, valid.prompt_ids, valid.in_reasoning
        if not params.prompt_logprobs:
            yield PromptInfo(request_id, len(ids), [], in_reasoning, params.revision)
            return
        pieces = await self._encoder.pieces(ids)
        entries = zip(pieces, chain(self._choice.prompt_logprobs, repeat(_SENT)), strict=False)
        size, logprobs = max(1, _MAX_PART_EVENTS // (1 + params.top_logprobs)), self._choice.prompt_logprobs
        start = 0
        while part := [
            TokenEvent(piece.id, piece.text, entry.logprob, self._top(entry), piece.special, self._own_bytes(piece))
            for piece, entry in islice(entries, size)
        ]:
            yield PromptInfo(request_id, len(ids), part, in_reasoning, params.revision)
            # Freed part by part, because freeing millions of objects at once blocks the event loop.
            logprobs[start : start + size] = [_SENT] * len(logprobs[start : start + size])
            start += size

    def _top(self, entry: PromptLogprob) -> tuple[TopToken, ...]:
        tokenizer, with_bytes = self._encoder.tokenizer, self._valid.params.own_bytes
        return tuple(TopToken.of(top, tokenizer, with_bytes=with_bytes) for top in entry.top)

    def _own_bytes(self, piece: TextToken) -> bytes | None:
        if piece.special or not self._valid.params.own_bytes:
            return None
        return unless_same(self._encoder.tokenizer.bytes_of(piece.id, piece.text), piece.text)
