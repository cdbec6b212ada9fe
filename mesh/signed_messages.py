"""Signed messages of workers, and routers' refusals of them, for the Redis registry (mesh/redis_connection.py).

Messages have a timestamp, which keeps the mesh safe even if others can write to the Redis server:

    b"tdm1" | freshness, u64 | length, u32 | record | length, u32 | message | number, u64 | HMAC-SHA256 of all before it

`record` is the worker's WorkerRecord (id, incarnation, address and more), `message` is a RegisterRequest; both are
protobuf. The MAC covers the bytes as sent, so it does not depend on protobuf's serialization. `freshness` is the
sender's wall clock in microseconds, which may be set back. `number` orders the messages of one run of a worker; older
versions send none, and their messages are ordered by freshness. A router refuses a worker with a message of the same
frame: magic b"tdr1", and the worker's incarnation and the reason as the two parts. A router tells the others how to
share out requests among revisions with b"tdt1", an empty part and JSON.
"""

import hmac
import math
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

from google.protobuf.message import DecodeError

from mesh import wire
from mesh.domain.errors import MeshError
from mesh.domain.worker import WorkerInfo
from mesh.rpc.credentials import MeshKey
from mesh.v1 import worker_pb2

MAX_AGE_S = 15.0
"""Maximum difference between a message's timestamp and the local clock. Larger differences are refused, so the clocks
of all machines must agree this well."""

MAX_MESSAGE_BYTES = 4 << 20
"""Longer messages are refused unread. The longest message of a worker (worker/registration.py) fits."""

_MESSAGE = b"tdm1"
_REFUSAL = b"tdr1"
_TRAFFIC = b"tdt1"
_MAX_REASON_CHARS = 1000
_HEAD = struct.Struct(">4sQ")
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_MAC_BYTES = sha256().digest_size
_PURPOSE = b"tandem registry record v1"
_MAX_FORMER_RUNS = 8
_MAX_RECORDS = 1 << 14
_REMEMBERED_S = 300.0


class Refused(Exception):
    """The message is stale, or not from this mesh. The text names the cause and does not vary between messages."""


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """One verified message of one worker."""

    info: WorkerInfo
    freshness_us: int
    number: int
    message: worker_pb2.RegisterRequest


