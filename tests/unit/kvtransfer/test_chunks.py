"""How KV is cut into chunks; a chunk's checksum holds it to its transfer and its place, the digest to all chunks."""

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.chunks import Coverage, Digest, Extent, ExtentQueue, chunk_seed, transfer_seed
from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout, KVSpan, Span
from tests.fakes.kv_store import box, with_axis

LAYOUT = KVLayout("m", num_layers=5, num_kv_heads=2, head_dim=2, block_size=2, dtype="float32")


ALL = Span(0, 2)
PLACE = Extent(Span(2, 3), KVSpan(layers=Span(4, 5), heads=Span(6, 7)))
SEED = transfer_seed("transfer", 1)
GOOD = chunk_seed(SEED, 7, PLACE, 2048)


def cells(extent: Extent) -> set[tuple[int, ...]]:
    axes = (extent.span.layers, extent.span.heads, extent.blocks)
    return set(product(*(range(axis.first, axis.end) for axis in axes)))


@st.composite
def cuts(draw: st.DrawFn, end: int) -> list[tuple[int, int]]:
    """[0, end) in pieces (start, length)."""
    inner = draw(st.sets(st.integers(1, end - 1))) if end > 1 else set()
    edges = [0, *sorted(inner), end]
    return [(a, b - a) for a, b in pairwise(edges)]


@given(cuts(9), cuts(5), st.integers(1, 400), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_chunks_cover_what_was_pushed_exactly(
    blocks: list[tuple[int, int]],
    layers: list[tuple[int, int]],
    max_bytes: int,
    random: Random,
    in_order: bool,
    by_head: bool,
) -> None:
    heads = [Span(0, 1), Span(1, 1)] if by_head else [ALL]
    ranges = [box(*block, *layer, each) for block in blocks for layer in layers for each in heads]
    if not in_order:
        random.shuffle(ranges)
    taken = []
    queue = ExtentQueue(LAYOUT.layer_block_bytes, max_bytes)
    for each_range in ranges:
        queue.add(each_range)
        if random.random() < 0.3:
            taken.append(queue.take())
    while queue:
        taken.append(queue.take())
    coverage = Coverage(Span(0, 9), LAYOUT.whole)
    for extent in taken:
        coverage.claim(extent)
        assert extent.num_bytes(LAYOUT) <= max(max_bytes, LAYOUT.layer_block_bytes)
    coverage.require_full()


def test_small_ranges_become_one_chunk() -> None:
    queue = ExtentQueue(LAYOUT.layer_block_bytes, 1 << 20)
    for layer in range(5):
        queue.add(box(0, 4, layer, 1))
    assert queue.take() == box(0, 4, 0, 5)
    assert not queue


def test_whole_layers_are_preferred() -> None:
    queue = ExtentQueue(LAYOUT.layer_block_bytes, LAYOUT.layer_block_bytes * 9)
    queue.add(box(0, 4, 0, 5))
    assert [queue.take() for _ in range(3)] == [
        box(0, 4, 0, 2),
        box(0, 4, 2, 2),
        box(0, 4, 4, 1),
    ]


def spans(most: int) -> st.SearchStrategy[Span]:
    return st.builds(Span, st.integers(-1, most), st.integers(-1, most))


@given(spans(7), spans(6), spans(3))
def test_coverage_takes_what_is_inside_once(blocks: Span, layers: Span, heads: Span) -> None:
    extent, everything = Extent(blocks, KVSpan(layers, heads)), box(2, 4, 0, 5, ALL)
    coverage = Coverage(Span(2, 4), LAYOUT.whole)
    if min(blocks.count, layers.count, heads.count) > 0 and cells(extent) <= cells(everything):
        coverage.claim(extent)
    with pytest.raises(TransferCorrupt):
        coverage.claim(extent)
    if cells(extent) == cells(everything):
        coverage.require_full()
    else:
        with pytest.raises(TransferFailed, match="never arrived"):
            coverage.require_full()


def test_nothing_to_send_is_full() -> None:
    Coverage(Span(3, 0), LAYOUT.whole).require_full()


def test_the_same_chunk_has_the_same_seed() -> None:
    assert chunk_seed(transfer_seed("transfer", 1), 7, replace(PLACE), 2048) == GOOD


@pytest.mark.parametrize("change", [(1, 0), (0, 1)], ids=["moved", "longer"])
@pytest.mark.parametrize("axis", ["blocks", "layers", "heads"])
def test_every_axis_of_the_place_counts(axis: str, change: tuple[int, int]) -> None:
    assert chunk_seed(SEED, 7, with_axis(PLACE, axis, *change), 2048) != GOOD


def test_transfer_attempt_number_and_length_count() -> None:
    assert chunk_seed(transfer_seed("transfes", 1), 7, PLACE, 2048) != GOOD
    assert chunk_seed(transfer_seed("transfer", 2), 7, PLACE, 2048) != GOOD
    assert chunk_seed(SEED, 8, PLACE, 2048) != GOOD
    assert chunk_seed(SEED, 7, PLACE, 2047) != GOOD


def test_the_digest_depends_on_all_checksums_and_their_order() -> None:
    def digest(*checksums: int) -> int:
        fold = Digest()
        for checksum in checksums:
            fold.add(checksum)
        return fold.value

    assert digest(1, 2) == digest(1, 2)
    assert len({digest(), digest(1), digest(2), digest(1, 2), digest(2, 1), digest(1, 2, 0)}) == 6
