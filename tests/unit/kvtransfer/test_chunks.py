"""Cutting pushes into chunks, and counting what has arrived."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.chunks import ChunkRange, Coverage, PushQueue
from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout

LAYOUT = KVLayout("m", num_layers=5, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32")


def cells(piece: ChunkRange) -> set[tuple[int, int]]:
    layers = range(piece.first_layer, piece.first_layer + piece.num_layers)
    return {(layer, piece.first_block + n) for layer in layers for n in range(piece.num_blocks)}


@st.composite
def cuts(draw: st.DrawFn, end: int) -> list[tuple[int, int]]:
    """[0, end) in pieces (start, length)."""
    inner = draw(st.sets(st.integers(1, end - 1))) if end > 1 else set()
    edges = [0, *sorted(inner), end]
    return [(a, b - a) for a, b in pairwise(edges)]


@given(cuts(9), cuts(5), st.integers(1, 400), st.randoms(use_true_random=False), st.booleans())
def test_chunks_cover_what_was_pushed_exactly(
    blocks: list[tuple[int, int]], layers: list[tuple[int, int]], max_bytes: int, random: Random, in_order: bool
) -> None:
    pushes = [ChunkRange(b, nb, la, nl) for b, nb in blocks for la, nl in layers]
    if not in_order:
        random.shuffle(pushes)
    queue, taken = PushQueue(LAYOUT, max_bytes), []
    for push in pushes:
        queue.add(push)
        if random.random() < 0.3:
            taken.append(queue.take())
    while queue:
        taken.append(queue.take())
    coverage = Coverage(LAYOUT.num_layers, 0, 9)
    for piece in taken:
        coverage.claim(piece)
        assert piece.num_bytes(LAYOUT) <= max(max_bytes, LAYOUT.layer_block_bytes)
    coverage.require_full()


def test_small_pushes_become_one_chunk() -> None:
    queue = PushQueue(LAYOUT, 1 << 20)
    for layer in range(5):
        queue.add(ChunkRange(0, 4, layer, 1))
    assert queue.take() == ChunkRange(0, 4, 0, 5)
    assert not queue


def test_whole_layers_are_preferred() -> None:
    queue = PushQueue(LAYOUT, LAYOUT.layer_block_bytes * 9)
    queue.add(ChunkRange(0, 4, 0, 5))
    assert [queue.take() for _ in range(3)] == [
        ChunkRange(0, 4, 0, 2),
        ChunkRange(0, 4, 2, 2),
        ChunkRange(0, 4, 4, 1),
    ]


@given(st.integers(-1, 7), st.integers(-1, 7), st.integers(-1, 6), st.integers(-1, 6))
def test_coverage_takes_what_is_inside_once(
    first_block: int, num_blocks: int, first_layer: int, num_layers: int
) -> None:
    piece = ChunkRange(first_block, num_blocks, first_layer, num_layers)
    inside = num_blocks > 0 and num_layers > 0 and cells(piece) <= cells(ChunkRange(2, 4, 0, 5))
    coverage = Coverage(5, 2, 6)
    if inside:
        coverage.claim(piece)
    with pytest.raises(TransferCorrupt):
        coverage.claim(piece)
    if cells(piece) == cells(ChunkRange(2, 4, 0, 5)):
        coverage.require_full()
    else:
        with pytest.raises(TransferFailed, match="never arrived"):
            coverage.require_full()


def test_nothing_to_send_is_full() -> None:
    Coverage(5, 3, 3).require_full()
