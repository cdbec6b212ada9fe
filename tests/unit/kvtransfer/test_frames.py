"""Chunks on the wire are protobuf's own bytes, whoever writes or reads them; payloads are not copied on the way in."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.messages import TransferChunk, request_from_bytes, request_to_bytes, split_chunk
from kvtransfer.transports.base import Payload
from mesh.domain.errors import InvalidRequest, TransferFailed
from mesh.domain.kv import Span
from mesh.v1 import kvtransfer_pb2 as pb
from tests.fakes.kv_store import box

PAYLOAD = bytes(range(256)) * 40
CHUNK = TransferChunk(300, box(1, 2, 3, 4, Span(5, 6)), len(PAYLOAD), 2**63 + 5, Payload(PAYLOAD))
NUMBERS = st.integers(0, 2**32 - 1)


@given(st.lists(NUMBERS, min_size=7, max_size=7), st.integers(0, 2**64 - 1), st.binary(max_size=400))
def test_chunks_are_protobuf(numbers: list[int], checksum: int, payload: bytes) -> None:
    number, *place = numbers
    heads = Span(place.pop(), place.pop())
    chunk = TransferChunk(number, box(*place, heads), len(payload), checksum, Payload(memoryview(payload)))
    raw = request_to_bytes(chunk)
    message = pb.PushRequest.FromString(raw)
    assert message.chunk.payload == payload
    assert message.chunk.checksum == checksum
    assert message.SerializeToString() == raw
    assert request_from_bytes(raw) == chunk


def test_a_payload_is_part_of_the_frame() -> None:
    raw = request_to_bytes(CHUNK)
    received = request_from_bytes(raw)
    assert isinstance(received, TransferChunk)
    assert isinstance(received.payload.inline, memoryview)
    assert received.payload.inline.obj is raw


def test_payloads_elsewhere_and_fields_in_another_order_are_left_to_protobuf() -> None:
    for location in (Payload(arena_offset=1 << 40), Payload(tag=1 << 30)):
        elsewhere = replace(CHUNK, payload=location)
        assert request_from_bytes(request_to_bytes(elsewhere)) == elsewhere
    fields = pb.TransferChunk(payload=PAYLOAD).SerializeToString() + pb.TransferChunk(num_layers=4).SerializeToString()
    raw = pb.PushRequest(chunk=pb.TransferChunk.FromString(fields)).SerializeToString()
    reordered = raw[: -len(fields)] + fields
    assert split_chunk(reordered) is None
    received = request_from_bytes(reordered)
    assert isinstance(received, TransferChunk)
    assert (received.extent.span.layers.count, received.payload.inline) == (4, PAYLOAD)


def test_what_is_cut_short_or_too_long_is_refused() -> None:
    raw = request_to_bytes(CHUNK)
    for spoilt in (raw[:-1], raw + b"\0", raw[:3] + b"\xff" * 200 + raw[3:]):
        assert split_chunk(spoilt) is None
        with pytest.raises(InvalidRequest):
            request_from_bytes(spoilt)
    with pytest.raises(TransferFailed, match="unknown kind"):
        request_from_bytes(b"")
