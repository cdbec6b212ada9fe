"""The prefill worker's logic, without gRPC.

Life of a prompt here:

    prefill     the sequence is queued
    computing   the first chunk opens the transfer; after each layer group of a chunk, final blocks are announced
    first token sampled -> sent to the router at once; the sequence is HELD: it keeps its blocks
    transfer    committed with the first token, verified by the decode worker -> finished; the blocks stay in the prefix
                cache
    ends early  the first token is the last one and no fork needs the KV; or the call is cancelled; or the transfer
                fails: the blocks are freed once no thread reads them
"""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from opentelemetry.trace import INVALID_SPAN
from opentelemetry.trace import Span as TraceSpan

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.engine import StepResult
from engine.loop import EngineLoop
from engine.sequence import SequenceState
from kvtransfer import AnyOutgoingTransfer, MultiRankSender, TransferSpec
from mesh.domain.errors import InvalidRequest, MeshError, SequencePreempted, WorkerDraining
from mesh.domain.kv import Span
from mesh.domain.prefill import KVDestination, PrefillEvent, PrefillStarted, TransferFinished
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import SequenceKey, SequenceOutput, failure_of
from mesh.domain.worker import KVEndpoint
from mesh.tasks import call_on
from mesh.tracing import begin_worker_span, end_span, mark_failed
from worker.metrics import PrefillMetrics

log = structlog.get_logger(__name__)

_FAILURE_GRACE_S = 5.0
"""Time for the router to end the decode side of a prompt that failed."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A running prompt. `receivers` are the ranks that take the KV, with their parts. `transfer` and `started` are set
    after the first chunk, whose step began at `begun_s` in event loop time; the transfer was opened at `opened_s`.
    `context` is the context of the call, for logs."""

    sequence: SequenceState
    destination: KVDestination
    receivers: tuple[KVEndpoint, ...]
    started: asyncio.Future[None]
    first_token: asyncio.Future[SequenceOutput]
    transfer: AnyOutgoingTransfer | None = None
    begun_s: float = 0.0
    opened_s: float = 0.0
    has_failed: bool = False
    trace_span: TraceSpan = INVALID_SPAN
    transfer_trace_span: TraceSpan = INVALID_SPAN
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def fail(self, error: MeshError) -> None:
        """Raise the error in the call, which waits for `started` first and for `first_token` then."""
        self.has_failed = True
        waited_for: asyncio.Future[Any] = self.first_token if self.started.done() else self.started
        waited_for.set_exception(error)


@dataclass(frozen=True, slots=True)
class _FinalBlocks:
    """Blocks of a prompt, by index in its transfer, that are final in some layers, computed by a step that began at
    `begun_s`.
    `block_table` is a copy for the transfer, which the first ones of a prompt open; later ones need none. The step of
    one that `ends_prompt` is the prompt's last one.
    """

    prompt: _Prompt
    blocks: range
    ends_prompt: bool
    block_table: tuple[int, ...]
    begun_s: float


