"""Ranks that share no memory, on several machines: the eager decoder over a network, and the leader's view of their KV.

The steps that ranks of one machine find in shared memory are sent here. Each rank has a `StepMemory` of its own, so the
rest of the rank is the same. The KV of other ranks is read and written through their connections. How ranks are
connected is not known here: `worker/rank_listener.py` is the leader's side, `rank_worker/joining.py` the others'.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from engine.kernels.cpu.arguments import Bytes
from engine.kv_cache import Buffer, KVCache, part_of, payload_array
from engine.kv_memory import KVReservation
from engine.load import weights_bytes
from engine.model_runner import ModelRunner
from engine.models.model_config import ModelConfig
from engine.models.parameters import parameter_specs
from engine.models.schemes import CUT_BY_INPUTS
from engine.models.share import rank_share, share_specs
from engine.ranks.messages import OnLost
from engine.ranks.rank import Execute, Rank
from engine.ranks.remote_messages import BlockCopy, KVCall, RemoteRanks, Step
from engine.ranks.shared import (
    Command,
    Forward,
    SharedGroup,
    StepMemory,
    decode_command,
    encode_command,
    max_sequence_blocks,
)
from engine.resolve import kv_layout, resolve
from engine.runner_settings import RunnerSettings
from engine.weights import Progress
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout, KVSpan, Span

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = structlog.get_logger(__name__)

_CPU = torch.device("cpu")
_PIECE_BYTES = 2 << 20
"""KV travels in pieces of about this size: small beside the limit of messages, large beside their cost."""
_PIECES_AT_ONCE = 4


def load_remote_runner(
    settings: RunnerSettings, ranks: RemoteRanks, on_progress: Progress | None = None, *, on_lost: OnLost
) -> ModelRunner:
    """As `load_model_runner`, over `settings.tensor_parallel` ranks of which the others are on other machines. The
    runner's `close` ends them. Raises ConfigurationError, and WorkerLost if a rank ends or does not come.
    """
    try:
        settings = replace(settings, enforce_eager=True)
        resolved, config = resolve(settings)
        layout = kv_layout(require_remote(resolved, config), resolved)
        log.warning(
            "the ranks are on several machines: the decoder is not compiled and sums by gloo, which is slow on CPU",
            ranks=settings.tensor_parallel,
        )
        host = ranks.gather(settings, layout.model_fingerprint)
        own = OwnMemoryRank(settings, 0, ranks.store, on_progress, ranks.post)
        num_blocks = min(own.fitting_blocks(), *ranks.wait_loaded())
        cache = own.allocate(num_blocks)
        ranks.watch(on_lost)  # before the first call in which this thread waits for the others' sockets
        ranks.allocate(num_blocks)
        own.rank.connect(host)
        ranks.wait_ready()
        others = [RemoteShard(ranks, rank, layout, own.rank.span(rank)) for rank in range(1, settings.tensor_parallel)]
        runner = own.rank.lead(cache, others, own.reservation)
    except BaseException:
        ranks.close()
        raise
    runner.on_close = ranks.close
    return runner


def require_remote(settings: RunnerSettings, config: object) -> ModelConfig:
    """The config of a model that ranks without shared memory can run. Raises ConfigurationError."""
    size = settings.tensor_parallel
    if settings.device != "cpu":
        raise ConfigurationError(f"ranks on several machines on {settings.device} are not built yet: use device cpu")
    if not isinstance(config, ModelConfig):
        raise ConfigurationError(f"tensor_parallel {size} does not fit an encoder-decoder model: use 1")
    if settings.pipeline_parallel > 1:
        raise ConfigurationError(
            f"pipeline_parallel {settings.pipeline_parallel} over several machines is not built yet: use 1"
        )
    rank_share(config, 0, settings.degrees)
    if settings.scheme not in CUT_BY_INPUTS:
        raise ConfigurationError(
            f"ranks on several machines cannot compute in {settings.scheme}: that needs the compiled decoder, whose "
            "ranks share the memory of one machine; use ranks on one machine, or quantize none with a checkpoint that "
            "is not W8A8"
        )
    return config


class OwnMemoryRank:
    """A rank of a group that shares no memory. The constructor loads its weights; it counts its memory by itself.

    `post` is for rank 0: sends a step to the others. Raises ConfigurationError.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        rank: int,
        store: "Store",
        on_progress: Progress | None = None,
        post: Callable[[Step], None] | None = None,
    ) -> None:
        settings, config = resolve(settings)
        config = require_remote(settings, config)
        share = rank_share(config, rank, settings.degrees)
        specs = share_specs(parameter_specs(config), config, share, "inputs")
        self.reservation = KVReservation.enter(_CPU, settings.kv_memory, weights_bytes(settings, specs))
        max_blocks = max_sequence_blocks(settings, config)
        self.memory = StepMemory(config, max_rows=settings.max_batch_tokens, max_blocks=max_blocks)
        group = SharedGroup(rank, settings.degrees, self.memory, self._posting(post))
        self.rank = Rank(settings, config, group, store, on_progress)
        self._settings = settings
        self._layout = kv_layout(config, settings)
        self._span = self.rank.span(rank)

    def fitting_blocks(self) -> int:
        """The number of blocks for which there is memory, at most those of the settings. Raises ConfigurationError."""
        with self._reserve(self._settings.num_blocks) as num_blocks:
            return num_blocks

    def allocate(self, num_blocks: int) -> KVCache:
        """The rank's KV, no more blocks than fit."""
        with self._reserve(num_blocks):
            return KVCache(self._layout, num_blocks, _CPU, self._span, self.reservation)

    def executing(self, cache: KVCache) -> Callable[[Step | BlockCopy], None]:
        """In other ranks than 0: build the decoder. Returns the function that executes messages."""
        execute: Execute = self.rank.follow(cache)

        def run(message: Step | BlockCopy) -> None:
            if isinstance(message, BlockCopy):
                cache.copy_block(message.source, message.target)
            else:
                execute(_unpack(self.memory, message))

        return run

    def _reserve(self, num_blocks: int | None) -> AbstractContextManager[int]:
        block_bytes = self._span.num_cells * self._layout.cell_bytes
        if self._span.heads.first == 0:  # the leader has the draft model, too
            block_bytes += self._settings.companion_block_bytes
        return self.reservation.blocks(block_bytes, num_blocks=num_blocks, max_blocks=self._settings.max_blocks)

    def _posting(self, post: Callable[[Step], None] | None) -> Callable[[int, Command], None]:
        def pack_and_post(stage: int, command: Command) -> None:
            assert stage == 0
            assert post is not None, "rank 0 alone sends steps"
            post(_pack(self.memory, command))

        return pack_and_post


