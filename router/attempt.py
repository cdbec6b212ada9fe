"""One attempt of a choice: one dispatch to a decode worker and, unless that prefills by itself, a prefill worker.

start on decode ─▶ reserved ─▶ prefill call ─▶ first token ─▶ transfer finished
                                                   └────▶ tokens from decode ─▶ finished
fork: started with another attempt, whose prompt it shares ─▶ tokens from decode ─▶ finished
anything fails ─▶ Replayable; whatever happens, both workers are told to drop what is left, and the booking is released
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from mesh.domain.errors import MeshError, TransferCorrupt, TransferFailed, WorkerLost
from mesh.domain.request import Request, mint_id
from mesh.domain.tokens import StepOutput
from mesh.domain.worker import WorkerInfo
from router.choice import Choice
from router.decode_link import DecodeLink
from router.ledger import Booking
from router.prefill_call import PrefillClient, PrefillEvent, PrefillStarted, Reservation
from router.timeline import Timeline

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an attempt waits for its workers: to reserve, for the prompt to be computed, between tokens."""

    reserve_s: float
    prefill_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What an attempt works with. The attempt owns the booking. `forks` are started with it; it `is_fork` itself if
    another attempt starts it."""

    request: Request
    booking: Booking
    link: DecodeLink
    timeline: Timeline
    forks: "tuple[Attempt, ...]" = ()
    is_fork: bool = False


class Attempt:
    """A SequenceListener. Run it once."""

    def __init__(self, choice: Choice, dispatched: Dispatched, prefills: PrefillClient, patience: Patience) -> None:
        self.blamed: WorkerInfo | None = None
        """The worker that made the attempt fail."""
        self.placement = dispatched.booking.placement
        self.begun_s = dispatched.booking.begun_s
        self._choice = choice
        self._request = dispatched.request
        self._booking = dispatched.booking
        self._link = dispatched.link
        self._timeline = dispatched.timeline
        self._forks = dispatched.forks
        self._is_fork = dispatched.is_fork
        self._prefills = prefills
        self._patience = patience
        self._prefill: asyncio.Task[None] | None = None
        self._first_token_came = False
        self._transferred = False
        self._decode_streams = False
        self._clock = asyncio.get_running_loop().time
        self._last_sign_s = self._clock()
        self._reserved: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._booking.on_abandoned = self._on_abandoned

    async def run(self) -> None:
        """Until the choice is finished. Raises what made it impossible. Leaves nothing behind, also when cancelled."""
        try:
            if not self._is_fork:
                await self._start()
            await self._wait_ended()
            if self._forks and self._prefill is not None:  # they need its KV, even if it has ended with its first token
                await asyncio.wait({self._prefill})
        finally:
            self.close()

    async def _start(self) -> None:
        prefill = self.placement.prefill
        transfer_id = mint_id() if prefill is not None else ""
        self._link.start(self._request, transfer_id, self, self._forks)
        if prefill is None:
            self._timeline.mark("prefill_started")
            return
        ready_tokens = await self._wait_reserved()
        if ready_tokens is not None:
            self._start_prefill(prefill, Reservation(self.placement.decode, transfer_id, ready_tokens))

    def on_reserved(self, ready_tokens: int) -> None:
        """The decode worker holds blocks."""
        self._booking.reserved()
        if self._request.attempt == 0:
            self._choice.note_cached(min(ready_tokens, self._request.num_prompt_tokens))
        if not self._reserved.done():
            self._reserved.set_result(ready_tokens)

    def on_output(self, output: StepOutput) -> None:
        """Tokens from the decode worker."""
        if not self._decode_streams:
            self._decode_streams = True
            self._timeline.mark("decode_started")
            if self._booking.reserved_at_s is None:
                self._booking.reserved()
        self._accept(output)

    def on_failed(self, error: MeshError) -> None:
        """The decode worker has given up or is lost."""
        placement = self.placement
        sender = placement.prefill if isinstance(error, TransferCorrupt | TransferFailed) else None
        self._end(error, sender or placement.decode)

    def _on_abandoned(self, worker: WorkerInfo) -> None:
        """A worker has stalled, and others can go on."""
        self._end(WorkerLost(f"worker {worker.worker_id} has stalled"), worker)

    def _accept(self, output: StepOutput) -> None:
        self._last_sign_s = self._clock()
        try:
            if self._request.attempt == 0 and output.cached_tokens:
                self._choice.note_cached(output.cached_tokens)
            self._choice.accept(output)
        except Exception as error:  # must end this request only, not the stream that carries all of them
            self._end(error, None)
            return
        self._booking.num_tokens = self._choice.num_tokens
        if self._choice.token_ids:
            self._timeline.token_came(self._last_sign_s)
            self._booking.first_token()
        if self._choice.finish_reason is not None:
            self._choice.timing = self._timeline.timing()
            self._end(None, None)

    def _end(self, error: Exception | None, blamed: WorkerInfo | None) -> None:
        """The attempt is over; the first reason counts."""
        if not self._ended.done():
            self.blamed = blamed
            self._ended.set_result(error)
        if not self._reserved.done():
            self._reserved.set_result(None)

    async def _wait_reserved(self) -> int | None:
        """Leading tokens already at the decode worker; None if the attempt has ended."""
        try:
            async with asyncio.timeout(self._patience.reserve_s):
                return await self._reserved
        except TimeoutError:
            self._end(WorkerLost("the decode worker said nothing about its memory in time"), self.placement.decode)
            return None

    async def _wait_ended(self) -> None:
        """Raises what the attempt ended with. One timer for many tokens: it looks how old the last sign of life is."""
        while not self._ended.done():
            decodes = self._decode_streams or self._transferred
            patience_s = self._patience.stall_s if decodes else self._patience.prefill_s
            waited_s = self._clock() - self._last_sign_s
            if waited_s >= patience_s and not self._prefill_runs():
                self._end(WorkerLost(f"no token for {waited_s:.1f} s"), self.placement.decode)
                break
            look_again_s = min(max(patience_s - waited_s, self._patience.stall_s / 4), self._patience.stall_s)
            await asyncio.wait({self._ended}, timeout=look_again_s)
        error = self._ended.result()
        if error is not None:
            raise error

    def _prefill_runs(self) -> bool:
        """A prefill has its own deadline, and may take long."""
        return self._prefill is not None and not self._prefill.done()

    def _start_prefill(self, worker: WorkerInfo, reservation: Reservation) -> None:
        self._prefill = asyncio.get_running_loop().create_task(self._run_prefill(worker, reservation))
        self._prefill.add_done_callback(self._prefill_ended)

    async def _run_prefill(self, worker: WorkerInfo, reservation: Reservation) -> None:
        async with aclosing(self._prefills.run(worker, self._request, reservation)) as events:
            async for event in events:
                self._on_prefill(event)

    def _on_prefill(self, event: PrefillEvent) -> None:
        if isinstance(event, StepOutput):
            if (event.request_id, event.attempt) != (self._request.request_id, self._request.attempt):
                return
            self._first_token_came = True
            self._timeline.mark("prefill_finished")
            self._booking.prefill_computed()
            self._accept(event)
        elif isinstance(event, PrefillStarted):
            self._timeline.mark("prefill_started", ago_s=event.elapsed_s)
            self._timeline.mark("transfer_started")  # KV leaves while it is computed
            self._booking.transfer_started()
        else:
            self._transferred = True
            self._timeline.mark("transfer_finished")
            self._timeline.note_kv_transfer(event.duration_s)
            self._last_sign_s = self._clock()
            self._booking.transfer_finished(event.num_bytes)

    def _prefill_ended(self, task: "asyncio.Task[None]") -> None:
        """A prefill that broke after the decode worker had all of it does no harm."""
        if task.cancelled():
            return
        error = task.exception()
        self._booking.prefill_released()
        if self._first_token_came and (error is None or self._transferred or self._decode_streams):
            return
        if not isinstance(error, Exception):
            error = TransferFailed("the prefill ended without a first token")
        self._end(error, self.placement.prefill)

    def close(self) -> None:
        """Both workers drop what is left; the booking is given back. `run` ends with it; for one that was never run."""
        self._link.abort((self._request.request_id, self._request.attempt))
        if self._prefill is not None:
            self._prefill.cancel()
        self._booking.release()
        self._end(None, None)
