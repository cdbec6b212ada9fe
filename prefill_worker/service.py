"""The prefill worker's logic, without gRPC.

Life of a prompt here:

    prefill     the sequence is queued
    computing   with its first chunk the transfer is opened; after each layer group of each chunk, blocks that will not
                change any more are pushed
    first token sampled -> to the router, straight away; the sequence is HELD: its blocks stay
    transfer    committed with the first token, verified by the decode worker -> finished; the blocks become prefix
                cache
    ends early  first token is also the last, and no fork waits for the KV; the call is cancelled; the transfer fails:
                the blocks are freed once nobody reads them any more
"""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from opentelemetry.trace import INVALID_SPAN, Span

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.loop import EngineLoop, StepResult
from engine.sequence import Sequence, SequenceKey
from kvtransfer import KVSender, OutgoingTransfer, TransferSpec
from mesh.domain.errors import InvalidRequest, MeshError, WorkerDraining
from mesh.domain.request import Request
from mesh.domain.tokens import StepOutput
from mesh.tracing import begin_span, mark_failed
from prefill_worker.metrics import PrefillMetrics

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where KV goes, as the router says."""

    address: str
    worker_id: str
    incarnation: str
    transfer_id: str
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is being computed, for `elapsed_s` now."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token, with prompt log-probs if asked for."""

    output: StepOutput


@dataclass(frozen=True, slots=True)
class Finished:
    """The KV has been handed over, `duration_s` after the transfer was opened."""

    num_bytes: int
    transport: str
    duration_s: float


