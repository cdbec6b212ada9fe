"""The decode worker's logic, without gRPC.

Life of a sequence here:

    start with a transfer   blocks reserved -> Reserved to the router -> KV arrives, is verified -> on_committed -> runs
    start without           queued, prefilled here in chunks beside the running batch -> runs
    running                 each step's tokens go to its router in one message per router
    ends                    finish_reason with its last token; or abort from the router; or Failed (preempted, KV
                            refused, no capacity, draining), and the router replays it; or its time is up, which needs
                            no word from the router
    forks                   other choices of its prompt: sequences of their own that begin when the prompt's KV is
                            there; if it ends before, the router replays them
    next attempt            of the same request: the older ones end first, and an older one that comes late is refused
    router gone             all its sequences are aborted

Blocks of an aborted sequence whose KV is on its way are freed only after the receiver has stopped writing.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from decode_worker.metrics import DecodeMetrics
from decode_worker.session import Entry, Event, Failed, Reserved, Session, Step
from engine.loop import EngineLoop, StepResult
from engine.sequence import Sequence, SequenceKey
from kvtransfer import KVReceiver, Reservation
from mesh.domain.errors import InvalidRequest, LayoutMismatch, MeshError, TransferCorrupt, WorkerBusy
from mesh.domain.request import Request
from mesh.domain.tokens import SampledToken, SequenceFailure
from mesh.tracing import begin_span, mark_failed

log = structlog.get_logger(__name__)

_NO_ORIGIN = "the sequence it was to begin with has ended"


@dataclass(frozen=True, slots=True)
class _Owner:
    session: Session
    entry: Entry


class DecodeService:
    """Sessions, sequences and where their KV comes from. Lives on the event loop; the engine has its own thread."""

    def __init__(self, block_size: int, metrics: DecodeMetrics | None = None) -> None:
        self._block_size = block_size
        self._metrics = metrics or DecodeMetrics()
        self._owners: dict[SequenceKey, _Owner] = {}
        self._by_transfer: dict[str, SequenceKey] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine: EngineLoop
        self._receiver: KVReceiver

    def connect(self, engine: EngineLoop, receiver: KVReceiver, is_draining: Callable[[], bool]) -> None:
        """Wire up what this service calls; engine and receiver call back."""
        self._engine = engine
        self._receiver = receiver
        self._is_draining = is_draining

    @property
    def num_sequences(self) -> int:
        """Sequences of all sessions."""
        return len(self._owners)

    # -- what routers ask -------------------------------------------------------------------------------------------

    def start(self, session: Session, request: Request, transfer_id: str) -> None:
        """Begin one attempt, and those of its forks; their fate comes as events."""
        older: list[asyncio.Task[None]] = []
        entry = self._enter(session, request, older)
        entered = [self._enter(session, fork, older) for fork in request.forked()]
        forks = [fork for fork in entered if fork is not None]
        if entry is None:
            for fork in forks:
                self._fail(fork.sequence.key, SequenceFailure.PREEMPTED, _NO_ORIGIN)
            return
        entry.sequence.forks = [fork.sequence for fork in forks]
        entry.forks = [fork.sequence.key for fork in forks]
        self._metrics.started(entry.sequence.num_tokens, "transferred" if transfer_id else "computed")
        context = contextvars.copy_context()
        context.run(structlog.contextvars.bind_contextvars, request_id=request.request_id, attempt=request.attempt)
        entry.starting = self._spawn(self._start(session, entry, transfer_id, older), context)
        for fork in forks:
            self._metrics.started(fork.sequence.num_tokens, "shared")
            fork.starting = entry.starting

    def _enter(self, session: Session, request: Request, older: "list[asyncio.Task[None]]") -> Entry | None:
        """Make an attempt known, and end those before it: `older` gets their ends. None if it is refused."""
        entry = Entry(Sequence(request))
        key = entry.sequence.key
        here = [other for other in self._owners if other[0] == request.request_id]
        if self._is_draining():
            self._send(session, Failed(key, SequenceFailure.DRAINING, "the worker is draining"))
            return None
        if any(other >= key for other in here):
            self._send(session, Failed(key, SequenceFailure.INTERNAL, "this attempt, or a newer one, is here already"))
            return None
        self._idle.clear()
        session.entries[key] = entry
        self._owners[key] = _Owner(session, entry)
        if request.time_left_s is not None:
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(request.time_left_s, self._time_is_up, key)
        older += [self._end(other) for other in here]
        entry.span = begin_span("decode_worker", "decode", request)
        return entry

    async def _start(self, session: Session, entry: Entry, transfer_id: str, older: "list[asyncio.Task[None]]") -> None:
        """Once older attempts have given their blocks back."""
        key = entry.sequence.key
        try:
            if older:
                await asyncio.wait(older)
            for sequence in (entry.sequence, *entry.sequence.forks):
                if not await self._prepare(sequence):
                    return
            if transfer_id:
                await self._reserve(session, entry, transfer_id)
            else:
                await self._engine.call(lambda scheduler: scheduler.add(entry.sequence))
        except WorkerBusy as error:
            self._fail(key, SequenceFailure.NO_CAPACITY, str(error))
        except InvalidRequest as error:
            self._fail(key, SequenceFailure.TOO_LARGE, str(error))
        except Exception as error:
            log.error("cannot start a sequence", request_id=key[0], exc_info=error)
            self._fail(key, SequenceFailure.INTERNAL, str(error))

    async def _prepare(self, sequence: Sequence) -> bool:
        """False, and the sequence has failed, if its structure cannot be followed."""
        try:
            await self._engine.prepare(sequence)
        except InvalidRequest as error:
            self._fail(sequence.key, SequenceFailure.REFUSED, str(error))
            return False
        return True

    async def _reserve(self, session: Session, entry: Entry, transfer_id: str) -> None:
        sequence = entry.sequence
        ready_tokens = await self._engine.call(lambda scheduler: scheduler.reserve(sequence))
        if sequence.key not in self._owners:
            return  # aborted meanwhile; the abort waits for this task and frees the blocks
        self._receiver.expect(
            Reservation(
                transfer_id=transfer_id,
                attempt=sequence.request.attempt,
                block_ids=tuple(sequence.block_table),
                first_block=ready_tokens // self._block_size,
                num_tokens=sequence.num_tokens,
            )
        )
        entry.transfer_id, entry.reserved_s = transfer_id, asyncio.get_running_loop().time()
        entry.transfer_span = begin_span("decode_worker", "transfer", sequence.request)
        self._metrics.cached(ready_tokens)
        self._by_transfer[transfer_id] = sequence.key
        self._send(session, Reserved(sequence.key, ready_tokens))

    def abort(self, session: Session, key: SequenceKey) -> None:
        """End one of the session's sequences wherever it is; others are ignored."""
        if key in session.entries:
            self._end(key)

    def _end(self, key: SequenceKey) -> "asyncio.Task[None]":
        """Forget a sequence; the task ends when its blocks are on their way back."""
        entry = self._forget(key).entry
        for fork in entry.forks:
            self._fail(fork, SequenceFailure.PREEMPTED, _NO_ORIGIN)
        return self._spawn(self._release(entry))

    async def _release(self, entry: Entry) -> None:
        """Free an ended sequence's blocks, once nobody writes to them any more."""
        if entry.starting is not None:
            await asyncio.wait([entry.starting])
        if entry.transfer_id:
            await self._receiver.abort(entry.transfer_id)
        self._engine.abort(entry.sequence)

    def close(self, session: Session) -> None:
        """The router is gone: end everything that came by it."""
        for key in list(session.entries):
            self.abort(session, key)  # unless it has gone with the one it was forked from

    # -- what the engine and the receiver tell ----------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Send each router its tokens of this step."""
        steps: dict[int, tuple[Session, Step]] = {}
        for output in result.outputs:
            key = (output.request_id, output.attempt)
            owner = self._owners.get(key)
            if owner is None:
                continue  # ended meanwhile
            _, step = steps.setdefault(id(owner.session), (owner.session, Step([])))
            step.outputs.append(output)
            if output.cached_tokens:
                self._metrics.cached(output.cached_tokens)
            owner.entry.forks.clear()
            if output.finish_reason is not None:
                self._forget(key)
        for session, step in steps.values():
            self._send(session, step)
        self._metrics.preempted(len(result.preempted))
        for sequence in result.preempted:
            self._fail(sequence.key, SequenceFailure.PREEMPTED, "its blocks went to older sequences")
        for sequence, reason in result.refused:
            self._fail(sequence.key, SequenceFailure.REFUSED, reason)

    def on_committed(self, transfer_id: str, first_token: SampledToken) -> None:
        """The KV is whole: the sequence runs from the next step on."""
        key = self._by_transfer.pop(transfer_id, None)
        if key is not None:
            entry = self._owners[key].entry
            entry.transfer_id = ""
            entry.transfer_span.end()
            self._metrics.transferred(asyncio.get_running_loop().time() - entry.reserved_s)
            entry.forks.clear()  # they begin with the commit
            self._engine.post(lambda scheduler: scheduler.commit(key, first_token))

    def on_transfer_failed(self, transfer_id: str, error: MeshError) -> None:
        """The KV will not come, or cannot be trusted."""
        key = self._by_transfer.get(transfer_id)
        if key is not None:
            is_wrong = isinstance(error, TransferCorrupt | LayoutMismatch)
            self._fail(key, SequenceFailure.KV_REFUSED if is_wrong else SequenceFailure.KV_MISSING, str(error))

    def _time_is_up(self, key: SequenceKey) -> None:
        self._fail(key, SequenceFailure.DEADLINE, "its time is up")

    def _fail(self, key: SequenceKey, reason: SequenceFailure, detail: str) -> None:
        owner = self._owners.get(key)
        if owner is not None:
            mark_failed(owner.entry.span, reason.value)
            self._end(key)
            self._metrics.failed(reason.value)
            log.info("sequence failed", request_id=key[0], attempt=key[1], reason=reason.value, detail=detail)
            self._send(owner.session, Failed(key, reason, detail))

    def _send(self, session: Session, event: Event) -> None:
        """Queue an event; a router that reads too slowly loses its sequences at once, not only when it reads again."""
        if not session.send(event):
            self.close(session)

    def _forget(self, key: SequenceKey) -> _Owner:
        owner = self._owners.pop(key)
        del owner.session.entries[key]
        self._by_transfer.pop(owner.entry.transfer_id, None)
        owner.entry.transfer_span.end()  # does nothing the second time
        owner.entry.span.end()
        if owner.entry.deadline is not None:
            owner.entry.deadline.cancel()
        asyncio.get_running_loop().call_soon(self._note_idle)  # after a release, if one follows, has begun
        return owner

    def _spawn(self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._owners and not self._tasks:
            self._idle.set()

    async def drained(self) -> None:
        """Return when no sequence is left."""
        await self._idle.wait()
