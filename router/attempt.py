"""One attempt of a choice: one dispatch to a decode worker and, unless that worker prefills itself, a prefill worker.

start on decode ─▶ reserved ─▶ prefill call ─▶ first token ─▶ transfer finished
                                                   └────▶ tokens from decode ─▶ finished
fork: started together with another attempt, whose prompt it shares ─▶ tokens from decode ─▶ finished
a failure ─▶ Replayable; in every case both workers are told to abort, and the claim is released

The decode worker is reached over its link (workers/decode_link.py), the prefill worker by a call that lasts while it
computes the prompt and sends its KV (workers/prefill_client.py).
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from mesh.domain.errors import (
    MeshError,
    ReceiverLost,
    TransferCorrupt,
    TransferFailed,
    WorkerLost,
)
from mesh.domain.prefill import KVDestination, PrefillEvent, PrefillStarted
from mesh.domain.request import SequenceSpec, mint_id
from mesh.domain.tokens import SequenceOutput
from mesh.domain.worker import WorkerInfo
from router.admission.in_flight import CapacityClaim
from router.choice import Choice
from router.timeline import Timeline
from router.workers.decode_link import Link
from router.workers.prefill_client import PrefillCaller

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptTimeouts:
    """Seconds an attempt waits for its workers: to reserve blocks, to compute the prompt, and between tokens."""

    reserve_s: float
    prefill_s: float
    stall_s: float


class Attempt:
    """One attempt at a choice, and the SequenceListener of its decode link. Call `run` once, or `close`.

    The attempt owns the claim. `forks` are attempts that start together with this one and share its prompt.
    """

    def __init__(
        self,
        choice: Choice,
        spec: SequenceSpec,
        claim: CapacityClaim,
        *,
        link: Link,
        prefill_client: PrefillCaller,
        timeline: Timeline,
        timeouts: AttemptTimeouts,
        forks: "Sequence[Attempt]" = (),
    ) -> None:
        self.blamed: WorkerInfo | None = None
        """The worker that made the attempt fail."""
        self.placement = claim.placement
        self.started_s = claim.started_s
        self._choice = choice
        self._spec = spec
        self._claim = claim
        self._link = link
        self._timeline = timeline
        self._forks = forks
        self._prefill_client = prefill_client
        self._timeouts = timeouts
        self._prefill_call: asyncio.Task[None] | None = None
        self._has_first_token = False
        self._is_transferred = False
        self._is_decoding = False
        self._clock = asyncio.get_running_loop().time
        self._last_event_s = self._clock()
        self._reserved: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        claim.on_abandoned = self._on_abandoned

    async def run(self) -> None:
        """Return when the choice is finished, or raise why it cannot be.

        Cleans up in every case, also when cancelled.
        """
        try:
            if not self._claim.is_fork:
                await self._start()
            await self._wait_ended()
            if self._forks and self._prefill_call is not None:  # forks need its KV, even after one token
                await asyncio.wait({self._prefill_call})
        finally:
            self.close()

    async def _start(self) -> None:
        prefill = self.placement.prefill
        transfer_id = mint_id() if prefill is not None else ""
        self._link.start(self._spec, transfer_id, self, self._forks)
        if prefill is None:
            self._timeline.mark("prefill_started")
            return
        ready_tokens = await self._wait_reserved()
        if ready_tokens is not None:
            destination = KVDestination.at(self.placement.decode, transfer_id, ready_tokens)
            self._prefill_call = asyncio.create_task(self._run_prefill(prefill, destination))
            self._prefill_call.add_done_callback(self._prefill_ended)

    def on_reserved(self, ready_tokens: int) -> None:
        self._claim.confirm()
        # Behind KV without a recurrent state the prompt is computed nonetheless: the prefill worker counts what it had.
        if self._spec.attempt == 0 and not self.placement.decode.layout.state_blocks:
            self._choice.note_cached(min(ready_tokens, self._spec.num_prompt_tokens))
        if not self._reserved.done():
            self._reserved.set_result(ready_tokens)

    def on_output(self, output: SequenceOutput) -> None:
        if not self._is_decoding:
            self._is_decoding = True
            self._timeline.mark("decode_started")
            self._claim.confirm()
        self._accept(output)

    def on_failed(self, error: MeshError) -> None:
        placement = self.placement
        sender = placement.prefill if isinstance(error, TransferCorrupt | TransferFailed) else None
        self._end(error, sender or placement.decode)

    def _on_abandoned(self, worker: WorkerInfo) -> None:
        """A worker has stalled, and other workers can take over."""
        self._end(WorkerLost(f"worker {worker.worker_id} has stalled"), worker)

    def _accept(self, output: SequenceOutput) -> None:
        self._last_event_s = self._clock()
        try:
            if self._spec.attempt == 0 and output.cached_tokens:
                self._choice.note_cached(output.cached_tokens)
            self._choice.accept(output)
        except Exception as error:  # must end this request only, not the link that carries all of them
            self._end(error, None)
            return
        self._claim.grow(self._choice.num_tokens)
        if self._choice.token_ids:
            self._timeline.tokens_received(self._last_event_s)
            self._claim.first_token()
        if self._choice.finish_reason is not None:
            self._timeline.end_attempt()
            self._choice.timing = self._timeline.timing()
            self._end(None, None)

    def _end(self, error: Exception | None, blamed: WorkerInfo | None) -> None:
        """End the attempt. Only the first call counts."""
        if not self._ended.done():
            self.blamed = blamed
            self._ended.set_result(error)
        if not self._reserved.done():
            self._reserved.set_result(None)

    async def _wait_reserved(self) -> int | None:
        """Return how many leading tokens the decode worker has cached, or None if the attempt has ended."""
        try:
            async with asyncio.timeout(self._timeouts.reserve_s):
                return await self._reserved
        except TimeoutError:
            self._end(WorkerLost("the decode worker reserved no memory in time"), self.placement.decode)
            return None

    async def _wait_ended(self) -> None:
        """Return when the attempt has ended; raise its error.

        One timer serves many tokens: it checks the age of the last event. Time in which the event loop stood still (a
        process that was stopped, a machine that swaps) counts against no worker: its tokens have yet to be read.
        """
        while not self._ended.done():
            is_decoding = self._is_decoding or self._is_transferred
            timeout_s = self._timeouts.stall_s if is_decoding else self._timeouts.prefill_s
            waited_s = self._clock() - self._last_event_s
            if waited_s >= timeout_s and not self._prefill_runs():
                self._end(WorkerLost(f"no token for {waited_s:.1f} s"), self.placement.decode)
                break
            due_s = self._clock() + self._timeouts.stall_s / 4
            await asyncio.wait({self._ended}, timeout=self._timeouts.stall_s / 4)
            now_s = self._clock()
            self._last_event_s = min(now_s, self._last_event_s + max(0.0, now_s - due_s))
        error = self._ended.result()
        if error is not None:
            raise error

    def _prefill_runs(self) -> bool:
        """True while the prefill call runs: the call has a deadline of its own."""
        return self._prefill_call is not None and not self._prefill_call.done()

    async def _run_prefill(self, worker: WorkerInfo, destination: KVDestination) -> None:
        async with aclosing(self._prefill_client.run(worker, self._spec, destination)) as events:
            async for event in events:
                self._on_prefill(event)

    def _on_prefill(self, event: PrefillEvent) -> None:
        if isinstance(event, SequenceOutput):
            if event.key != self._spec.key:
                return
            if event.tokens:  # events without tokens carry log-probs of the prompt
                self._has_first_token = True
                self._timeline.mark("prefill_finished")
                self._claim.prefill_computed()
            self._accept(event)
        elif isinstance(event, PrefillStarted):
            self._timeline.mark("prefill_started", ago_s=event.elapsed_s)
            self._timeline.mark("transfer_started")  # KV is sent while the prompt is computed
            self._claim.transfer_started()
        else:
            self._is_transferred = True
            self._timeline.mark("transfer_finished")
            self._timeline.note_kv_transfer(event.duration_s)
            self._last_event_s = self._clock()
            self._claim.transfer_finished(event.num_bytes)

    def _prefill_ended(self, task: "asyncio.Task[None]") -> None:
        """A prefill that fails after the decode worker has all KV does no harm."""
        if task.cancelled():
            return
        error = task.exception()
        self._claim.prefill_released()
        if self._has_first_token and (error is None or self._is_transferred or self._is_decoding):
            return
        if not isinstance(error, Exception):
            error = TransferFailed("the prefill ended without a first token")
        self._end(error, self.placement.decode if isinstance(error, ReceiverLost) else self.placement.prefill)

    def close(self) -> None:
        """Abort on both workers and release the claim.

        `run` calls this; callers only need it if `run` never ran.
        """
        self._link.abort(self._spec.key)
        if self._prefill_call is not None:
            self._prefill_call.cancel()
        self._claim.release()
        self._end(None, None)
