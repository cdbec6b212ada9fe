"""The work of every rank: load its share of the weights, hold its share of the KV, and compute its share of a step."""

import mmap
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.kernels.cpu.arguments import Bytes
from engine.kernels.cpu.buffers import round_up
from engine.kv_cache import KVCache
from engine.load import assemble_runner, decoder_memory, load_packed, load_parameters
from engine.model_runner import ModelRunner
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.decoder import Decoder
from engine.models.model_config import ModelConfig
from engine.models.packed_decoder import PackedDecoder
from engine.models.parameters import parameter_specs
from engine.models.share import rank_share, share_specs
from engine.ranks.collectives import LOOPBACK, CollectiveGroup, Hops, Place, summing
from engine.ranks.shared import Command, Forward, SharedGroup
from engine.resolve import kv_layout, why_eager
from engine.runner_settings import RunnerSettings
from engine.sharded_kv_cache import AnyKVCache
from engine.weights import Progress
from mesh.domain.kv import KVSpan, kv_spans

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CPU = torch.device("cpu")


Execute = Callable[[Command], None]
"""Computes the rank's share of what rank 0 computes."""


class Rank:
    """One rank of a group. The constructor loads its weights. `connect`, then `follow` or `lead`, are called once the
    number of KV blocks is known.

    The settings are resolved (`engine.resolve.resolve`). The ranks of the eager decoder meet through the store. Raises
    ConfigurationError.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        config: ModelConfig,
        group: SharedGroup,
        store: "Store",
        on_progress: Progress | None = None,
    ) -> None:
        self._settings = settings
        self._config = config
        self._group = group
        self._store = store
        self._layout = kv_layout(config, settings)
        self._summing: CollectiveGroup | None = None
        self._packed: PackedDecoder | None = None
        self._share = share = rank_share(config, group.rank, group.degrees)
        if why_eager(settings, config, self._layout) is None:
            self._packed = load_packed(settings, config, share, on_progress)
        else:
            specs = share_specs(parameter_specs(config), config, share, "inputs")
            self._parameters = load_parameters(settings, config, specs, on_progress)

    def span(self, rank: int) -> KVSpan:
        """The KV that a rank of the group holds."""
        return kv_spans(self._config.num_layers, self._config.num_kv_heads, self._group.degrees)[rank]

    def caches(self, num_blocks: int, memory: Bytes) -> list[KVCache]:
        """The KV caches of all ranks, in memory that all of them map."""
        caches = []
        for rank in range(self._group.degrees.num_ranks):
            span = self.span(rank)
            cache = KVCache(self._layout, num_blocks, _CPU, span, memory=memory)
            memory = memory[round_up(cache.payload_bytes(num_blocks, span), mmap.PAGESIZE) :]
            caches.append(cache)
        return caches

    def connect(self, host: str = LOOPBACK, *, shares_memory: bool = True) -> None:
        """Meet the other ranks, at this machine's address `host`, if the decoder sums over them or, where they share no
        memory, hands over residuals. Returns when all have called it.
        """
        if self._packed is not None:
            return
        group = self._group
        place = Place(group.rank, group.degrees, torch.device(self._settings.device), host)
        hops = Hops(self._store, place) if not shares_memory and group.degrees.pipeline > 1 else None
        own_layers = self.span(group.rank).layers
        self._summing = CollectiveGroup(group, summing(self._store, place), place.device, own_layers, hops)

    def follow(self, cache: KVCache) -> Execute:
        """In other ranks than 0: build the decoder. The loaded weights move into it."""
        if self._summing is not None:
            return partial(_execute_summed, self._eager(cache, self._summing), self._summing)
        return partial(_execute_compiled, self._compiled(cache), self._group)

    def lead(self, own: KVCache, cache: AnyKVCache) -> ModelRunner:
        """In rank 0: build the runner. `cache` copies and clears blocks in all ranks, which execute commands by now."""
        summing = self._summing
        decoder = self._compiled(own) if summing is None else self._eager(own, summing)
        cache.clear_blocks([0])  # in which the decoder has compiled the loops
        return assemble_runner(self._settings, decoder, cache, self._group.degrees.pipeline)

    def _compiled(self, cache: KVCache) -> CompiledDecoder:
        assert self._packed is not None
        return CompiledDecoder(self._config, self._packed, cache, self._group)

    def _eager(self, cache: KVCache, summing: CollectiveGroup) -> Decoder:
        memory = decoder_memory(self._settings, self._config, cache, self._share.query_heads)
        return Decoder(self._config, self._parameters, memory, summing)


@torch.inference_mode()
def _execute_compiled(decoder: CompiledDecoder, group: SharedGroup, command: Command) -> None:
    """Returns when all ranks of the stage have finished."""
    if isinstance(command, Forward):
        decoder.run_layers(*group.read_step(command, decoder.layers))
        group.end_stage()
    else:
        decoder.run_output(command.num_rows)


@torch.inference_mode()
def _execute_summed(decoder: Decoder, group: CollectiveGroup, command: Command) -> None:
    """Returns when the rank has done its part of the last sum."""
    assert isinstance(command, Forward), "rank 0 alone computes logits"
    group.end_stage(decoder.run_layers(*group.read_step(command, decoder.layers)))


def kv_bytes(block_bytes: int, num_blocks: int, num_ranks: int) -> int:
    """Size of the memory for `Rank.caches`. Each rank's cache begins on a page of its own."""
    return num_blocks * block_bytes + num_ranks * mmap.PAGESIZE


def map_kv(fd: int, num_bytes: int) -> Bytes:
    """Map the memory of the caches."""
    memory = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
