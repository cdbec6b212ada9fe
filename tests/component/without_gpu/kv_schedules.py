"""One random course of transfers between two simulated GPUs, drawn from a seed.

Everything that a thread of a worker does without pause is a step of an actor; chance says which actor goes on, and the
simulators say when the GPUs do what they were given.

    prefill engine   writes a prompt's layers, one after the other, and announces each
    gather           reads announced layers into a slot, and sends the slot's place with a checksum
    scatter          reads a slot, verifies it, writes it to the other cache, and frees the slot
    decode engine    once a prompt is committed, reads its KV; then frees its blocks, at times cleared
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
import xxhash
from torch import Tensor

from engine.kv.cache import KVCache
from mesh.domain.kv import KVLayout, KVSpan, Span
from tests.fakes.streams import SimulatedStreams

LAYOUT = KVLayout("m", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
HEADS = LAYOUT.whole.heads
_NUM_BLOCKS = 5
_NUM_PROMPTS = 4
_NUM_SLOTS = 2


class WrongKV(AssertionError):
    """KV was read too early, or overwritten too late."""


class Side:
    """A worker's GPU, its cache, and the blocks that nobody has."""

    def __init__(self, seed: int, forgets: str) -> None:
        self.gpu = SimulatedStreams(seed, forgets)
        self.cache = simulated_cache(self.gpu)
        self.free = list(range(_NUM_BLOCKS))


@dataclass
class _Prompt:
    """Its KV is [layers, 2, blocks, block_size, heads, head_dim] and lies in these blocks of both sides."""

    number: int
    kv: Tensor
    here: list[int]
    there: list[int]
    announced: deque[Span] = field(default_factory=deque)
    num_arrived: int = 0


@dataclass(frozen=True)
class _Chunk:
    prompt: _Prompt
    layers: Span
    slot: int
    num_bytes: int
    checksum: int