def _pack(memory: StepMemory, command: Command) -> Step:
    assert isinstance(command, Forward), "rank 0 alone computes logits"
    arrays = (memory.get(name, size, dtype)[:size] for name, size, dtype in _arrays(command))
    return Step(encode_command(command), *(array.tobytes() for array in arrays))


def _unpack(memory: StepMemory, step: Step) -> Forward:
    """Write a step to the rank's memory. Raises ValueError for one that its command does not describe."""
    command = decode_command(step.command)
    if not isinstance(command, Forward):
        raise ValueError(f"{command} is no step")
    contents = (step.token_ids, step.positions, step.sequences)
    for (name, size, dtype), content in zip(_arrays(command), contents, strict=True):
        array: NDArray[Any] = np.frombuffer(content, dtype)
        if array.size != size:
            raise ValueError(f"a step has {array.size} elements of {name}, not {size}")
        memory.get(name, size, dtype)[:size] = array
    return command


def _arrays(command: Forward) -> list[tuple[str, int, type]]:
    """Name, size and type of the arrays of a step; see StepMemory and `shared.write_metadata`."""
    of_sequences = command.num_seqs * (command.max_blocks + 3) + 1
    return [
        ("token_ids", command.num_tokens, np.int64),
        ("positions", 3 * command.num_tokens, np.int64),
        ("sequences", of_sequences, np.int32),
    ]


