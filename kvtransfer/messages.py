"""The messages of one transfer as plain values, and their conversion to and from protobuf.

sender                receiver
TransferOpen   ──▶
               ◀──    Granted       or the call ends with an error
Chunk ...      ──▶
               ◀──    Ack ...       each returns one credit
Commit         ──▶
               ◀──    Committed     acknowledges the rest

Between Granted and Commit, at any time: Renew ──▶, ◀── Renewed. They prove to each side that the other is alive.

Chunk messages are serialized and parsed without the two copies of the payload that protobuf makes on either side. The
bytes are ordinary protobuf: `PushRequest{chunk: TransferChunk{..., payload}}`, with the payload last, as every
implementation writes it. Messages with another field order are left to protobuf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from kvtransfer.chunks import Extent
from kvtransfer.transports.base import Payload, TransportOffer
from mesh.domain.errors import InvalidRequest, TransferFailed
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.durations import duration_from_proto, duration_to_proto
from mesh.v1 import kvtransfer_pb2 as pb
from mesh.wire import (
    layout_from_proto,
    layout_to_proto,
    span_from_proto,
    span_to_proto,
)
from tandem.v1.sampling_pb2 import SampledToken

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name

_CHUNK_TAG, _PAYLOAD_TAG = 0x12, 0x62  # field number << 3 | 2: length-delimited bytes
_MAX_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True)
class TransferOpen:
    """The first message: announces the KV of `span` in blocks [first_block, end_block). The receiver has the blocks
    before `first_block` already."""

    transfer_id: str
    attempt: int
    receiver_incarnation: str
    sender_id: str
    layout: KVLayout
    transports: tuple[TransportOffer, ...]
    first_block: int
    end_block: int
    span: KVSpan


@dataclass(frozen=True, slots=True)
class TransferChunk:
    """The KV of `extent`. The payload is inline or in the transport's memory."""

    sequence_number: int
    extent: Extent
    num_bytes: int
    checksum: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Commit:
    """The last message: all chunks are sent. `digest` is the hash over all chunk checksums."""

    num_tokens: int
    num_chunks: int
    digest: int
    first_token_id: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The sender renews its lease; it may have nothing else to send."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver accepts the transfer, and ends it after `lease_s` without a message. `rendezvous` is its answer
    to the chosen offer's."""

    transport: str
    credit_chunks: int
    lease_s: float
    rendezvous: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ack:
    """The chunk is verified and written; the sender may reuse its payload memory."""

    sequence_number: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The receiver confirms a renewal."""


@dataclass(frozen=True, slots=True)
class Committed:
    """All KV has arrived, is verified and written."""


SenderMessage = TransferOpen | TransferChunk | Renew | Commit
ReceiverMessage = Granted | Ack | Renewed | Committed


def request_to_bytes(message: SenderMessage) -> bytes:
    """Serialize a sender's message as a PushRequest."""
    if isinstance(message, TransferChunk):
        return _chunk_to_bytes(message)
    if isinstance(message, Renew):
        request = pb.PushRequest(renew=pb.TransferRenew())
    elif isinstance(message, TransferOpen):
        request = pb.PushRequest(open=_open_to_proto(message))
    else:
        request = pb.PushRequest(commit=_commit_to_proto(message))
    return request.SerializeToString()


def reply_to_bytes(reply: ReceiverMessage) -> bytes:
    """Serialize a receiver's message as a PushResponse."""
    return _reply_to_proto(reply).SerializeToString()


def _reply_to_proto(reply: ReceiverMessage) -> pb.PushResponse:
    if isinstance(reply, Granted):
        granted = pb.TransferGranted(
            transport=reply.transport,
            credit_chunks=reply.credit_chunks,
            lease=duration_to_proto(reply.lease_s),
            rendezvous=reply.rendezvous,
        )
        return pb.PushResponse(granted=granted)
    if isinstance(reply, Ack):
        return pb.PushResponse(ack=pb.TransferAck(sequence_number=reply.sequence_number))
    if isinstance(reply, Renewed):
        return pb.PushResponse(renewed=pb.TransferRenewed())
    return pb.PushResponse(committed=pb.TransferCommitted())


