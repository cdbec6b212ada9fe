"""A chunk's checksum holds it to its transfer and its place; the digest to all chunks."""

from dataclasses import replace

import pytest

from kvtransfer.chunks import ChunkRange, Digest, chunk_seed, transfer_seed
from mesh.domain.kv import KVSpan, Span
from tests.fakes.kv_store import with_axis

PLACE = ChunkRange(Span(2, 3), KVSpan(layers=Span(4, 5), heads=Span(6, 7)))
SEED = transfer_seed("transfer", 1)
GOOD = chunk_seed(SEED, 7, PLACE, 2048)


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
