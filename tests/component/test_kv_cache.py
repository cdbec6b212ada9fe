"""Blocks go out of a cache and into another unchanged."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch

from engine.kv_cache import KVCache, num_blocks_for_memory
from engine.load import RunnerSettings
from engine.memory import available_bytes
from mesh.domain.kv import KVLayout
from tests.component.kv_moves import check_round_trip

CPU = torch.device("cpu")
NUM_BLOCKS = 12


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout("model", num_layers=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)


def filled_cache(dtype: str = "float32") -> KVCache:
    cache = KVCache(layout(dtype), NUM_BLOCKS, CPU)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    return cache


def read(cache: KVCache, block_ids: list[int], first_layer: int, num_layers: int) -> bytes:
    out = bytearray(cache.payload_bytes(len(block_ids), num_layers))
    cache.read_blocks(block_ids, first_layer, num_layers, out)
    return bytes(out)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_ids", [[3], [4, 5, 6], [9, 0, 1, 7, 6], list(range(NUM_BLOCKS)), []])
def test_payload_is_in_c_order(dtype: str, block_ids: list[int]) -> None:
    cache = filled_cache(dtype)
    expected = cache.tensor[1:3, :, block_ids].contiguous().view(torch.uint8)
    assert read(cache, block_ids, 1, 2) == expected.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_blocks_land_elsewhere(dtype: str) -> None:
    source, target = filled_cache(dtype), KVCache(layout(dtype), NUM_BLOCKS, CPU)
    target.write_blocks([8, 2, 3], 1, 2, read(source, [5, 6, 1], 1, 2))
    expected = torch.zeros_like(target.tensor)
    expected[1:3, :, [8, 2, 3]] = source.tensor[1:3, :, [5, 6, 1]]
    assert torch.equal(target.tensor, expected)


@pytest.mark.parametrize("block_ids", [[3], [4, 5, 6], [9, 0, 1, 7, 6], []])
def test_blocks_in_place_are_those_of_the_payload(block_ids: list[int]) -> None:
    cache = filled_cache("bfloat16")
    parts = cache.in_place(block_ids, 1, 2)
    assert parts is not None
    assert b"".join(parts) == read(cache, block_ids, 1, 2)
    for part in parts:
        part[:] = bytes(len(part))
    assert read(cache, block_ids, 1, 2) == bytes(cache.payload_bytes(len(block_ids), 2))
    with pytest.raises(IndexError):
        cache.in_place([NUM_BLOCKS], 0, 1)


def test_threads_move_their_own_blocks() -> None:
    source, target = filled_cache(), KVCache(layout(), NUM_BLOCKS, CPU)

    def move(block_ids: list[int]) -> None:
        for _ in range(50):
            target.write_blocks(block_ids, 0, 4, read(source, block_ids, 0, 4))

    threads = [Thread(target=move, args=(list(range(i, NUM_BLOCKS, 3)),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(source.tensor, target.tensor)


def test_wrong_ranges_are_refused() -> None:
    cache = filled_cache()
    with pytest.raises(IndexError, match="12 blocks"):
        read(cache, [NUM_BLOCKS], 0, 1)
    with pytest.raises(IndexError, match="blocks"):
        read(cache, [-1], 0, 1)
    with pytest.raises(IndexError, match="layers"):
        read(cache, [0], 3, 2)
    with pytest.raises(ValueError, match="bytes"):
        cache.write_blocks([0], 0, 1, b"short")
    with pytest.raises(ValueError, match="read-only"):
        cache.read_blocks([0], 0, 1, bytes(cache.payload_bytes(1, 1)))


def test_capacity_from_memory() -> None:
    assert num_blocks_for_memory(layout(), 10 * layout().block_bytes + 1) == 10
    assert num_blocks_for_memory(layout(), 10 * layout().block_bytes, layout().block_bytes) == 5
    assert available_bytes(CPU) > 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_continues_on_another_runner(checkpoint: Callable[[str], Path], family: str, dtype: str) -> None:
    check_round_trip(RunnerSettings(checkpoint(family), num_blocks=32, block_size=4, dtype=dtype))