def reply_from_proto(response: pb.PushResponse) -> ReceiverMessage:
    """Raises TransferFailed if the message is empty or of an unknown kind."""
    kind = response.WhichOneof("message")
    if kind == "granted":
        granted = response.granted
        lease_s = duration_from_proto(granted.lease)
        return Granted(granted.transport, granted.credit_chunks, lease_s, dict(granted.rendezvous))
    if kind == "ack":
        return Ack(response.ack.sequence_number)
    if kind == "renewed":
        return Renewed()
    if kind == "committed":
        return Committed()
    raise TransferFailed("the receiver sent a message of an unknown kind")


def request_from_bytes(raw: bytes) -> SenderMessage:
    """Parse a PushRequest. The payload of a chunk is a view into `raw`. Raises InvalidRequest if `raw` is no
    PushRequest, TransferFailed if the message is empty or of an unknown kind.
    """
    try:
        split = split_chunk(raw)
        if split is not None:
            header, payload = split
            return _chunk_from_proto(pb.TransferChunk.FromString(header), payload)
        request = pb.PushRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("the request is not a valid protobuf message of this method") from error
    kind = request.WhichOneof("message")
    if kind == "chunk":
        return _chunk_from_proto(request.chunk, request.chunk.payload)
    if kind == "renew":
        return Renew()
    if kind == "open":
        return _open_from_proto(request.open)
    if kind == "commit":
        commit = request.commit
        return Commit(commit.num_tokens, commit.num_chunks, commit.digest, commit.first_token.id)
    raise TransferFailed("the sender sent a message of an unknown kind")


def _open_to_proto(opening: TransferOpen) -> pb.TransferOpen:
    return pb.TransferOpen(
        transfer_id=opening.transfer_id,
        attempt=opening.attempt,
        receiver_incarnation=opening.receiver_incarnation,
        sender_id=opening.sender_id,
        layout=layout_to_proto(opening.layout),
        transports=[_offer_to_proto(offer) for offer in opening.transports],
        first_block=opening.first_block,
        end_block=opening.end_block,
        span=span_to_proto(opening.span),
    )


def _offer_to_proto(offer: TransportOffer) -> pb.TransportOffer:
    return pb.TransportOffer(
        name=offer.name,
        arena=offer.arena,
        nonce=offer.nonce,
        arena_bytes=offer.arena_bytes,
        pair=offer.pair,
        host=offer.host,
        rendezvous=offer.rendezvous,
    )


def _offer_from_proto(offer: pb.TransportOffer) -> TransportOffer:
    return TransportOffer(
        offer.name, offer.arena, offer.nonce, offer.arena_bytes, offer.pair, offer.host, dict(offer.rendezvous)
    )


def _commit_to_proto(commit: Commit) -> pb.TransferCommit:
    return pb.TransferCommit(
        num_tokens=commit.num_tokens,
        num_chunks=commit.num_chunks,
        digest=commit.digest,
        first_token=SampledToken(id=commit.first_token_id),
    )


def _chunk_to_bytes(chunk: TransferChunk) -> bytes:
    extent = chunk.extent
    message = pb.TransferChunk(
        sequence_number=chunk.sequence_number,
        first_block=extent.blocks.first,
        num_blocks=extent.blocks.count,
        first_layer=extent.span.layers.first,
        num_layers=extent.span.layers.count,
        first_head=extent.span.heads.first,
        num_heads=extent.span.heads.count,
        num_bytes=chunk.num_bytes,
        checksum=chunk.checksum,
        arena_offset=chunk.payload.arena_offset,
        tag=chunk.payload.tag,
    )
    if chunk.payload.inline:
        return join_chunk(message, chunk.payload.inline)
    return pb.PushRequest(chunk=message).SerializeToString()


def _open_from_proto(message: pb.TransferOpen) -> TransferOpen:
    return TransferOpen(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        receiver_incarnation=message.receiver_incarnation,
        sender_id=message.sender_id,
        layout=layout_from_proto(message.layout),
        transports=tuple(map(_offer_from_proto, message.transports)),
        first_block=message.first_block,
        end_block=message.end_block,
        span=span_from_proto(message.span),
    )


def _chunk_from_proto(message: pb.TransferChunk, payload: bytes | memoryview) -> TransferChunk:
    return TransferChunk(
        sequence_number=message.sequence_number,
        extent=Extent(
            Span(message.first_block, message.num_blocks),
            KVSpan(Span(message.first_layer, message.num_layers), Span(message.first_head, message.num_heads)),
        ),
        num_bytes=message.num_bytes,
        checksum=message.checksum,
        payload=Payload(payload, message.arena_offset, message.tag),
    )


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
