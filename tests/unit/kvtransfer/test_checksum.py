"""A chunk's checksum holds it to its bytes, its transfer and its place."""

from dataclasses import replace

import pytest

from kvtransfer.chunks import ChunkRange, Digest, chunk_checksum, transfer_seed
from mesh.domain.kv import KVSpan, Span
from tests.fakes.kv_store import with_axis

PLACE = ChunkRange(Span(2, 3), KVSpan(layers=Span(4, 5), heads=Span(6, 7)))
PAYLOAD = bytes(range(256)) * 8
SEED = transfer_seed("transfer", 1)
GOOD = chunk_checksum(SEED, 7, PLACE, PAYLOAD)


def test_the_same_chunk_has_the_same_checksum_whatever_holds_its_bytes() -> None:
    assert chunk_checksum(transfer_seed("transfer", 1), 7, replace(PLACE), memoryview(bytearray(PAYLOAD))) == GOOD


@pytest.mark.parametrize("index", [0, 1, len(PAYLOAD) // 2, len(PAYLOAD) - 1])
def test_every_byte_counts(index: int) -> None:
    spoilt = bytearray(PAYLOAD)
    spoilt[index] ^= 1
    assert chunk_checksum(SEED, 7, PLACE, memoryview(spoilt)) != GOOD


@pytest.mark.parametrize("change", [(1, 0), (0, 1)], ids=["moved", "longer"])
@pytest.mark.parametrize("axis", ["blocks", "layers", "heads"])
def test_every_axis_of_the_place_counts(axis: str, change: tuple[int, int]) -> None:
    moved = with_axis(PLACE, axis, *change)
    assert chunk_checksum(SEED, 7, moved, PAYLOAD) != GOOD


def test_transfer_attempt_number_and_length_count() -> None:
    assert chunk_checksum(transfer_seed("transfes", 1), 7, PLACE, PAYLOAD) != GOOD
    assert chunk_checksum(transfer_seed("transfer", 2), 7, PLACE, PAYLOAD) != GOOD
    assert chunk_checksum(SEED, 8, PLACE, PAYLOAD) != GOOD
    assert chunk_checksum(SEED, 7, PLACE, PAYLOAD[:-1]) != GOOD


def test_the_digest_depends_on_all_checksums_and_their_order() -> None:
    def digest(*checksums: int) -> int:
        fold = Digest()
        for checksum in checksums:
            fold.add(checksum)
        return fold.value

    assert digest(1, 2) == digest(1, 2)
    assert len({digest(), digest(1), digest(2), digest(1, 2), digest(2, 1), digest(1, 2, 0)}) == 6