class Schedule:
    """`run` raises WrongKV if what arrives is not what was computed."""

    def __init__(self, seed: int, sender_forgets: str = "", receiver_forgets: str = "") -> None:
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self.here, self.there = Side(2 * seed, sender_forgets), Side(2 * seed + 1, receiver_forgets)
        slot_bytes = LAYOUT.whole.num_layer_heads * LAYOUT.cell_bytes * _NUM_BLOCKS
        self._arena = memoryview(bytearray(_NUM_SLOTS * slot_bytes))
        self._slots = [self._arena[start : start + slot_bytes] for start in range(0, len(self._arena), slot_bytes)]
        self._free_slots = list(range(_NUM_SLOTS))
        self._has_pinned_arena = self._random.random() < 0.8  # else as in memory of gRPC
        self._sent: deque[_Chunk] = deque()
        self._running: list[_Prompt] = []
        self._num_left = _NUM_PROMPTS

    def run(self) -> None:
        unpin = self.here.cache.pin(self._arena) if self._has_pinned_arena else None
        actors = [self._prefill_engine(), self._gather(), self._gather(), self._scatter(), self._scatter()]
        actors.append(self._decode_engine())
        while self._num_left or self._running:
            next(self._random.choice(actors))
        if unpin is not None:
            unpin()

    def _prefill_engine(self) -> Iterator[None]:
        for number in range(_NUM_PROMPTS):
            num_blocks = self._random.randint(1, _NUM_BLOCKS - 2)
            while min(len(self.here.free), len(self.there.free)) < num_blocks:
                yield
            shape = (LAYOUT.num_layers, 2, num_blocks, *self.here.cache.tensor.shape[3:])
            kv = torch.from_numpy(self._numbers.standard_normal(shape, np.float32))
            prompt = _Prompt(number, kv, self._taken(self.here, num_blocks), self._taken(self.there, num_blocks))
            self._running.append(prompt)
            yield from self._compute(prompt)
            self._num_left -= 1
        while True:
            yield

    def _compute(self, prompt: _Prompt) -> Iterator[None]:
        side = self.here
        side.gpu.adopt(prompt.kv)
        blocks, first = torch.tensor(prompt.here), 0
        while first < LAYOUT.num_layers:
            layers = Span(first, self._random.randint(1, LAYOUT.num_layers - first))
            with side.gpu.on(side.gpu.current()):
                for layer in range(layers.first, layers.end):
                    side.cache.layer(layer).index_copy_(1, blocks, prompt.kv[layer])
            side.cache.note_written(layers)
            prompt.announced.append(layers)
            first = layers.end
            yield
        side.gpu.read_back(prompt.kv[0, 0, 0])

    def _gather(self) -> Iterator[None]:
        while True:
            ready = [prompt for prompt in self._running if prompt.announced]
            if ready and self._free_slots:
                prompt, number = self._random.choice(ready), self._free_slots.pop()
                layers = prompt.announced.popleft()
                span = KVSpan(layers, HEADS)
                num_bytes = self.here.cache.payload_bytes(len(prompt.here), span)
                payload = self._slots[number][:num_bytes]
                self.here.cache.read_blocks(prompt.here, span, payload)
                self._sent.append(_Chunk(prompt, layers, number, num_bytes, crc32(payload)))
            yield

    def _scatter(self) -> Iterator[None]:
        while True:
            if self._sent:
                chunk = self._sent.popleft()
                self._take(chunk, self._slots[chunk.slot][: chunk.num_bytes])
                self._free_slots.append(chunk.slot)
                chunk.prompt.num_arrived += chunk.layers.count
            yield

    def _take(self, chunk: _Chunk, payload: memoryview) -> None:
        """As from an arena, or as from gRPC."""
        cache, blocks, span = self.there.cache, chunk.prompt.there, KVSpan(chunk.layers, HEADS)
        copy = bytes(payload)
        _verify(copy, chunk)
        if self._has_pinned_arena:
            assert cache.copy_in(blocks, span, copy, 0) == xxhash.xxh3_64_intdigest(copy)
        else:
            cache.write_blocks(blocks, span, copy)

    def _decode_engine(self) -> Iterator[None]:
        gpu, cache = self.there.gpu, self.there.cache
        while True:
            committed = [prompt for prompt in self._running if prompt.num_arrived == LAYOUT.num_layers]
            if committed:
                prompt = self._random.choice(committed)
                found = gpu.adopt(torch.empty_like(prompt.kv))
                with gpu.on(gpu.current()):
                    torch.index_select(cache.tensor, 2, torch.tensor(prompt.there), out=found)
                yield
                if not torch.equal(gpu.read_back(found), prompt.kv):
                    raise WrongKV(f"attention read other KV of prompt {prompt.number} than was computed")
                self._running.remove(prompt)
                if self._random.random() < 0.5:
                    with gpu.on(gpu.current()):
                        cache.clear_blocks(prompt.there)
                self.here.free += prompt.here
                self.there.free += prompt.there
            yield

    def _taken(self, side: Side, num_blocks: int) -> list[int]:
        self._random.shuffle(side.free)
        return [side.free.pop() for _ in range(num_blocks)]


def simulated_cache(gpu: SimulatedStreams, layout: KVLayout = LAYOUT, num_blocks: int = _NUM_BLOCKS) -> KVCache:
    """A cache in the memory of a simulated GPU, full of what earlier sequences have left."""
    with patch("engine.kv.cache.streams_for", lambda device: gpu):
        cache = KVCache(layout, num_blocks, torch.device("cpu"))
    cache.tensor.fill_(-1.0)
    gpu.adopt(cache.tensor)
    return cache


def _verify(payload: bytes | memoryview, chunk: _Chunk) -> None:
    if crc32(payload) != chunk.checksum:
        raise WrongKV(f"{chunk.layers} of prompt {chunk.prompt.number} changed on their way")