class RemoteShard:
    """The KV of a rank on another machine, for the leader. Implements KVShard.

    Each call crosses the network; copies are ordered with the steps and need no answer.
    """

    def __init__(self, ranks: RemoteRanks, rank: int, layout: KVLayout, span: KVSpan) -> None:
        self._ranks = ranks
        self._rank = rank
        self._layout = layout
        self._span = span

    def copy_block(self, source: int, target: int) -> None:
        self._ranks.post(BlockCopy(source, target), self._rank)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self._ranks.call_kv(self._rank, KVCall("clear", list(block_ids), self._span)).result()

    def read_part(self, block_ids: Sequence[int], span: KVSpan, out: Buffer) -> None:
        if (held := span.intersection(self._span)) is None:
            return
        target = payload_array(out, self._layout, len(block_ids), span)
        waiting: deque[tuple[_Piece, Future[bytes]]] = deque()
        for piece in _pieces(len(block_ids), held, self._layout):
            if len(waiting) == _PIECES_AT_ONCE:
                self._fill(target, span, *waiting.popleft())
            ids = block_ids[piece.first : piece.stop]
            waiting.append((piece, self._ranks.call_kv(self._rank, KVCall("read", ids, piece.span))))
        for piece, answer in waiting:
            self._fill(target, span, piece, answer)

    def write_part(self, block_ids: Sequence[int], span: KVSpan, data: Buffer) -> None:
        if (held := span.intersection(self._span)) is None:
            return
        source = payload_array(data, self._layout, len(block_ids), span)
        waiting: deque[Future[bytes]] = deque()
        for piece in _pieces(len(block_ids), held, self._layout):
            if len(waiting) == _PIECES_AT_ONCE:
                waiting.popleft().result()
            payload = source[part_of(piece.span, span)][:, :, piece.first : piece.stop].tobytes()
            ids = block_ids[piece.first : piece.stop]
            waiting.append(self._ranks.call_kv(self._rank, KVCall("write", ids, piece.span, payload)))
        for answer in waiting:
            answer.result()

    def _fill(self, target: Bytes, span: KVSpan, piece: "_Piece", answer: "Future[bytes]") -> None:
        payload = payload_array(answer.result(), self._layout, piece.stop - piece.first, piece.span)
        target[part_of(piece.span, span)][:, :, piece.first : piece.stop] = payload


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some layers of block positions [first, stop)."""

    span: KVSpan
    first: int
    stop: int


def _pieces(num_blocks: int, span: KVSpan, layout: KVLayout) -> Iterator[_Piece]:
    """Cut `span` of so many blocks. A piece has all layers, or as many of one block as fit, but at least one."""
    layer_bytes = span.heads.count * layout.cell_bytes
    num_layers = max(1, min(span.layers.count, _PIECE_BYTES // layer_bytes))
    blocks_at_once = max(1, _PIECE_BYTES // (num_layers * layer_bytes))
    for layer in range(span.layers.first, span.layers.end, num_layers):
        layers = Span(layer, min(num_layers, span.layers.end - layer))
        for first in range(0, num_blocks, blocks_at_once):
            yield _Piece(KVSpan(layers, span.heads), first, min(first + blocks_at_once, num_blocks))


def answer_kv(cache: KVCache, call: KVCall) -> bytes:
    """In other ranks than 0: do what the leader asks. Returns the KV, for `read`."""
    match call.action:
        case "clear":
            cache.clear_blocks(call.block_ids)
        case "write":
            cache.write_blocks(call.block_ids, call.span, call.payload)
        case "read":
            payload = bytearray(cache.payload_bytes(len(call.block_ids), call.span))
            cache.read_blocks(call.block_ids, call.span, payload)
            return bytes(payload)
    return b""