PrefillEvent = Started | FirstToken | Finished


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt on its way. `transfer` and `started` come when its first chunk is computed, a pass that began at
    `begun_s` of the event loop's time; the transfer was opened at `opened_s`. `context` is the call's, for logs."""

    sequence: Sequence
    destination: Destination
    first_token: asyncio.Future[StepOutput]
    started: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: OutgoingTransfer | None = None
    begun_s: float = 0.0
    opened_s: float = 0.0
    span: Span = INVALID_SPAN
    transfer_span: Span = INVALID_SPAN
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


@dataclass(frozen=True, slots=True)
class _Push:
    """Block positions of a prompt that are final in some layers; `block_table` as it was when they were computed, in
    a pass that began at `begun_s`."""

    prompt: _Prompt
    blocks: range
    block_table: tuple[int, ...]
    begun_s: float


class PrefillService:
    """Prompts on their way through the engine and out to decode workers. Lives on the event loop."""

    def __init__(self, block_size: int, metrics: PrefillMetrics | None = None) -> None:
        self._block_size = block_size
        self._metrics = metrics or PrefillMetrics()
        self._prompts: dict[SequenceKey, _Prompt] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._engine: EngineLoop
        self._sender: KVSender

    def connect(self, engine: EngineLoop, sender: KVSender, is_draining: Callable[[], bool]) -> None:
        """Wire up what this service calls; the engine calls back."""
        self._engine = engine
        self._sender = sender
        self._is_draining = is_draining

    @property
    def num_prompts(self) -> int:
        """Prompts queued, computing, or being handed over."""
        return len(self._prompts)

    # -- what routers ask -------------------------------------------------------------------------------------------

    async def prefill(self, request: Request, destination: Destination) -> AsyncGenerator[PrefillEvent, None]:
        """Run one prompt and hand its KV over. Closing the iterator stops the computation and the transfer."""
        if self._is_draining():
            raise WorkerDraining("the worker is draining")
        if not 0 <= destination.ready_tokens <= len(request.token_ids) or destination.ready_tokens % self._block_size:
            raise InvalidRequest(f"ready_tokens {destination.ready_tokens} does not fit the prompt")
        sequence = Sequence(request, hand_over=True)
        if sequence.key in self._prompts:
            raise InvalidRequest("this attempt is here already")
        structlog.contextvars.bind_contextvars(request_id=request.request_id, attempt=request.attempt)
        prompt = _Prompt(sequence, destination, self._loop.create_future())
        prompt.span = begin_span("prefill_worker", "prefill", request)
        self._prompts[sequence.key] = prompt
        self._idle.clear()
        self._metrics.looked_up(sequence.num_tokens)
        try:
            await self._engine.prepare(sequence)
            await self._engine.call(lambda scheduler: scheduler.add(sequence))
            await prompt.started.wait()
            yield Started(self._loop.time() - prompt.begun_s)
            assert prompt.transfer is not None
            output = await _first_token(prompt.first_token, prompt.transfer)
            prompt.span.end()
            yield FirstToken(output)
            if output.finish_reason is None or request.forks:
                moved = await prompt.transfer.commit(sequence.num_computed_tokens, output.tokens[-1])
                duration_s = self._loop.time() - prompt.opened_s
                self._metrics.sent(moved.num_bytes, moved.transport, duration_s)
                yield Finished(moved.num_bytes, moved.transport, duration_s)
            else:
                # The router, told so by the first token, ends the decode side, and that ends the transfer. Giving it up
                # here could be heard of first, and would look like KV that was lost.
                with contextlib.suppress(MeshError):
                    await prompt.transfer.ended()
        except MeshError as error:
            self._metrics.failed(type(error).__name__)
            mark_failed(prompt.transfer_span, type(error).__name__)
            raise
        finally:
            prompt.span.end()  # does nothing the second time
            prompt.transfer_span.end()
            del self._prompts[sequence.key]
            release = asyncio.create_task(self._release(prompt))
            self._releases.add(release)
            release.add_done_callback(self._on_released)

    async def _release(self, prompt: _Prompt) -> None:
        """Stop computing; free the prompt's blocks once nobody reads them any more."""
        if prompt.transfer is not None:
            await prompt.transfer.abort()
        self._engine.abort(prompt.sequence)

    def _on_released(self, release: asyncio.Task[None]) -> None:
        self._releases.discard(release)
        if not self._prompts and not self._releases:
            self._idle.set()

    async def drained(self) -> None:
        """Return when no prompt is left."""
        await self._idle.wait()

    # -- what the engine tells --------------------------------------------------------------------------------------

    def on_layers(self, batch: ScheduledBatch, first_layer: int, num_layers: int) -> None:
        """Push the blocks that are final in these layers. Called on the engine's thread, while it computes."""
        busy = self._engine.busy()
        begun_s = self._loop.time() - (busy.for_s if busy is not None else 0.0)
        pushes: list[_Push] = []
        for item in batch.items:
            prompt = self._prompts.get(item.sequence.key)
            if prompt is not None:
                blocks = final_blocks(item, self._block_size)
                pushes.append(_Push(prompt, blocks, tuple(item.sequence.block_table), begun_s))
        if pushes:
            self._loop.call_soon_threadsafe(self._push, pushes, first_layer, num_layers)

    def _push(self, pushes: list[_Push], first_layer: int, num_layers: int) -> None:
        for push in pushes:
            prompt = push.prompt
            if self._prompts.get(prompt.sequence.key) is not prompt:
                continue
            if prompt.transfer is None:
                prompt.transfer = prompt.context.run(self._open_transfer, prompt, push.block_table)
                prompt.begun_s, prompt.opened_s = push.begun_s, self._loop.time()
                prompt.started.set()
            prompt.transfer.push(push.blocks.start, len(push.blocks), first_layer, num_layers)

    def _open_transfer(self, prompt: _Prompt, block_table: tuple[int, ...]) -> OutgoingTransfer:
        destination = prompt.destination
        prompt.transfer_span = begin_span("prefill_worker", "transfer", prompt.sequence.request)
        return self._sender.open(
            TransferSpec(
                transfer_id=destination.transfer_id,
                attempt=prompt.sequence.request.attempt,
                address=destination.address,
                receiver_incarnation=destination.incarnation,
                block_ids=block_table,
                first_block=destination.ready_tokens // self._block_size,
            )
        )

    def on_step(self, result: StepResult) -> None:
        """Hand out first tokens."""
        for output in result.outputs:
            prompt = self._prompts.get((output.request_id, output.attempt))
            if prompt is not None:
                self._metrics.cached(output.cached_tokens)
                prompt.first_token.set_result(output)
        for sequence, reason in result.refused:
            prompt = self._prompts.get(sequence.key)
            if prompt is not None:
                prompt.first_token.set_exception(InvalidRequest(reason))


def final_blocks(item: ScheduledSequence, block_size: int) -> range:
    """Block positions that this step completes and that will not change any more.

    The step that starts after the cached prefix also answers for the prefix; a last, partly filled block is final only
    when the prompt ends in it.
    """
    start = 0 if item.start == item.sequence.num_cached_tokens else item.start // block_size
    end = -(-item.end // block_size) if item.samples else item.end // block_size
    return range(start, max(start, end))


async def _first_token(first_token: asyncio.Future[StepOutput], transfer: OutgoingTransfer) -> StepOutput:
    """Wait for the first token; raise the transfer's error if it fails before: computing on would be in vain."""
    ended = asyncio.ensure_future(transfer.ended())
    either: list[asyncio.Future[Any]] = [first_token, ended]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first_token.done():
            ended.result()
        return await first_token
    finally:
        ended.cancel()
