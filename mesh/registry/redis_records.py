"""What goes through Redis: signed, fresh messages. Pure; a Redis that others can write to stays harmless.

    b"tdm1" | freshness, u64 | length, u32 | record | length, u32 | message | HMAC-SHA256 of all before it

`record` is the worker's WorkerRecord (its id, incarnation and address among others), `message` a RegisterRequest, both
protobuf; the MAC covers the bytes as they were sent, so nothing depends on how protobuf would write them again.
`freshness` is the sender's wall clock in microseconds, made to grow with every message of one worker. A router's word
to a worker that it cannot use is framed alike: b"tdr1", and the worker's incarnation and the reason for the two parts.
"""

import hmac
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from google.protobuf.message import DecodeError

from mesh import wire
from mesh.domain.errors import MeshError
from mesh.domain.worker import WorkerInfo
from mesh.rpc.credentials import MeshKey
from tandem.v1 import worker_pb2

MAX_AGE_S = 15.0
"""Older messages are refused, and those from further ahead; clocks of the mesh's machines must agree this well."""

MAX_MESSAGE_BYTES = 4 << 20
"""Longer messages are refused unread. A snapshot of MAX_SNAPSHOT_BLOCKS fits."""

MAX_SNAPSHOT_BLOCKS = 1 << 16
MAX_EVENTS = 1 << 14

_BEAT = b"tdm1"
_REFUSAL = b"tdr1"
_MAX_REASON_CHARS = 1000
_HEAD = struct.Struct(">4sQ")
_LENGTH = struct.Struct(">I")
_MAC_BYTES = sha256().digest_size
_PURPOSE = b"tandem registry record v1"


class Refused(Exception):
    """This is no message of our mesh, or an old one. The text is the cause, the same for all messages like it."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One verified message of one worker."""

    info: WorkerInfo
    freshness_us: int
    message: worker_pb2.RegisterRequest


class RecordSeal:
    """Seals and opens messages with the mesh key. `wall_clock` gives seconds since the epoch."""

    def __init__(self, key: MeshKey, wall_clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(key.secret.encode(), _PURPOSE, "sha256")
        self._wall_clock = wall_clock
        self._last_us = 0

    def seal(self, info: WorkerInfo, message: worker_pb2.RegisterRequest) -> bytes:
        """A worker's message."""
        parts = (wire.worker_to_proto(info), message)
        return self._frame(_BEAT, *(part.SerializeToString(deterministic=True) for part in parts))

    def open(self, sealed: bytes) -> Beat:
        """Verify, then read. Raises Refused."""
        freshness_us, parts = self._verified(_BEAT, sealed)
        record, message = worker_pb2.WorkerRecord(), worker_pb2.RegisterRequest()
        try:
            record.ParseFromString(parts[0])
            message.ParseFromString(parts[1])
            return Beat(wire.worker_from_proto(record), freshness_us, message)
        except (DecodeError, MeshError) as error:
            raise Refused("it cannot be read") from error

    def seal_refusal(self, incarnation: str, reason: str) -> bytes:
        """A router's word to one run of a worker, that it does not fit."""
        return self._frame(_REFUSAL, incarnation.encode(), reason[:_MAX_REASON_CHARS].encode())

    def open_refusal(self, incarnation: str, sealed: bytes) -> str:
        """The reason. Raises Refused if it is not for this run of the worker, or not from the mesh."""
        _, (whom, reason) = self._verified(_REFUSAL, sealed)
        if whom != incarnation.encode():
            raise Refused("it is for another run of this worker")
        return reason.decode(errors="replace")

    def _frame(self, magic: bytes, *contents: bytes) -> bytes:
        self._last_us = max(self._last_us + 1, self._now_us())
        parts = (_LENGTH.pack(len(content)) + content for content in contents)
        body = _HEAD.pack(magic, self._last_us) + b"".join(parts)
        return body + self._mac(body)

    def _verified(self, expected: bytes, sealed: bytes) -> tuple[int, tuple[bytes, bytes]]:
        """Freshness and the two parts. Raises Refused."""
        if not _HEAD.size + _MAC_BYTES < len(sealed) <= MAX_MESSAGE_BYTES:
            raise Refused("its length is wrong")
        body, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise Refused("its signature is wrong: forged, tampered with, or of a mesh with another key")
        magic, freshness_us = _HEAD.unpack_from(body)
        if magic != expected:
            raise Refused("its format is unknown")
        if abs(self._now_us() - freshness_us) > MAX_AGE_S * 1e6:
            raise Refused("it is stale: replayed, or the clocks of the machines differ")
        return freshness_us, _two_parts(body)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")

    def _now_us(self) -> int:
        return int(self._wall_clock() * 1e6)


def _two_parts(body: bytes) -> tuple[bytes, bytes]:
    try:
        (length,) = _LENGTH.unpack_from(body, _HEAD.size)
        middle = _HEAD.size + _LENGTH.size + length
        (rest,) = _LENGTH.unpack_from(body, middle)
    except struct.error as error:
        raise Refused("it cannot be read") from error
    start = middle + _LENGTH.size
    return body[_HEAD.size + _LENGTH.size : middle], body[start : start + rest]


class ReplayGuard:
    """Lets each worker's messages through once, and only forwards. Remembers no longer than messages stay fresh."""

    def __init__(self) -> None:
        self._newest_us: dict[str, int] = {}

    def is_new(self, beat: Beat) -> bool:
        """True once for each message, unless a newer one of the same worker has come before."""
        worker_id = beat.info.worker_id
        if beat.freshness_us <= self._newest_us.get(worker_id, 0):
            return False
        self._newest_us[worker_id] = beat.freshness_us
        return True

    def lag_s(self, beat: Beat) -> float:
        """How much older than the newest of its worker a message is."""
        return (self._newest_us.get(beat.info.worker_id, 0) - beat.freshness_us) / 1e6

    def forget_stale(self, now_us: int) -> None:
        """Drop what RecordSeal would refuse anyway."""
        oldest_us = now_us - int(2 * MAX_AGE_S * 1e6)
        for worker_id in [name for name, newest_us in self._newest_us.items() if newest_us < oldest_us]:
            del self._newest_us[worker_id]
