"""The work of every rank: load its share of the weights, hold its share of the KV, and compute its share of a step."""

import mmap
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from checkpoint.adapters import AdapterFiles
from engine.adapter_slots import AdapterSlots
from engine.decode_graphs import DecodeGraphs
from engine.kernels.cpu.arguments import Bytes
from engine.kernels.cpu.buffers import round_up
from engine.kv.cache import KVCache
from engine.kv.sharded_cache import AnyKVCache
from engine.loading.graphs import can_capture
from engine.loading.resolve import kv_layout, why_eager
from engine.loading.runner_parts import assemble_runner, decoder_memory, load_packed, load_parameters
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.models.adapters import adapter_shapes, load_adapter
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.decoder import Decoder
from engine.models.model_config import ModelConfig
from engine.models.packed_weights import PackedDecoder
from engine.models.parameters import parameter_specs
from engine.models.share import adapter_specs, rank_share, share_specs
from engine.ranks.collectives import LOOPBACK, CollectiveGroup, Hops, Place, summing
from engine.ranks.commands import CaptureSteps, Command, Forward, Logits, PutAdapter, RunGraph
from engine.ranks.graphs import RankGraphs
from engine.ranks.shared import SharedGroup
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import KVSpan, kv_spans

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CPU = torch.device("cpu")
_AnyDecoder = CompiledDecoder | Decoder


Execute = Callable[[Command], None]
"""Computes the rank's share of what rank 0 computes."""


class Rank:
    """One rank of a group. The constructor loads its weights. `connect`, then `follow` or `lead`, are called once the
    number of KV blocks is known.

    The settings are resolved (`engine.loading.resolve.resolve`). The ranks of the eager decoder meet through the store.
    Raises ConfigurationError.
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
        specs = parameter_specs(config)
        is_compiled = why_eager(settings, config, self._layout) is None
        self._adapter_specs = adapter_specs(specs, config, share, "outputs" if is_compiled else "inputs")
        self._adapter_shapes = adapter_shapes(settings.adapters, self._adapter_specs)
        if is_compiled:
            self._packed = load_packed(settings, config, share, on_progress)
        else:
            specs = share_specs(specs, config, share, "inputs")
            self._parameters = load_parameters(settings, config, specs, on_progress)

    def span(self, rank: int) -> KVSpan:
        """The KV that a rank of the group holds."""
        return kv_spans(self._layout.num_layers, self._config.num_kv_heads, self._group.degrees)[rank]

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
        own_layers = self._share.layers
        self._summing = CollectiveGroup(group, summing(self._store, place), place.device, own_layers, hops)

    def follow(self, cache: KVCache) -> Execute:
        """In other ranks than 0: build the decoder. The loaded weights move into it."""
        if self._summing is not None:
            eager = self._eager(cache, self._summing)
            graphs = RankGraphs(self._settings, eager, cache, self._summing, self._store)
            return partial(self._execute, eager, partial(_execute_summed, eager, self._summing, graphs))
        compiled = self._compiled(cache)
        return partial(self._execute, compiled, partial(_execute_compiled, compiled, self._group))

    def lead(self, own_cache: KVCache, cache: AnyKVCache) -> ModelRunner:
        """In rank 0: build the runner. `cache` copies and clears blocks in all ranks, which already follow."""
        summing = self._summing
        decoder = self._compiled(own_cache) if summing is None else self._eager(own_cache, summing)
        cache.clear_blocks([0])  # in which the decoder has compiled the loops
        adapters, put = self._settings.adapters, partial(self._put_everywhere, decoder)
        slots = AdapterSlots(adapters, self._settings.num_adapter_slots, put) if adapters else None
        graphs = self._lead_capture(decoder, own_cache)
        return assemble_runner(self._settings, decoder, cache, self._group.degrees.pipeline, slots, graphs)

    def _lead_capture(self, decoder: _AnyDecoder, cache: KVCache) -> DecodeGraphs | None:
        """In rank 0: capture decode steps in all ranks, if settings and model allow it."""
        if self._summing is None or not isinstance(decoder, Decoder) or not can_capture(self._settings, decoder):
            return None
        self._group.begin_capture()
        graphs = RankGraphs(self._settings, decoder, cache, self._summing, self._store).capture()
        if graphs is not None:
            graphs.on_run = self._group.begin_replay
        return graphs

    def _compiled(self, cache: KVCache) -> CompiledDecoder:
        assert self._packed is not None
        shapes, num_slots = self._adapter_shapes, self._settings.num_adapter_slots
        return CompiledDecoder(self._config, self._packed, cache, self._group, shapes, num_slots)

    def _eager(self, cache: KVCache, summing: CollectiveGroup) -> Decoder:
        memory = decoder_memory(self._settings, self._config, cache, self._share.query_heads)
        return Decoder(self._config, self._parameters, memory, summing, self._adapter_shapes)

    def _put_everywhere(self, decoder: _AnyDecoder, slot: int, adapter: AdapterFiles) -> None:
        """In rank 0: read an adapter into a slot of all ranks, first here: one that cannot be read ends no rank."""
        weights = load_adapter(adapter, self._adapter_specs)
        self._group.put_adapter(slot, self._settings.adapters.index(adapter))
        decoder.put_adapter(slot, weights)

    def _execute(self, decoder: _AnyDecoder, compute: Execute, command: Command) -> None:
        if isinstance(command, PutAdapter):
            adapter = self._settings.adapters[command.number]
            decoder.put_adapter(command.slot, load_adapter(adapter, self._adapter_specs))
        else:
            compute(command)


@torch.inference_mode()
def _execute_compiled(decoder: CompiledDecoder, group: SharedGroup, command: Command) -> None:
    """Returns when all ranks of the stage have finished."""
    if isinstance(command, Forward):
        decoder.run_layers(*group.read_step(command, decoder.layers))
        group.end_stage()
    else:
        assert isinstance(command, Logits), "a compiled decoder has no graphs"
        decoder.run_output(command.num_rows)


@torch.inference_mode()
def _execute_summed(decoder: Decoder, group: CollectiveGroup, graphs: RankGraphs, command: Command) -> None:
    """Returns when the rank has done its part of the last sum, or on a GPU has launched it."""
    match command:
        case Forward():
            group.end_stage(decoder.run_layers(*group.read_step(command, decoder.layers)))
        case CaptureSteps():
            graphs.capture()
        case RunGraph():
            graphs.replay(command)
        case _:
            raise AssertionError("rank 0 alone computes logits")


def kv_bytes(block_bytes: int, num_blocks: int, num_ranks: int) -> int:
    """Size of the memory for `Rank.caches`. Each rank's cache begins on a page of its own."""
    return num_blocks * block_bytes + num_ranks * mmap.PAGESIZE


def map_kv(fd: int, num_bytes: int) -> Bytes:
    """Map the memory of the caches."""
    memory = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
