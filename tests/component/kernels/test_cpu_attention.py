"""Compiled attention against torch: decodes and chunks in one step, over scattered blocks of KV in each dtype."""

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, ForwardMetadata
from engine.attention.cpu import CpuAttention, head_shape, kernel_batch
from engine.attention.torch_sdpa import TorchAttention
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.device_copies import NoCopies
from engine.kernels.cpu.arguments import (
    NO_WINDOW,
    Attending,
    LayerPlace,
    Operand,
    Part,
    ProductCode,
    Queries,
    Window,
)
from engine.kernels.cpu.attention import batch as attention
from engine.kernels.cpu.buffers import Buffers
from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.machine import NUM_KINDS, amx_shapes, multiplies_bf16
from engine.kernels.cpu.products import matmul
from engine.kernels.cpu.step_facts import facts_of
from engine.kv.cache import KVCache, elements
from engine.sequence import SequenceState
from engine.step_input import StepInputBuilder
from mesh.domain.kv import KVLayout
from tests.fakes.requests import make_request

attend = entry(attention.attend)
begin_products, end_products = entry(matmul.begin_products), entry(matmul.end_products)

Work = Sequence[tuple[int, int]]

CPU = torch.device("cpu")
NUM_SPARE_BLOCKS = 5
# Computed tokens of each sequence, from and to: decodes first, then chunks that begin or continue a prompt. The longer
# ones are of several splits, or of several blocks of keys.
WORK = [
    *((n - 1, n) for n in (1, 15, 16, 17, 100, 256, 257, 333, 778)),
    *((0, 2), (0, 75), (16, 31), (33, 150), (130, 163), (250, 298), (500, 530), (960, 1100)),
]
SHAPES = [AttentionShape(*heads) for heads in ((14, 2, 64), (9, 3, 64), (8, 8, 80), (6, 1, 96), (9, 1, 64), (8, 2, 32))]
BENT_SHAPES = [
    AttentionShape(14, 2, 64, softcap=2.0),
    AttentionShape(9, 3, 64, given_scale=0.1, softcap=30.0),
    AttentionShape(6, 1, 96, alibi=(0.5, 0.25, 0.125, 0.06, 0.03, 0.015), has_sinks=True),
    AttentionShape(8, 1, 64, has_sinks=True),
]
ONE_PLANE = [AttentionShape(20, 1, 64), AttentionShape(3, 1, 80)]
"""With rows that are keys and values at once."""


