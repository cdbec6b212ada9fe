"""Serializes and parses chunk messages without the two copies of the payload that protobuf makes on either side.

The bytes are ordinary protobuf: `PushRequest{chunk: TransferChunk{..., payload}}`, with the payload last, as every
implementation writes it. Messages with another field order are left to protobuf.
"""

from mesh.v1 import kvtransfer_pb2 as pb

_CHUNK_TAG, _PAYLOAD_TAG = 0x12, 0x62  # field number << 3 | 2: length-delimited bytes
_MAX_HEADER_BYTES = 128


def join_chunk(chunk: pb.TransferChunk, payload: bytes | memoryview) -> bytes:
    """Serialize a PushRequest from `chunk`, whose payload is empty, and `payload`, which is copied once."""
    header = chunk.SerializeToString()
    fields = b"".join((header, bytes((_PAYLOAD_TAG,)), _varint(len(payload))))
    return b"".join((bytes((_CHUNK_TAG,)), _varint(len(fields) + len(payload)), fields, payload))


def split_chunk(frame: bytes) -> tuple[bytes, memoryview] | None:
    """Split a PushRequest into the TransferChunk's bytes without payload and the payload, a view into `frame`. Return
    None if there is no payload, or if it is not at the end.
    """
    if len(frame) <= _MAX_HEADER_BYTES:
        return None
    head = frame[:_MAX_HEADER_BYTES]  # bounds the search, whatever a sender puts into the frame
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
    """Return the position of the next field. Raises IndexError if this field is not one of a chunk's numbers."""
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
    """Return the value and the position after it."""
    value = shift = 0
    while head[position] & 0x80:
        value |= (head[position] & 0x7F) << shift
        shift += 7
        position += 1
    return value | head[position] << shift, position + 1
