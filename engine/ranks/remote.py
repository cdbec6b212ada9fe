"""Ranks that share no memory, on the GPUs of a machine or on several machines: the eager decoder.

The steps that ranks find in shared memory elsewhere are sent here, to all ranks at once; the ranks of a later stage
then wait for the residual. Each rank has a `StepMemory` of its own, so the rest of the rank is the same. KV stays where
it is computed, and each rank moves its own between workers (`kvtransfer/ranks.py`). How ranks are connected is not
known here: `worker/ranks/listener.py` is the leader's side, `rank_worker/remote_rank.py` the others'.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from engine.kv.budget import KVMemoryShare
from engine.kv.cache import KVCache
from engine.loading.activation_memory import step_bytes
from engine.loading.graphs import graph_bytes
from engine.loading.memory_needs import weights_bytes
from engine.loading.resolve import kv_layout, resolve
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.models.encodings import CUT_BY_INPUTS
from engine.models.model_config import ModelConfig
from engine.models.parameters import parameter_specs
from engine.models.share import rank_share, share_specs
from engine.ranks.collectives import require_backend
from engine.ranks.commands import CaptureSteps, Command, Forward, RunGraph, decode_command, encode_command
from engine.ranks.messages import BlockCopy, OnLost, RemoteRanks, StepMessage
from engine.ranks.rank import Execute, Rank
from engine.ranks.shared import SharedGroup, StepMemory, max_sequence_blocks
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError, WorkerBusy
from mesh.domain.kv import KVLayout, KVSpan, Span

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = structlog.get_logger(__name__)


def load_remote_runner(
    settings: RunnerSettings, ranks: RemoteRanks, on_progress: Progress | None = None, *, on_lost: OnLost
) -> ModelRunner:
    """As `load_model_runner`, over the ranks of `settings.degrees`, which share no memory. The runner's `close` ends
    the others. Raises ConfigurationError, and WorkerLost if a rank ends or does not come.
    """
    try:
        settings = replace(settings, enforce_eager=True)
        resolved, config = resolve(settings)
        layout = kv_layout(require_remote(resolved, config), resolved)
        if resolved.device == "cpu":
            log.warning(
                "the ranks share no memory: the decoder is not compiled and sums by gloo, which is slow on CPU",
                ranks=str(settings.degrees),
            )
        host = ranks.gather(settings, layout)
        own = OwnMemoryRank(settings, 0, ranks.store, on_progress, ranks.post)
        num_blocks = min(own.fitting_blocks(), *ranks.wait_loaded())
        cache = own.allocate(num_blocks, ranks)
        ranks.watch(on_lost)  # before the first call in which this thread waits for the others' sockets
        ranks.allocate(num_blocks)
        own.rank.connect(host, shares_memory=False)
        ranks.wait_ready()
        runner = own.rank.lead(cache, cache)
    except BaseException:
        ranks.close()
        raise
    runner.on_close = ranks.close
    return runner


def require_remote(settings: RunnerSettings, config: object) -> ModelConfig:
    """The config of a model that ranks without shared memory can run. Raises ConfigurationError."""
    degrees = settings.degrees
    if not isinstance(config, ModelConfig):
        raise ConfigurationError(
            f"{degrees} ranks do not fit an encoder-decoder model: ranks cannot divide its encoder yet; use "
            "tensor_parallel 1 and pipeline_parallel 1"
        )
    if settings.adapters:
        raise ConfigurationError(
            f"adapter {settings.adapters[0].name}: ranks that share no memory have no adapters: use ranks on CPUs of "
            "one machine, with rank_memory shared, or merge the adapter into its base model"
        )
    require_backend(torch.device(settings.device))
    rank_share(config, 0, degrees)
    if settings.encoding not in CUT_BY_INPUTS:
        raise ConfigurationError(
            f"ranks that share no memory cannot compute in {settings.encoding}: that needs the compiled decoder; use "
            "ranks on one machine with rank_memory shared, or quantize none with a checkpoint that is not W8A8, and "
            "--dtype float32 with one in 4 bits"
        )
    return config


class LeadersKVCache(KVCache):
    """The leader's part of the KV. Blocks are copied and cleared in all ranks."""

    def __init__(
        self,
        ranks: RemoteRanks,
        layout: KVLayout,
        num_blocks: int,
        span: KVSpan,
        memory_share: KVMemoryShare,
        *,
        num_spare: int,
    ) -> None:
        super().__init__(layout, num_blocks, memory_share.device, span, memory_share, num_spare=num_spare)
        self._ranks = ranks

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        self._ranks.post(BlockCopy(source, target))

    def clear_blocks(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        super().clear_blocks(block_ids, first_token)
        self._ranks.clear_blocks(block_ids, first_token)

    def note_written(self, layers: Span) -> None:
        """Waits until a GPU has computed the layers. Their sums need all ranks, so these have written theirs, too: what
        is announced may be read anywhere.
        """
        super().note_written(layers)
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()


class OwnMemoryRank:
    """A rank of a group that shares no memory. The constructor loads its weights; it counts its memory by itself.

    `post` is for rank 0: sends a step to the others; it gives `ranks` to `allocate`, too. Raises ConfigurationError.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        rank: int,
        store: "Store",
        on_progress: Progress | None = None,
        post: Callable[[StepMessage], None] | None = None,
    ) -> None:
        settings, config = resolve(settings)
        config = require_remote(settings, config)
        share = rank_share(config, rank, settings.degrees)
        specs = share_specs(parameter_specs(config), config, share, "inputs")
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread, for kernels that are told no device
        self._layout = kv_layout(config, settings)
        captured_bytes = graph_bytes(settings, config, self._layout)
        self.memory_share = KVMemoryShare.enter(
            device,
            settings.kv_memory,
            weights_bytes(settings, specs, config),
            later_bytes=step_bytes(settings, config) + captured_bytes + (0 if rank else settings.companion_bytes),
        )
        self._num_spare = 1 if captured_bytes else 0
        max_blocks = max_sequence_blocks(settings, config)
        max_rows, num_stages = settings.max_batch_tokens, settings.pipeline_parallel
        num_groups = self._layout.groups.count
        self.memory = StepMemory(
            config, max_rows=max_rows, max_blocks=max_blocks, num_stages=num_stages, num_groups=num_groups
        )
        group = SharedGroup(rank, settings.degrees, self.memory, self._posting(post))
        self.rank = Rank(settings, config, group, store, on_progress)
        self._settings = settings
        self._span = self.rank.span(rank)
        self._is_leader = rank == 0

    def fitting_blocks(self) -> int:
        """The number of blocks for which there is memory, at most those of the settings. Raises ConfigurationError."""
        with self._kv_blocks(self._settings.num_blocks) as num_blocks:
            return num_blocks

    def allocate(self, num_blocks: int, ranks: RemoteRanks | None = None) -> KVCache:
        """The rank's KV, no more blocks than fitted. Raises WorkerBusy if they fit no longer; a new start helps."""
        try:
            with self._kv_blocks(num_blocks):
                if ranks is not None:
                    return LeadersKVCache(
                        ranks, self._layout, num_blocks, self._span, self.memory_share, num_spare=self._num_spare
                    )
                device = self.memory_share.device
                return KVCache(
                    self._layout, num_blocks, device, self._span, self.memory_share, num_spare=self._num_spare
                )
        except ConfigurationError as error:
            raise WorkerBusy(f"others have taken memory since it was counted: {error}") from error

    def executing(self, cache: KVCache) -> Callable[[StepMessage | BlockCopy], None]:
        """In other ranks than 0: build the decoder. Returns the function that executes messages."""
        execute: Execute = self.rank.follow(cache)

        def run(message: StepMessage | BlockCopy) -> None:
            if isinstance(message, BlockCopy):
                cache.copy_block(message.source, message.target)
            else:
                execute(_unpack(self.memory, message))

        return run

    def _kv_blocks(self, num_blocks: int | None) -> AbstractContextManager[int]:
        block_bytes = self._span.num_layer_heads * self._layout.cell_bytes
        if self._is_leader:  # it has the draft model, too
            block_bytes += self._settings.companion_block_bytes
        return self.memory_share.blocks(block_bytes, num_blocks=num_blocks, max_blocks=self._settings.max_blocks)

    def _posting(self, post: Callable[[StepMessage], None] | None) -> Callable[[int, Command], None]:
        def pack_and_post(stage: int, command: Command) -> None:
            assert post is not None, "rank 0 alone sends steps"
            post(_pack(self.memory, command))

        return pack_and_post


def _pack(memory: StepMemory, command: Command) -> StepMessage:
    if isinstance(command, CaptureSteps):
        return StepMessage(encode_command(command), b"", b"", b"")
    assert isinstance(command, Forward | RunGraph), "rank 0 alone computes logits"
    if isinstance(command, Forward):
        command = replace(command, group_size=0)  # later stages report nothing, rank 0 knows when a step is complete
    arrays = (memory.get(name, size, dtype)[:size] for name, size, dtype in _arrays(command, memory.num_groups))
    return StepMessage(encode_command(command), *(array.tobytes() for array in arrays))


def _unpack(memory: StepMemory, step: StepMessage) -> Command:
    """Write a step to the rank's memory. Raises ValueError for one that its command does not describe."""
    command = decode_command(step.command)
    if isinstance(command, CaptureSteps):
        return command
    if not isinstance(command, Forward | RunGraph):
        raise ValueError(f"{command} is no step")
    contents = (step.token_ids, step.positions, step.sequences)
    for (name, size, dtype), content in zip(_arrays(command, memory.num_groups), contents, strict=True):
        array: NDArray[Any] = np.frombuffer(content, dtype)
        if array.size != size:
            raise ValueError(f"a step has {array.size} elements of {name}, not {size}")
        memory.get(name, size, dtype)[:size] = array
    return command


def _arrays(command: Forward | RunGraph, num_groups: int) -> list[tuple[str, int, type]]:
    """Name, size and type of the arrays of a step; see StepMemory and `shared.write_metadata`."""
    of_sequences = command.num_seqs * (command.max_blocks + 3) + 1
    return [
        ("token_ids", command.num_tokens, np.int64),
        ("positions", (2 + num_groups) * command.num_tokens, np.int64),
        ("sequences", of_sequences, np.int32),
    ]