def num_blocks(block_size: int, work: Work) -> int:
    """The blocks of a cache for `work`: those of its sequences, and some that no sequence has."""
    return sum(-(-end // block_size) for _, end in work) + NUM_SPARE_BLOCKS


def step(block_size: int, work: Work = WORK, num_generated: int = 0) -> ForwardMetadata:
    """`work` as one step, its blocks scattered over the cache. The last `num_generated` tokens of a sequence are
    generated ones, the others its prompt.
    """
    free = random.Random(0).sample(range(num_blocks(block_size, work)), num_blocks(block_size, work))
    items = []
    for start, end in work:
        sequence = SequenceState(make_request("r", range(end), num_prompt_tokens=max(1, end - num_generated)))
        sequence.block_table += [free.pop() for _ in range(0, end, block_size)]
        items.append(ScheduledSequence(sequence, start, end - start))
    return StepInputBuilder(block_size).build(ScheduledBatch(tuple(items))).on_device(NoCopies()).metadata


def filled_cache(shape: AttentionShape, dtype: str, block_size: int, work: Work = WORK) -> Tensor:
    """One layer of random KV for `work`, as [planes, num_blocks, block_size, num_kv_heads, elements of a row]."""
    return _random_kv(shape, dtype, block_size, num_blocks(block_size, work)).clone()


@lru_cache(maxsize=2)  # tests of one shape follow each other
def _random_kv(shape: AttentionShape, dtype: str, block_size: int, num_blocks: int) -> Tensor:
    generator, is_one = torch.Generator().manual_seed(0), shape in ONE_PLANE
    layout = KVLayout("m", 1, shape.num_kv_heads, shape.head_dim, block_size, dtype, keys_are_values=is_one)
    cache = KVCache(layout, num_blocks, CPU).layer(0)
    if dtype != "int8":
        return cache.copy_(torch.randn(cache.shape, generator=generator))
    numbers, scales = int8_parts(cache, shape.head_dim)
    numbers.copy_(torch.randint(-127, 128, numbers.shape, generator=generator))
    scales.copy_(torch.rand(scales.shape, generator=generator) / 64 + 1e-3)
    return cache


def int8_parts(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of a layer in int8: bytes [planes, parts, heads, 16 * head_dim], scales [planes, parts, heads, 16]."""
    heads = cache.flatten(1).view(len(cache), -1, cache.shape[3], 16 * cache.shape[4])
    size = 16 * head_dim
    return heads[..., :size], heads.view(torch.float32)[..., size // 4 :]


def as_floats(cache: Tensor, head_dim: int) -> Tensor:
    """The numbers that a cache stands for, as [planes, num_blocks, block_size, num_kv_heads, head_dim]."""
    if cache.dtype != torch.int8:
        return cache.float()
    numbers, scales = int8_parts(cache, head_dim)
    keys = numbers[0].unflatten(-1, (head_dim // 4, 16, 4)).transpose(2, 3).flatten(3)
    values = numbers[-1].unflatten(-1, (4, head_dim, 4)).transpose(3, 4).flatten(2, 3)
    rows = torch.stack([keys, values][-len(cache) :]) * scales[..., None]
    return rows.transpose(2, 3).contiguous().view(*cache.shape[:-1], head_dim)


def written(cache: Tensor, metadata: ForwardMetadata) -> Tensor:
    """Keys and values [planes, num_tokens, num_kv_heads, row] of a step's tokens."""
    return cache.flatten(1, 2)[:, metadata.slot_mapping]


def require_same(
    numbers_of_threads: Sequence[int],
    shape: AttentionShape,
    metadata: ForwardMetadata,
    cache: Tensor,
    window: int | None,
    atol: float,
) -> None:
    """AssertionError unless a step over random queries, keys and values gives what torch gives on the same numbers,
    with each of these numbers of threads.
    """
    num_tokens = metadata.positions.shape[0]
    queries = 3 * torch.randn(num_tokens, shape.num_heads, shape.head_dim)
    new = torch.randn(len(cache), num_tokens, shape.num_kv_heads, shape.head_dim)
    sinks = 4 * torch.randn(shape.num_heads) if shape.has_sinks else None
    caches = [cache, *(cache.clone() for _ in numbers_of_threads[1:])]
    ours = [
        CpuAttention(shape, num_threads).attend(queries, new[0], new[-1], own, window, metadata, sinks)
        for num_threads, own in zip(numbers_of_threads, caches, strict=True)
    ]
    floats = as_floats(cache, shape.head_dim)
    of_step = written(floats, metadata)
    theirs = TorchAttention(shape).attend(queries, of_step[0], of_step[-1], floats, window, metadata, sinks)
    for each, own in zip(ours, caches, strict=True):
        assert torch.equal(own, cache)
        torch.testing.assert_close(each, theirs, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 16, 37, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shape", [*SHAPES, *BENT_SHAPES, *ONE_PLANE], ids=str)
def test_same_as_torch(shape: AttentionShape, dtype: str, window: int | None) -> None:
    torch.manual_seed(0)
    larger = [(32, (2,))] if window in (None, 37) else []
    for block_size, numbers_of_threads in ((16, (1, 3)), *larger):
        cache = filled_cache(shape, dtype, block_size)
        require_same(numbers_of_threads, shape, step(block_size), cache, window, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300, 1024, 1500])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("float16", 1e-5), ("int8", 3e-4)])
@pytest.mark.parametrize("shape", [*SHAPES[:3], *BENT_SHAPES[1:], *ONE_PLANE], ids=str)
def test_generated_tokens_are_those_of_torch(
    shape: AttentionShape, dtype: str, atol: float, window: int | None
) -> None:
    """Contexts of one split and of several, and of exactly so many; also those that a replay computes in a chunk."""
    torch.manual_seed(0)
    work = [*((n - 1, n) for n in (2, 17, 1023, 1024, 1025, 2048)), (0, 12), (1980, 2060)]
    cache = filled_cache(shape, dtype, 16, work)
    require_same((2,), shape, step(16, work, num_generated=40), cache, window, atol)


@pytest.mark.skipif(not multiplies_bf16(), reason="the CPU has no instructions for bf16, or the kernel keeps AMX")
@pytest.mark.parametrize("window", [None, 1, 16, 37, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shape", [shape for shape in [*SHAPES, *ONE_PLANE] if shape.head_dim % 32 == 0], ids=str)
def test_chunks_in_bf16(shape: AttentionShape, dtype: str, window: int | None) -> None:
    torch.manual_seed(0)
    metadata, cache = step(16), filled_cache(shape, dtype, 16)
    # Behind the last row is what an earlier step has left there.
    queries = torch.full((metadata.positions.shape[0] + 32, shape.num_heads, shape.head_dim), torch.nan)
    queries[:-32] = 3 * torch.randn_like(queries[:-32])
    out = torch.full_like(queries[:-32], torch.nan)
    heads, nothing = head_shape(shape, cache), np.empty(0, np.uint8)
    width = shape.num_heads * shape.head_dim
    flat = Queries(queries.view(-1).numpy(), width, out.view(-1).numpy(), width)
    batch = kernel_batch(metadata, 16)
    buffers = Buffers()
    has_prompt, num_split = facts_of(batch)
    scratch = buffers.attention(heads, len(batch.slots), has_prompt=has_prompt, bf16=True)
    kv = elements(cache)
    attending = Attending(flat, heads, batch, scratch, buffers.splits(heads, num_split), attention.cache_code(kv.dtype))
    code = ProductCode(np.zeros(NUM_KINDS, np.int64), 0, 0, 0)
    amx = Operand(nothing, np.empty(0, np.float32), nothing, amx_shapes(), code)
    begin_products(amx)
    place = LayerPlace(layer=0, number=0, group=0, is_own=True)
    for part in range(3):
        attend(attending, kv.view(np.uint8), place, Window(window or NO_WINDOW), Part(part, 3))
    end_products(amx)
    # Products of bf16 are exact in fp32; what is left is the rounding of softmax weights.
    floats, rounded = as_floats(cache, shape.head_dim).bfloat16().float(), queries[:-32].bfloat16().float()
    of_step = written(floats, metadata)
    expected = TorchAttention(shape).attend(rounded, of_step[0], of_step[-1], floats, window, metadata)
    torch.testing.assert_close(out[metadata.num_decodes :], expected[metadata.num_decodes :], atol=0.01, rtol=0.0)


@pytest.mark.parametrize("shape", [*SHAPES, *ONE_PLANE], ids=str)
@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("float16", 2**-11), ("int8", 0.501 / 127)])
def test_rows_of_the_cache_are_rounded_to_the_nearest(shape: AttentionShape, dtype: str, error: float) -> None:
    torch.manual_seed(1)
    metadata, cache = step(16), filled_cache(shape, dtype, 16)
    before, num_tokens = cache.clone(), metadata.positions.shape[0]
    new = (
        torch.randn(len(cache), num_tokens, shape.num_kv_heads, shape.head_dim)
        * torch.logspace(-3, 3, num_tokens)[:, None, None]
    )
    new[:, 0] = 0.0
    queries = torch.zeros(num_tokens, shape.num_heads, shape.head_dim)
    CpuAttention(shape, 1).attend(queries, new[0], new[-1], cache, None, metadata)
    after, before = as_floats(cache, shape.head_dim), as_floats(before, shape.head_dim)
    found = written(after, metadata)
    assert bool(((found - new).abs() <= error * new.abs().amax(-1, keepdim=True)).all())
    after.flatten(1, 2)[:, metadata.slot_mapping] = written(before, metadata)
    assert torch.equal(after, before), "something else was written, too"


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", [SHAPES[1], ONE_PLANE[0]], ids=str)
def test_results_depend_neither_on_threads_nor_on_chunks(shape: AttentionShape, window: int | None) -> None:
    torch.manual_seed(3)
    cache = filled_cache(shape, "float16", 16)
    end, generated = 1300, 40
    queries = torch.randn(end, shape.num_heads, shape.head_dim)
    new = torch.randn(len(cache), end, shape.num_kv_heads, shape.head_dim)
    table = random.Random(1).sample(range(cache.shape[1]), -(-end // 16))

    def attend(backend: CpuAttention, first: int, last: int) -> Tensor:
        sequence = SequenceState(make_request("r", range(end), num_prompt_tokens=end - generated))
        sequence.block_table += table
        batch = ScheduledBatch((ScheduledSequence(sequence, first, last - first),))
        metadata = StepInputBuilder(16).build(batch).on_device(NoCopies()).metadata
        return backend.attend(queries[first:last], new[0, first:last], new[-1, first:last], cache, window, metadata)

    whole = attend(CpuAttention(shape, 1), 0, end)
    for num_threads, cuts in ((2, (7, 512, 513, 1270)), (3, (100, 600, 1260, 1261)), (5, ())):
        backend, bounds = CpuAttention(shape, num_threads), (0, *cuts, end)
        pieces = torch.cat([attend(backend, *part) for part in pairwise(bounds)])
        assert torch.equal(pieces, whole)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_token_sees_the_same_in_a_chunk_and_in_a_decode(dtype: str) -> None:
    torch.manual_seed(2)
    shape, cache = SHAPES[1], filled_cache(SHAPES[1], dtype, 16)
    backend, table = CpuAttention(shape, 1), [7, 2, 30, 11]
    queries, new = torch.randn(50, 9, 64), torch.randn(2, 50, 3, 64)

    def attend(start: int, end: int) -> Tensor:
        sequence = SequenceState(make_request("r", range(50)))
        sequence.block_table += table
        batch = ScheduledBatch((ScheduledSequence(sequence, start, end - start),))
        metadata = StepInputBuilder(16).build(batch).on_device(NoCopies()).metadata
        return backend.attend(queries[start:end], *new[:, start:end], cache, None, metadata)

    whole = attend(0, 50)
    pieces = torch.cat(
        [attend(start, end) for start, end in ((0, 20), (20, 21), (21, 47), (47, 48), (48, 49), (49, 50))]
    )
    torch.testing.assert_close(pieces, whole, atol=2e-6, rtol=1e-5)
