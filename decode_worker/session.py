"""One connected router: its sequences, and the events that wait to be sent to it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from engine.sequence import SequenceState
from mesh.domain.errors import Overloaded
from mesh.domain.tokens import SequenceFailure, SequenceKey, SequenceOutput

# Steps that a router may lag behind before its session ends: half a minute and more at tens of milliseconds a step.
MAX_UNSENT_EVENTS = 1024


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are reserved and prefill may start. The KV of the first `ready_tokens` tokens need not be sent."""

    key: SequenceKey
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """All tokens of one engine step for this router."""

    outputs: list[SequenceOutput]


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence has failed on this worker."""

    key: SequenceKey
    reason: SequenceFailure
    detail: str


Event = Reserved | Step | Failed


@dataclass(eq=False, slots=True)
class SessionEntry:
    """A sequence of `session`. While the sequence waits for a transfer, `transfer_id` names it; `reserved_s` is the
    time of the reservation on the event loop's clock. The timer `deadline` ends the sequence. `forks` wait for the KV
    of the prompt; they fail if the sequence ends before. `preparing` may be cancelled, `starting` may not. `replaced`
    free the blocks of older attempts of the request."""

    session: "Session"
    sequence: SequenceState
    replaced: tuple[asyncio.Task[None], ...] = ()
    transfer_id: str = ""
    reserved_s: float = 0.0
    starting: asyncio.Task[None] | None = None
    preparing: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    span: Span = INVALID_SPAN
    transfer_span: Span = INVALID_SPAN
    forks: list[SequenceKey] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Session:
    """One router's sequences and the queue of events for it."""

    all_read: asyncio.Event = field(default_factory=asyncio.Event)
    """The sender of the events sets it once the router has read the last event, or has disconnected."""
    entries: dict[SequenceKey, SessionEntry] = field(default_factory=dict)
    _outbox: asyncio.Queue[Event | None] = field(default_factory=lambda: asyncio.Queue(MAX_UNSENT_EVENTS))
    _overrun: bool = False
    _is_ended: bool = False
    _in_parts: dict[SequenceKey, deque[SequenceOutput]] = field(default_factory=dict)
    """Outputs per sequence that wait until the parts of a long prompt's log-probs before them have been sent."""

    def send(self, event: Event) -> bool:
        """Queue an event. Return False once the router has too many unread events, which ends the session."""
        try:
            self._outbox.put_nowait(event)
        except asyncio.QueueFull:
            self._overrun = True
        return not self._overrun

    def end(self) -> None:
        """Let `events` return once all queued events are sent. The caller accepts no more commands."""
        self._is_ended = True
        with contextlib.suppress(asyncio.QueueFull):  # a reader of a full queue does not wait
            self._outbox.put_nowait(None)

    def drop(self, key: SequenceKey) -> None:
        """Discard the waiting outputs of a sequence."""
        self._in_parts.pop(key, None)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events as they come. The log-probs of a long prompt are sent in parts, interleaved with events of other
        sequences. Raises Overloaded if the router has too many unread events.
        """
        while self._in_parts or not (self._is_ended and self._outbox.empty()):
            event = Step([]) if self._in_parts and self._outbox.empty() else await self._outbox.get()
            if self._overrun:
                raise Overloaded(f"the router has left {MAX_UNSENT_EVENTS} messages unread")
            if event is None:  # from `end`
                continue
            if isinstance(event, Failed):
                self.drop(event.key)
            yield self._with_part(event) if isinstance(event, Step) else event

    def _with_part(self, step: Step) -> Step:
        """Return the outputs to send now: one waiting output, and the step's outputs that need not wait."""
        outputs: list[SequenceOutput] = []
        if self._in_parts:
            key = next(iter(self._in_parts))
            waiting = self._in_parts.pop(key)
            outputs.append(waiting.popleft())
            if waiting:
                self._in_parts[key] = waiting  # moves to the end, behind other sequences
        for output in step.outputs:
            key = output.key
            if key in self._in_parts:
                self._in_parts[key].append(output)
                continue
            first, *later = output.in_parts()
            outputs.append(first)
            if later:
                self._in_parts[key] = deque(later)
        return Step(outputs)