class MessageSigner:
    """Signs and verifies messages with the mesh key. `wall_clock` returns seconds since the epoch."""

    def __init__(self, key: MeshKey, wall_clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(key.secret.encode(), _PURPOSE, "sha256")
        self._wall_clock = wall_clock
        self._number = self._now_us()

    def sign(self, info: WorkerInfo, message: worker_pb2.RegisterRequest) -> bytes:
        """Sign one message of the worker `info`."""
        parts = (wire.worker_to_proto(info), message)
        return self._frame(_MESSAGE, *(part.SerializeToString(deterministic=True) for part in parts))

    def verify(self, signed: bytes) -> WorkerMessage:
        """Verify a worker's message, then parse it. Raises Refused."""
        freshness_us, number, parts = self._verified(_MESSAGE, signed)
        message = worker_pb2.RegisterRequest()
        try:
            message.ParseFromString(parts[1])
            return WorkerMessage(_read_record(parts[0]), freshness_us, number, message)
        except (DecodeError, MeshError) as error:
            raise Refused("it cannot be read") from error

    def sign_refusal(self, incarnation: str, reason: str) -> bytes:
        """Sign a router's refusal of one run of a worker."""
        return self._frame(_REFUSAL, incarnation.encode(), reason[:_MAX_REASON_CHARS].encode())

    def verify_refusal(self, incarnation: str, signed: bytes) -> str:
        """Return the reason of a refusal. Raises Refused if it is for another run, or not from this mesh."""
        _, _, (receiver, reason) = self._verified(_REFUSAL, signed)
        if receiver != incarnation.encode():
            raise Refused("it is for another run of this worker")
        return reason.decode(errors="replace")

    def sign_traffic(self, text: str) -> bytes:
        """Sign how routers share out requests among revisions. It never gets stale: it holds until the next one."""
        return self._frame(_TRAFFIC, b"", text.encode())

    def verify_traffic(self, signed: bytes) -> str:
        """Return what `sign_traffic` has signed. Raises Refused."""
        _, _, (_, text) = self._verified(_TRAFFIC, signed, max_age_s=math.inf)
        return text.decode()

    def _frame(self, magic: bytes, *contents: bytes) -> bytes:
        self._number += 1
        parts = (_LENGTH.pack(len(content)) + content for content in contents)
        body = _HEAD.pack(magic, self._now_us()) + b"".join(parts) + _NUMBER.pack(self._number)
        return body + self._mac(body)

    def _verified(
        self, expected: bytes, signed: bytes, *, max_age_s: float = MAX_AGE_S
    ) -> tuple[int, int, tuple[bytes, bytes]]:
        """Return freshness, number and the two parts. Raises Refused."""
        if not _HEAD.size + _MAC_BYTES < len(signed) <= MAX_MESSAGE_BYTES:
            raise Refused("its length is wrong")
        body, mac = signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise Refused("its signature is wrong: forged, tampered with, or of a mesh with another key")
        magic, freshness_us = _HEAD.unpack_from(body)
        if magic != expected:
            raise Refused("its format is unknown")
        if abs(self._now_us() - freshness_us) > max_age_s * 1e6:
            raise Refused("it is stale: replayed, or the clocks of the machines differ")
        parts, trailer = _two_parts(body)
        number = _NUMBER.unpack(trailer)[0] if len(trailer) == _NUMBER.size else freshness_us
        return freshness_us, number, parts

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")

    def _now_us(self) -> int:
        return int(self._wall_clock() * 1e6)


def signature_of(signed: bytes) -> bytes:
    """Return the MAC at the end of a message, unverified: messages that have been verified differ if it does."""
    return signed[-_MAC_BYTES:]


@lru_cache(maxsize=_MAX_RECORDS)
def _read_record(content: bytes) -> WorkerInfo:
    """Parse a record, which is the same in all messages of one run. Raises DecodeError or MeshError."""
    record = worker_pb2.WorkerRecord()
    record.ParseFromString(content)
    return wire.worker_from_proto(record)


def _two_parts(body: bytes) -> tuple[tuple[bytes, bytes], bytes]:
    """Return the two parts and the bytes that follow them. Raises Refused."""
    try:
        (first_length,) = _LENGTH.unpack_from(body, _HEAD.size)
        first_end = _HEAD.size + _LENGTH.size + first_length
        (second_length,) = _LENGTH.unpack_from(body, first_end)
    except struct.error as error:
        raise Refused("it cannot be read") from error
    start = first_end + _LENGTH.size
    second_end = start + second_length
    return (body[_HEAD.size + _LENGTH.size : first_end], body[start:second_end]), body[second_end:]


@dataclass(slots=True)
class _Run:
    """The newest message of a worker's newest run, its time of arrival, and the worker's former runs."""

    incarnation: str
    number: int = 0
    freshness_us: int = 0
    heard_s: float = 0.0
    former: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_FORMER_RUNS))


class FreshnessGuard:
    """Rejects replayed and reordered messages: numbers must increase within a run, and a former run never returns.
    `wall_clock` is the clock of MessageSigner, which may be set back; `clock` returns monotonic seconds.
    """

    def __init__(
        self, wall_clock: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._runs: dict[str, _Run] = {}

    def is_new(self, message: WorkerMessage) -> bool:
        """Record the message. Return False if it, or a newer message of the same worker, was recorded before."""
        worker_id, incarnation = message.info.worker_id, message.info.incarnation
        run = self._runs.setdefault(worker_id, _Run(incarnation))
        if run.incarnation != incarnation:
            if not self._is_next_run(run, message):
                return False
            run.former.append(run.incarnation)
            run.incarnation, run.number = incarnation, 0
        if message.number <= run.number:
            return False
        run.number, run.freshness_us, run.heard_s = message.number, message.freshness_us, self._clock()
        return True

    def _is_next_run(self, run: _Run, message: WorkerMessage) -> bool:
        """A run that starts after the clock was set back looks older than its predecessor. It is accepted once the
        predecessor's messages would be refused as stale."""
        if message.info.incarnation in run.former:
            return False
        is_stale = abs(self._wall_clock() * 1e6 - run.freshness_us) > MAX_AGE_S * 1e6
        return is_stale or message.freshness_us > run.freshness_us

    def lag_s(self, message: WorkerMessage) -> float:
        """Return by how much the message is older than the newest one of the same worker."""
        run = self._runs.get(message.info.worker_id)
        return 0.0 if run is None else (run.freshness_us - message.freshness_us) / 1e6

    def forget_silent(self) -> None:
        """Drop workers that have sent nothing for _REMEMBERED_S."""
        oldest_s = self._clock() - _REMEMBERED_S
        for worker_id in [name for name, run in self._runs.items() if run.heard_s < oldest_s]:
            del self._runs[worker_id]