class PrefillService:
    """Runs prompts on the engine and sends their KV to decode workers. All methods but `on_layers` run on the event
    loop. Connect the engine's callbacks to `on_layers` and `on_step` before the engine starts."""

    def __init__(
        self,
        engine: EngineLoop,
        sender: MultiRankSender,
        *,
        is_draining: Callable[[], bool],
        metrics: PrefillMetrics,
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._layout = sender.layout
        self._is_draining = is_draining
        self._metrics = metrics
        self._prompts: dict[SequenceKey, _Prompt] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()

    @property
    def num_prompts(self) -> int:
        """The number of prompts that are queued, computing, or being transferred."""
        return len(self._prompts)

    # -- called by routers ------------------------------------------------------------------------------------------

    async def prefill(self, spec: SequenceSpec, destination: KVDestination) -> AsyncGenerator[PrefillEvent, None]:
        """Run one prompt and transfer its KV. Closing the iterator stops the computation and the transfer."""
        if self._is_draining():
            raise WorkerDraining("the worker is draining")
        if (
            not 0 <= destination.ready_tokens <= len(spec.token_ids)
            or destination.ready_tokens % self._layout.block_size
        ):
            raise InvalidRequest(f"ready_tokens {destination.ready_tokens} does not fit the prompt")
        sequence = SequenceState(spec, hand_over=True)
        if sequence.key in self._prompts:
            raise InvalidRequest("this attempt is running here already")
        receivers = self._sender.receivers(destination.address, destination.kv_endpoints)
        structlog.contextvars.bind_contextvars(request_id=spec.request_id, attempt=spec.attempt)
        prompt = _Prompt(sequence, destination, receivers, self._loop.create_future(), self._loop.create_future())
        prompt.trace_span = begin_worker_span("prefill_worker", "prefill", spec)
        self._prompts[sequence.key] = prompt
        self._idle.clear()
        self._metrics.looked_up(sequence.num_tokens)
        try:
            await self._engine.prepare([sequence])
            await self._engine.fetch_evicted(sequence)
            await self._engine.call(lambda scheduler: scheduler.add(sequence))
            await prompt.started
            yield PrefillStarted(self._loop.time() - prompt.begun_s)
            assert prompt.transfer is not None
            output = await _first_token(prompt.first_token, prompt.transfer)
            end_span(prompt.trace_span)
            yield output
            if output.finish_reason is None or spec.forks:
                result = await prompt.transfer.commit(len(spec.token_ids), output.tokens[-1].id)
                duration_s = self._loop.time() - prompt.opened_s
                self._metrics.sent(result.num_bytes, result.transport, duration_s)
                yield TransferFinished(result.num_bytes, duration_s)
            else:
                # The first token tells the router to end the decode side, which ends the transfer. An abort by this
                # worker could reach the decode worker first, and would look like lost KV.
                with contextlib.suppress(MeshError):
                    await prompt.transfer.ended()
        except MeshError as error:
            self._metrics.failed(failure_of(error))
            mark_failed(prompt.transfer_trace_span, type(error).__name__)
            raise
        finally:
            end_span(prompt.trace_span)
            end_span(prompt.transfer_trace_span)
            del self._prompts[sequence.key]
            release = asyncio.create_task(self._release(prompt))
            self._releases.add(release)
            release.add_done_callback(self._on_released)

    async def _release(self, prompt: _Prompt) -> None:
        """Stop the computation, and free the prompt's blocks once no thread reads them."""
        if prompt.transfer is not None and prompt.has_failed:
            # The router learns of the failure when this call ends, and then stops the decode side. An abort of ours
            # that came there first would look like lost KV, so wait for the router's.
            with contextlib.suppress(MeshError, TimeoutError):
                async with asyncio.timeout(_FAILURE_GRACE_S):
                    await prompt.transfer.ended()
        if prompt.transfer is not None:
            await prompt.transfer.abort()
        self._engine.abort(prompt.sequence)

    def _on_released(self, release: asyncio.Task[None]) -> None:
        self._releases.discard(release)
        if not self._prompts and not self._releases:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no prompt is left."""
        await self._idle.wait()

    # -- called by the engine ---------------------------------------------------------------------------------------

    def on_layers(self, batch: ScheduledBatch, layers: Span) -> None:
        """Announce the blocks that are final in these layers. Called on the engine's thread, during a step."""
        busy = self._engine.busy()
        begun_s = self._loop.time() - (busy.for_s if busy is not None else 0.0)
        finals: list[_FinalBlocks] = []
        for item in batch.items:
            prompt = self._prompts.get(item.sequence.key)
            if prompt is not None:
                blocks = self._transfer_indices(final_positions(item, self._layout.block_size), item.sequence)
                table: tuple[int, ...] = ()
                if prompt.transfer is None:
                    num_tokens = len(item.sequence.spec.token_ids)
                    table = self._layout.transfer_blocks(item.sequence.block_table, num_tokens)
                finals.append(_FinalBlocks(prompt, blocks, item.needs_sampling, table, begun_s))
        if finals:
            call_on(self._loop, self._announce, finals, layers)

    def _transfer_indices(self, positions: range, sequence: SequenceState) -> range:
        num_tokens, first_index = len(sequence.spec.token_ids), self._layout.first_transfer_index
        return range(first_index(num_tokens, positions.start), first_index(num_tokens, positions.stop))

    def _announce(self, finals: list[_FinalBlocks], layers: Span) -> None:
        for final in finals:
            prompt = final.prompt
            if self._prompts.get(prompt.sequence.key) is not prompt:
                continue
            if prompt.transfer is None:
                if prompt.started.done():
                    continue  # the call has failed, or is being cancelled
                try:
                    prompt.transfer = prompt.context.run(self._open_transfer, prompt, final.block_table)
                except Exception as error:  # must end this prompt only
                    prompt.started.set_exception(error)
                    continue
                prompt.begun_s, prompt.opened_s = final.begun_s, self._loop.time()
                prompt.started.set_result(None)
            blocks = Span(final.blocks.start, len(final.blocks))
            prompt.transfer.announce(blocks, layers)
            # A recurrent state changes until the prompt's end. Whatever layers it is of, it fills blocks of all.
            if final.ends_prompt and layers.end == self._layout.num_layers:
                states = Span(final.blocks.stop, self._layout.state_blocks)
                prompt.transfer.announce(states, self._layout.whole.layers)

    def _open_transfer(self, prompt: _Prompt, block_table: tuple[int, ...]) -> AnyOutgoingTransfer:
        destination = prompt.destination
        prompt.transfer_trace_span = begin_worker_span("prefill_worker", "transfer", prompt.sequence.spec)
        return self._sender.open(
            TransferSpec(
                transfer_id=destination.transfer_id,
                attempt=prompt.sequence.spec.attempt,
                address=destination.address,
                receiver_incarnation=destination.incarnation,
                block_ids=block_table,
                span=self._layout.whole,
                first_block=self._layout.first_transfer_index(
                    prompt.sequence.num_tokens, destination.ready_tokens // self._layout.block_size
                ),
            ),
            prompt.receivers,
        )

    def on_step(self, result: StepResult) -> None:
        """Deliver first tokens and failures to the waiting calls."""
        for output in result.outputs:
            prompt = self._prompts.get(output.key)
            if prompt is not None:
                self._metrics.cached(output.cached_tokens)
                prompt.first_token.set_result(output)
        preempted = [(sequence, SequencePreempted("its blocks went to older prompts")) for sequence in result.preempted]
        for sequence, error in [*result.failed, *preempted]:
            prompt = self._prompts.get(sequence.key)
            if prompt is not None:
                prompt.fail(error)


def final_positions(item: ScheduledSequence, block_size: int) -> range:
    """Return the positions in the prompt of the blocks that this step completes and that no later step changes.

    The first step, which starts after the cached prefix, also includes the prefix. A partly filled last block is final
    only if the prompt ends in it.
    """
    start = 0 if item.start == item.sequence.num_cached_tokens else item.start // block_size
    end = -(-item.end // block_size) if item.needs_sampling else item.end // block_size
    return range(start, max(start, end))


async def _first_token(first_token: asyncio.Future[SequenceOutput], transfer: AnyOutgoingTransfer) -> SequenceOutput:
    """Wait for the first token. If the transfer fails first, raise its error: further computation would be useless."""
    ended = asyncio.ensure_future(transfer.ended())
    either: list[asyncio.Future[Any]] = [first_token, ended]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first_token.done():
            ended.result()
        return await first_token
    finally:
        ended.cancel()
