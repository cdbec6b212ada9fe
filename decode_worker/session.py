"""One router's stay: its sequences, and the events waiting to go out to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from engine.sequence import Sequence, SequenceKey
from mesh.domain.errors import Overloaded
from mesh.domain.tokens import SequenceFailure, StepOutput

# Steps a router may lag behind before it is cut off: at tens of milliseconds a step, half a minute and more.
MAX_UNSENT_EVENTS = 1024


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are reserved: prefill may start, and need not send the first `ready_tokens` tokens."""

    key: SequenceKey
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """All tokens one engine step made for this router."""

    outputs: list[StepOutput]


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence cannot go on here."""

    key: SequenceKey
    reason: SequenceFailure
    detail: str


Event = Reserved | Step | Failed


@dataclass(eq=False, slots=True)
class Entry:
    """A sequence of a session. `transfer_id` names the transfer it waits for, once that is expected, at `reserved_s` of
    the event loop's time, and until it ends. `deadline` ends the sequence when its time is up. `forks` wait for its
    prompt, and end with it if it ends before."""

    sequence: Sequence
    transfer_id: str = ""
    reserved_s: float = 0.0
    starting: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    span: Span = INVALID_SPAN
    transfer_span: Span = INVALID_SPAN
    forks: list[SequenceKey] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Session:
    """One router's sequences and outbox."""

    router_id: str
    entries: dict[SequenceKey, Entry] = field(default_factory=dict)
    _outbox: asyncio.Queue[Event | None] = field(default_factory=lambda: asyncio.Queue(MAX_UNSENT_EVENTS))
    _overrun: bool = False

    def send(self, event: Event) -> bool:
        """Queue an event; False once the router has left too many unread: then its session is over."""
        try:
            self._outbox.put_nowait(event)
        except asyncio.QueueFull:
            self._overrun = True
        return not self._overrun

    def end(self) -> None:
        """No more commands will come: let `events` return once what is queued has gone out."""
        with contextlib.suppress(asyncio.QueueFull):  # then it is overrun, and ends anyway
            self._outbox.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """Events as they come. Raises Overloaded if the router has fallen too far behind."""
        while True:
            event = await self._outbox.get()
            if self._overrun:
                raise Overloaded(f"the router has left {MAX_UNSENT_EVENTS} messages unread")
            if event is None:
                return
            yield event
