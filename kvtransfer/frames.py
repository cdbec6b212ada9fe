"""Chunks as bytes on the wire, with a payload that protobuf's own code would copy twice on either side.

The bytes are protobuf's: `PushRequest{chunk: TransferChunk{..., payload}}`, the payload last, which is how every
implementation writes them. What is written in another order is left to protobuf.
"""

from tandem.v1 import kvtransfer_pb2 as pb

_CHUNK_TAG, _PAYLOAD_TAG = 0x12, 0x42  # both: field number << 3 | 2, bytes with a length before them
_MAX_HEADER_BYTES = 128


def join_chunk(chunk: pb.TransferChunk, payload: bytes | memoryview) -> bytes:
    """A PushRequest with `chunk`, which has no payload itself, and this payload: copied once."""
    header = chunk.SerializeToString()
    fields = b"".join((header, bytes((_PAYLOAD_TAG,)), _varint(len(payload))))
    return b"".join((bytes((_CHUNK_TAG,)), _varint(len(fields) + len(payload)), fields, payload))


def split_chunk(frame: bytes) -> tuple[bytes, memoryview] | None:
    """A TransferChunk's bytes but for its payload, and the payload, which is part of `frame`; None if it has none, or
    not at its end.
    """
    if len(frame) <= _MAX_HEADER_BYTES:
        return None
    head = frame[:_MAX_HEADER_BYTES]  # nobody makes us walk through megabytes
    try:
        length, start = _read_varint(head, 1)
        position = start
        while head[position] != _PAYLOAD_TAG:
            position = _skip_field(head, position)
        num_bytes, payload = _read_varint(head, position + 1)
    except IndexError:
        return None
    if head[0] != _CHUNK_TAG or not start + length == payload + num_bytes == len(frame):
        return None
    return frame[start:position], memoryview(frame)[payload:]


def _skip_field(head: bytes, position: int) -> int:
    """Where the field after this one begins. IndexError if this is none of a chunk's numbers."""
    tag = head[position]
    if tag & 0x80 == 0 and tag & 7 == 0:
        return _read_varint(head, position + 1)[1]
    if tag & 0x80 == 0 and tag & 7 == 1:
        return position + 9
    raise IndexError


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(head: bytes, position: int) -> tuple[int, int]:
    """The value, and where it ends."""
    value = shift = 0
    while head[position] & 0x80:
        value |= (head[position] & 0x7F) << shift
        shift += 7
        position += 1
    return value | head[position] << shift, position + 1
