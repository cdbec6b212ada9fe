"""The decode worker's logic, without gRPC.

Life of a sequence here:

    start with a transfer   blocks reserved -> Reserved to the router -> KV arrives, is verified -> on_committed -> runs
    start without           queued, prefilled here in chunks together with the running batch -> runs
    running                 the tokens of each step go out in one message per router
    ends                    finish_reason with the last token; or the router aborts it; or Failed (preempted, KV
                            refused, no capacity, draining), and the router replays it; or its deadline passes
    forks                   other choices of the same prompt: separate sequences that start when the prompt's KV is
                            complete; if the prompt's sequence ends earlier, or no slot or block is free for them then,
                            they fail for lack of capacity, and the router replays them
    next attempt            of the same request: older attempts are ended first; a late older attempt is refused
    router disconnects      all its sequences are aborted

If a sequence is aborted while its KV is in transfer, its blocks are freed only after the receiver has stopped writing.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

import structlog

from decode_worker.session import Event, Failed, Reserved, Session, SessionEntry, Step
from engine.engine import StepResult
from engine.loop import EngineLoop
from engine.sequence import SequenceState
from kvtransfer import ExpectedTransfer, MultiRankReceiver
from mesh.domain.errors import (
    InvalidRequest,
    LayoutMismatch,
    MeshError,
    ModelFailed,
    TransferCorrupt,
    WorkerBusy,
)
from mesh.domain.kv import KVLayout
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import SequenceFailure, SequenceKey, failure_of
from mesh.tracing import begin_worker_span, end_span, mark_failed
from worker.metrics import DecodeMetrics

log = structlog.get_logger(__name__)

# Time for routers to read the last events of a worker that stops.
_LAST_READ_S = 5.0
_PROMPT_ENDED = "the sequence that computes its prompt has ended"


class DecodeService:
    """Runs the sequences of all routers on the engine. All methods run on the event loop. Connect the callbacks of the
    engine and of the receiver before the engine starts.

    How a sequence ends:

        abort, end_session   the router has asked for it, or has gone: no event follows
        _fail                the worker gives it up: a Failed event tells the router
        on_step              its last token goes out; the engine has freed its blocks already
    All of them _forget it: from then on its key is unknown, its spans and its timer have ended. The first two do so by
    _retire, which also fails the forks that wait for it, and spawns _release: the task that frees its blocks once
    nothing writes to them.
    """

    def __init__(
        self,
        engine: EngineLoop,
        receiver: MultiRankReceiver,
        *,
        layout: KVLayout,
        is_draining: Callable[[], bool],
        metrics: DecodeMetrics,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._layout = layout
        self._is_draining = is_draining
        self._metrics = metrics
        self._entries: dict[SequenceKey, SessionEntry] = {}  # of all sessions
        self._by_transfer: dict[str, SequenceKey] = {}
        self._sessions: set[Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_sequences(self) -> int:
        """The number of sequences of all sessions."""
        return len(self._entries)

    # -- called by routers ------------------------------------------------------------------------------------------

    def start(self, session: Session, spec: SequenceSpec, transfer_id: str) -> None:
        """Start one attempt and its forks. Their progress is reported as events of the session."""
        self._sessions.add(session)
        entry = self._enter(session, spec)
        fork_entries = [self._enter(session, fork) for fork in spec.forked()]
        forks = [fork for fork in fork_entries if fork is not None]
        if entry is None:
            for fork in forks:
                self._fail(fork.sequence.key, SequenceFailure.NO_CAPACITY, _PROMPT_ENDED)
            return
        entry.sequence.forks = [fork.sequence for fork in forks]
        entry.forks = [fork.sequence.key for fork in forks]
        self._metrics.started(entry.sequence.num_tokens, "transferred" if transfer_id else "computed")
        context = contextvars.copy_context()
        context.run(structlog.contextvars.bind_contextvars, request_id=spec.request_id, attempt=spec.attempt)
        replaced = [task for started in (entry, *forks) for task in started.replaced]
        entry.starting = self._spawn(self._start(entry, transfer_id, replaced), context)
        for fork in forks:
            self._metrics.started(fork.sequence.num_tokens, "shared")
            fork.starting = entry.starting

    def _enter(self, session: Session, spec: SequenceSpec) -> SessionEntry | None:
        """Register an attempt and end earlier attempts of the request. Return None if the attempt is refused."""
        entry = SessionEntry(session, SequenceState(spec))
        key = entry.sequence.key
        attempts = [known for known in self._entries if known[0] == spec.request_id]
        if self._is_draining():
            self._send(session, Failed(key, SequenceFailure.DRAINING, "the worker is draining"))
            return None
        if any(attempt >= key for attempt in attempts):
            detail = "this attempt, or a newer one, is running here already"
            self._send(session, Failed(key, SequenceFailure.INTERNAL, detail))
            return None
        self._idle.clear()
        session.entries[key] = self._entries[key] = entry
        if spec.time_left_s is not None:
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(
                spec.time_left_s, self._fail, key, SequenceFailure.DEADLINE, "its time is up"
            )
        entry.replaced = tuple(self._retire(attempt) for attempt in attempts)
        entry.span = begin_worker_span("decode_worker", "decode", spec)
        return entry

    async def _start(self, entry: SessionEntry, transfer_id: str, replaced: Sequence[asyncio.Task[None]]) -> None:
        """Start the sequence once older attempts, its own and those of its forks, have freed their blocks."""
        key = entry.sequence.key
        try:
            if replaced:
                await asyncio.wait(replaced)
            if not await self._prepare(entry):
                return
            await self._engine.fetch_evicted(entry.sequence)
            if transfer_id:
                await self._reserve(entry, transfer_id)
            else:
                await self._engine.call(lambda scheduler: scheduler.add(entry.sequence))
        except (WorkerBusy, InvalidRequest) as error:
            self._fail(key, failure_of(error), str(error))
        except Exception as error:
            log.error("cannot start a sequence", request_id=key[0], exc_info=error)
            self._fail(key, SequenceFailure.INTERNAL, str(error))

    async def _prepare(self, entry: SessionEntry) -> bool:
        """Prepare the grammars and the adapter of a request's choices, the main one last. If that fails, fail all of
        them and return False; return False, too, once the sequence has ended.
        """
        choices = [*entry.sequence.forks, entry.sequence]
        if entry.sequence.key not in self._entries:
            return False
        entry.preparing = asyncio.create_task(self._engine.prepare(choices))
        await asyncio.wait([entry.preparing])
        if entry.preparing.cancelled():
            return False
        error = entry.preparing.exception()
        if isinstance(error, InvalidRequest | ModelFailed):
            for sequence in choices:  # forks first: they would be replayed if their prompt's sequence ended before
                self._fail(sequence.key, failure_of(error), str(error))
            return False
        if error is not None:
            raise error
        return True

    async def _reserve(self, entry: SessionEntry, transfer_id: str) -> None:
        sequence = entry.sequence
        ready_tokens = await self._engine.call(lambda scheduler: scheduler.reserve(sequence))
        if sequence.key not in self._entries:
            return  # it was aborted meanwhile; the abort waits for this task and frees the blocks
        layout, num_tokens = self._layout, sequence.num_tokens
        await self._receiver.expect(
            ExpectedTransfer(
                transfer_id=transfer_id,
                attempt=sequence.spec.attempt,
                block_ids=layout.transfer_blocks(sequence.block_table, num_tokens),
                first_block=layout.first_transfer_index(num_tokens, ready_tokens // layout.block_size),
                num_tokens=num_tokens,
            )
        )
        entry.transfer_id = transfer_id
        if sequence.key not in self._entries:
            return  # the abort ends the transfer, too
        self._by_transfer[transfer_id] = sequence.key
        entry.reserved_s = asyncio.get_running_loop().time()
        entry.transfer_span = begin_worker_span("decode_worker", "transfer", sequence.spec)
        self._metrics.cached(ready_tokens)
        self._send(entry.session, Reserved(sequence.key, ready_tokens))

    def abort(self, session: Session, key: SequenceKey) -> None:
        """End a sequence of the session in any state; ignored if the session has no such sequence."""
        session.drop(key)
        if key in session.entries:
            self._retire(key)

    def _retire(self, key: SequenceKey) -> "asyncio.Task[None]":
        """Forget a sequence. The returned task ends when the engine has been told to free its blocks."""
        entry = self._forget(key)
        if entry.preparing is not None:
            entry.preparing.cancel()
        for fork in entry.forks:
            self._fail(fork, SequenceFailure.NO_CAPACITY, _PROMPT_ENDED)
        return self._spawn(self._release(entry))

    async def _release(self, entry: SessionEntry) -> None:
        """Free an ended sequence's blocks once the receiver no longer writes to them."""
        if entry.starting is not None:
            await asyncio.wait([entry.starting])
        if entry.transfer_id:
            await self._receiver.abort(entry.transfer_id)
        self._engine.abort(entry.sequence)

    def end_session(self, session: Session) -> None:
        """End all sequences of a router that has disconnected, or reads too slowly."""
        self._sessions.discard(session)
        for key in list(session.entries):
            # Ignored if the key was a fork and ended with its prompt's sequence.
            self.abort(session, key)

    # -- called by the engine and the receiver ----------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Send each router its tokens of this step."""
        steps: dict[int, tuple[Session, Step]] = {}
        for output in result.outputs:
            entry = self._entries.get(output.key)
            if entry is None:
                continue  # the sequence has ended meanwhile
            _, step = steps.setdefault(id(entry.session), (entry.session, Step([])))
            step.outputs.append(output)
            if output.cached_tokens:
                self._metrics.cached(output.cached_tokens)
            entry.forks.clear()  # its first step has started them
            if output.finish_reason is not None:
                self._forget(output.key)
        for session, step in steps.values():
            self._send(session, step)
        self._metrics.preempted(len(result.preempted))
        for sequence in result.preempted:
            self._fail(sequence.key, SequenceFailure.PREEMPTED, "its blocks went to older sequences")
        for sequence, error in result.failed:
            self._fail(sequence.key, failure_of(error), str(error))

    def on_committed(self, transfer_id: str, first_token_id: int) -> None:
        """The KV is complete: the sequence runs from the next step on."""
        key = self._by_transfer.pop(transfer_id, None)
        if key is not None:
            entry = self._entries[key]
            entry.transfer_id = ""
            end_span(entry.transfer_span)
            self._metrics.transferred(asyncio.get_running_loop().time() - entry.reserved_s)
            entry.forks.clear()  # the scheduler starts them with the commit
            self._engine.post(lambda scheduler: scheduler.commit(key, first_token_id))

    def on_transfer_failed(self, transfer_id: str, error: MeshError) -> None:
        """The KV did not arrive or is corrupt: fail the sequence."""
        key = self._by_transfer.get(transfer_id)
        if key is not None:
            is_wrong = isinstance(error, TransferCorrupt | LayoutMismatch)
            self._fail(key, SequenceFailure.KV_REFUSED if is_wrong else SequenceFailure.KV_MISSING, str(error))

    def _fail(self, key: SequenceKey, reason: SequenceFailure, detail: str) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            mark_failed(entry.span, reason.value)
            self._retire(key)
            self._metrics.failed(reason)
            log.info("sequence failed", request_id=key[0], attempt=key[1], reason=reason.value, detail=detail)
            self._send(entry.session, Failed(key, reason, detail))

    def _send(self, session: Session, event: Event) -> None:
        """Queue an event. If the router reads too slowly, end its sequences at once, unless that is under way: forks
        that end with their prompt's sequence have events, too.
        """
        if not session.send(event) and session in self._sessions:
            self.end_session(session)

    def _forget(self, key: SequenceKey) -> SessionEntry:
        entry = self._entries.pop(key)
        del entry.session.entries[key]
        self._by_transfer.pop(entry.transfer_id, None)
        end_span(entry.transfer_span)
        end_span(entry.span)
        if entry.deadline is not None:
            entry.deadline.cancel()
        # Later, so that a release task that follows counts as work.
        asyncio.get_running_loop().call_soon(self._note_idle)
        return entry

    def _spawn(
        self, coroutine: Coroutine[object, object, None], context: contextvars.Context | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._entries and not self._tasks:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no sequence is left and every router has read its last tokens. A router that hears first that the
        worker has left would replay what it has not read.
        """
        await self._idle.wait()
        sessions = list(self._sessions)
        for session in sessions:
            session.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_READ_S):
                await asyncio.gather(*(session.all_read.wait() for session in sessions))
