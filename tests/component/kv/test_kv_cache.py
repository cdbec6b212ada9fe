"""Blocks go out of a cache and into another unchanged."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import xxhash

from engine.kernels.cpu.buffers import aligned
from engine.kv.cache import KVCache, read_slots
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import KVLayout, KVSpan, Span
from tests.component.kv.kv_moves import check_round_trip

CPU = torch.device("cpu")
NUM_BLOCKS = 12
ALL_HEADS = Span(0, 2)
SEED = 2**64 - 3


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout("model", num_layers=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)


def filled_cache(dtype: str = "float32") -> KVCache:
    cache = KVCache(layout(dtype), NUM_BLOCKS, CPU)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    return cache


def part(first_layer: int, num_layers: int, heads: Span = ALL_HEADS) -> KVSpan:
    return KVSpan(Span(first_layer, num_layers), heads)


def read(cache: KVCache, block_ids: list[int], span: KVSpan) -> bytes:
    out = bytearray(cache.payload_bytes(len(block_ids), span))
    cache.read_blocks(block_ids, span, out)
    return bytes(out)


def copy_out(cache: KVCache, block_ids: list[int], span: KVSpan) -> tuple[bytes, int]:
    out = bytearray(cache.payload_bytes(len(block_ids), span))
    checksum = cache.copy_out(block_ids, span, memoryview(out), SEED)
    return bytes(out), checksum


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_ids", [[3], [4, 5, 6], [9, 0, 1, 7, 6], list(range(NUM_BLOCKS)), []])
def test_payload_is_in_c_order(dtype: str, block_ids: list[int]) -> None:
    cache = filled_cache(dtype)
    expected = cache.tensor[1:3, :, block_ids].contiguous().view(torch.uint8)
    assert read(cache, block_ids, part(1, 2)) == expected.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_blocks_land_elsewhere(dtype: str) -> None:
    source, target = filled_cache(dtype), KVCache(layout(dtype), NUM_BLOCKS, CPU)
    target.write_blocks([8, 2, 3], part(1, 2), read(source, [5, 6, 1], part(1, 2)))
    expected = torch.zeros_like(target.tensor)
    expected[1:3, :, [8, 2, 3]] = source.tensor[1:3, :, [5, 6, 1]]
    assert torch.equal(target.tensor, expected)


def test_a_spare_block_is_the_models_only() -> None:
    cache = KVCache(layout(), NUM_BLOCKS, CPU, num_spare=1)
    cache.tensor.copy_(torch.arange(cache.tensor.numel()).view_as(cache.tensor))
    assert cache.layer(0).shape[1] == NUM_BLOCKS + 1
    for refused in (read, copy_out):
        with pytest.raises(IndexError):
            refused(cache, [NUM_BLOCKS], part(0, 1))


HASHED = {
    "by the kernel": KVLayout("model", num_layers=3, num_kv_heads=3, head_dim=16, block_size=16, dtype="float32"),
    "int8": KVLayout("model", num_layers=3, num_kv_heads=3, head_dim=64, block_size=32, dtype="int8"),
    "too small for the kernel": layout("bfloat16"),
    "keys are values": KVLayout("model", 3, 3, head_dim=64, block_size=32, dtype="int8", keys_are_values=True),
}


@pytest.mark.parametrize("shape", HASHED.values(), ids=HASHED)
@pytest.mark.parametrize("heads", [None, Span(1, 1)])
@pytest.mark.parametrize("block_ids", [[3], [4, 5, 6], [9, 0, 1, 7, 6], []])
def test_copies_with_a_checksum_are_plain_copies_and_their_xxh3(
    shape: KVLayout, heads: Span | None, block_ids: list[int]
) -> None:
    source, target = KVCache(shape, NUM_BLOCKS, CPU), KVCache(shape, NUM_BLOCKS, CPU)
    source.tensor.view(torch.uint8).random_(0, 256)
    span = KVSpan(Span(1, 2), heads or shape.whole.heads)
    payload, checksum = copy_out(source, block_ids, span)
    assert payload == read(source, block_ids, span)
    assert checksum == xxhash.xxh3_64_intdigest(payload, seed=SEED)
    slot = aligned(len(payload), np.uint8)  # is written past the cache
    assert source.copy_out(block_ids, span, slot.data, SEED) == checksum
    assert slot.tobytes() == payload
    unaligned = memoryview(b"." + payload)[1:]
    assert target.copy_in(block_ids, span, unaligned, SEED) == checksum
    assert read(target, block_ids, span) == payload
    others = [block for block in range(NUM_BLOCKS) if block not in block_ids]
    assert not any(read(target, others, shape.whole))


@pytest.mark.parametrize("shape", HASHED.values(), ids=HASHED)
def test_copies_with_a_checksum_refuse_what_plain_copies_refuse(shape: KVLayout) -> None:
    cache = KVCache(shape, NUM_BLOCKS, CPU)
    size = cache.payload_bytes(2, shape.whole)
    for data in (bytes(size - 1), bytes(size + 64)):
        with pytest.raises(ValueError, match="bytes"):
            cache.copy_in([0, 1], shape.whole, data, SEED)
    with pytest.raises(ValueError, match="read-only"):
        cache.copy_out([0, 1], shape.whole, bytes(size), SEED)
    for refused in ([0, NUM_BLOCKS], [-1, 0]):
        with pytest.raises(IndexError):
            cache.copy_in(refused, shape.whole, bytes(size), SEED)


def test_some_heads_of_some_layers_move_between_caches_that_hold_different_parts() -> None:
    """As between workers of different degrees: a whole cache, and one of the second head in layers 2 and 3."""
    whole = filled_cache("bfloat16")
    shard = KVCache(layout("bfloat16"), NUM_BLOCKS, CPU, span=part(2, 2, heads=Span(1, 1)))
    shard.write_blocks([4, 0], shard.span, read(whole, [7, 8], shard.span))
    assert torch.equal(shard.tensor[:, :, [4, 0]], whole.tensor[2:4, :, [7, 8], :, 1:2])
    assert torch.equal(shard.layer(3), shard.tensor[1])
    back = KVCache(layout("bfloat16"), NUM_BLOCKS, CPU)
    back.write_blocks([1, 2], shard.span, read(shard, [4, 0], shard.span))
    expected = torch.zeros_like(back.tensor)
    expected[2:4, :, [1, 2], :, 1] = whole.tensor[2:4, :, [7, 8], :, 1]
    assert torch.equal(back.tensor, expected)
    with pytest.raises(IndexError, match="not completely in this cache"):
        read(shard, [0], part(1, 2, heads=Span(1, 1)))


@pytest.mark.parametrize("heads", [Span(0, 1), Span(1, 2), Span(0, 3)])
def test_heads_of_kv_in_int8_move_as_the_whole_does(heads: Span) -> None:
    shape = KVLayout("model", num_layers=2, num_kv_heads=3, head_dim=16, block_size=32, dtype="int8")
    whole, copy = KVCache(shape, 4, CPU), KVCache(shape, 4, CPU)
    whole.tensor.copy_(torch.randint(-128, 128, whole.tensor.shape, dtype=torch.int8))
    for span in (KVSpan(Span(0, 2), heads), *others_of(heads)):
        copy.write_blocks([3, 0], span, read(whole, [1, 2], span))
    assert torch.equal(copy.tensor[:, :, [3, 0]], whole.tensor[:, :, [1, 2]])


def others_of(heads: Span) -> list[KVSpan]:
    """The rest of three heads."""
    rest = (Span(0, heads.first), Span(heads.end, 3 - heads.end))
    return [KVSpan(Span(0, 2), span) for span in rest if span.count]


def test_threads_move_their_own_blocks() -> None:
    source, target = filled_cache(), KVCache(layout(), NUM_BLOCKS, CPU)

    def move(block_ids: list[int]) -> None:
        for _ in range(50):
            target.write_blocks(block_ids, part(0, 4), read(source, block_ids, part(0, 4)))

    threads = [Thread(target=move, args=(list(range(i, NUM_BLOCKS, 3)),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(source.tensor, target.tensor)


def test_wrong_ranges_are_refused() -> None:
    cache = filled_cache()
    with pytest.raises(IndexError, match="12 blocks"):
        read(cache, [NUM_BLOCKS], part(0, 1))
    with pytest.raises(IndexError, match="blocks"):
        read(cache, [-1], part(0, 1))
    with pytest.raises(IndexError, match="layers"):
        read(cache, [0], part(3, 2))
    with pytest.raises(ValueError, match="bytes"):
        cache.write_blocks([0], part(0, 1), b"short")
    with pytest.raises(ValueError, match="read-only"):
        cache.read_blocks([0], part(0, 1), bytes(cache.payload_bytes(1, part(0, 1))))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_continues_on_another_runner(checkpoint: Callable[[str], Path], family: str, dtype: str) -> None:
    check_round_trip(RunnerSettings(checkpoint(family), num_blocks=32, block_size=4, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("first", [0, 5, 16, 31])
def test_the_tail_of_a_block_is_cleared(dtype: str, first: int) -> None:
    cache = KVCache(KVLayout("model", 3, 2, head_dim=16, block_size=32, dtype=dtype), 4, CPU)
    cache.tensor.view(torch.uint8).fill_(0xFF)  # NaN in floats and in scales
    cache.clear_blocks([1])
    assert not cache.tensor[:, :, 1].any()
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 63, cache.tensor[:, :, 2].view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
    cache.tensor[:, :, 2].view(torch.uint8).copy_(data)  # small numbers in every type
    rows = torch.arange(2 * 32, 3 * 32)
    before = [torch.stack(read_slots(cache.layer(layer), rows)) for layer in range(3)]
    cache.clear_blocks([2], first)
    for layer, old in enumerate(before):
        now = torch.stack(read_slots(cache.layer(layer), rows))
        assert old[:, first:].any()
        assert torch.equal(now[:, :first], old[:, :first])
        assert not now[:, first:].any()
    assert bool((cache.tensor[:, :, [0, 3]].view(torch.uint8) == 0xFF).all()), "other blocks stay as they are"
