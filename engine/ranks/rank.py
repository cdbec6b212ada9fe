"""What every rank does: load its share of the weights, hold its share of the KV, and compute its share of a step."""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.cpu.arguments import Bytes
from engine.kv_cache import KVCache
from engine.kv_memory import KVReservation
from engine.load import RunnerSettings, kv_layout, load_parameters, model_runner
from engine.model_runner import ModelRunner
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.facts import ModelConfig
from engine.models.parameters import parameter_specs
from engine.ranks.cache import ShardedKVCache
from engine.ranks.share import rank_share, share_specs
from engine.ranks.shared import Command, Forward, SharedGroup, read_metadata
from engine.weights import Progress
from mesh.domain.kv import KVSpan

_CPU = torch.device("cpu")


class Rank:
    """One rank of a group. The constructor loads its weights; `build` follows once the number of KV blocks is known.

    The settings are resolved (`engine.load.resolve`). Raises ConfigurationError.
    """

    def __init__(
        self, settings: RunnerSettings, config: ModelConfig, group: SharedGroup, on_progress: Progress | None = None
    ) -> None:
        self._config = config
        self._group = group
        self._layout = kv_layout(config, settings)
        share = rank_share(config, group.rank, group.size)
        specs = share_specs(parameter_specs(config), config, share)
        self._parameters = load_parameters(settings, config, specs, on_progress)

    def caches(self, num_blocks: int, memory: Bytes) -> list[KVCache]:
        """The KV caches of all ranks, in memory that all of them map."""
        caches = []
        for rank in range(self._group.size):
            heads = rank_share(self._config, rank, self._group.size).heads
            span = KVSpan(self._layout.whole.layers, heads)
            cache = KVCache(self._layout, num_blocks, _CPU, span, memory=memory)
            memory = memory[_round_up(cache.payload_bytes(num_blocks, span)) :]
            caches.append(cache)
        return caches

    def build(self, cache: KVCache) -> CompiledDecoder:
        """Build the rank's decoder. The loaded weights move into it. Rank 0 calls the other ranks meanwhile."""
        return CompiledDecoder(self._config, self._parameters, cache, self._group)

    def lead(self, settings: RunnerSettings, caches: Sequence[KVCache], reservation: KVReservation) -> ModelRunner:
        """In rank 0: build the runner. The other ranks execute commands by now."""
        decoder, cache = self.build(caches[0]), ShardedKVCache(caches, reservation)
        cache.clear_blocks([0])  # in which the decoder has compiled the loops
        return model_runner(settings, decoder, cache)


def execute(decoder: CompiledDecoder, group: SharedGroup, command: Command) -> None:
    """Compute the rank's share of what rank 0 computes. Returns when all ranks have finished."""
    with torch.inference_mode():
        if isinstance(command, Forward):
            metadata = read_metadata(group.buffers, command)
            decoder.run_layers(metadata, [(0, decoder.config.num_layers)])
        else:
            decoder.run_output(command.num_rows)


def kv_bytes(block_bytes: int, num_blocks: int, num_ranks: int) -> int:
    """Size of the memory for `Rank.caches`. Each rank's cache begins on a page of its own."""
    return num_blocks * block_bytes + num_ranks * mmap.PAGESIZE


def map_kv(fd: int, num_bytes: int) -> Bytes:
    """Map the memory of the caches."""
    memory = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
