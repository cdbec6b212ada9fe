"""One rank's connection as the leader sees it: messages to the rank, its reports, and requests about its KV."""

import ipaddress
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from urllib.parse import unquote

from engine.ranks.remote_messages import KVCall
from mesh import wire
from mesh.domain.errors import ConfigurationError, MeshError, WorkerLost
from mesh.v1 import rank_pb2

_ACTION = {
    "read": rank_pb2.HoldKvResponse.ACTION_READ,
    "write": rank_pb2.HoldKvResponse.ACTION_WRITE,
    "clear": rank_pb2.HoldKvResponse.ACTION_CLEAR,
}


class RankLink:
    """The connection to one rank."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank = rank
        self.host = host
        self.is_admitted = False
        self.reports: dict[str, rank_pb2.JoinRequest] = {}
        self.error: MeshError | None = None
        self._messages: SimpleQueue[rank_pb2.JoinResponse | None] = SimpleQueue()
        self._kv_requests: SimpleQueue[rank_pb2.HoldKvResponse | None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        self._holds_kv = False

    def messages(self) -> Iterator[rank_pb2.JoinResponse]:
        return iter(self._messages.get, None)

    def kv_requests(self) -> Iterator[rank_pb2.HoldKvResponse]:
        return iter(self._kv_requests.get, None)

    def claim_kv(self) -> bool:
        """True for the first call after the rank was admitted: its KV has one connection."""
        with self._lock:
            if self._holds_kv or not self.is_admitted:
                return False
            self._holds_kv = True
        return True

    def send(self, message: rank_pb2.JoinResponse) -> None:
        self._messages.put(message)

    def ask(self, call: KVCall) -> "Future[bytes]":
        answer: Future[bytes] = Future()
        with self._lock:
            if self._has_ended:
                raise self._lost()
            number = next(self._numbers)
            self._answers[number] = answer
        self._kv_requests.put(
            rank_pb2.HoldKvResponse(
                number=number,
                action=_ACTION[call.action],
                block_ids=call.block_ids,
                span=wire.span_to_proto(call.span),
                payload=call.payload,
            )
        )
        return answer

    def answer(self, request: rank_pb2.HoldKvRequest) -> None:
        with self._lock:
            answer = self._answers.pop(request.number, None)
        if answer is not None:
            answer.set_result(request.payload)

    def fail(self, failed: rank_pb2.RankFailed) -> None:
        cls = ConfigurationError if failed.is_configuration else WorkerLost
        self.error = cls(f"rank {self.rank} ({self.host}): {failed.reason}")

    def end(self) -> None:
        """End both calls, and everything that waits for an answer. May be called again."""
        with self._lock:
            self._has_ended = True
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(self._lost())
        self._messages.put(None)
        self._kv_requests.put(None)

    def _lost(self) -> MeshError:
        return self.error or WorkerLost(f"rank {self.rank} ({self.host}) is lost")


def own_address(hosts: list[str]) -> str:
    """The address of this machine from which all of `hosts` are reached. Raises ConfigurationError if only some ranks
    dial in over loopback, because the others could not reach them there.
    """
    addresses = [ipaddress.ip_address(host) for host in hosts]
    is_local = {address.is_loopback for address in addresses}
    if len(is_local) > 1:
        raise ConfigurationError(
            f"ranks dial in from {', '.join(hosts)}: those on the leader's machine must dial the address that the "
            "others dial, not loopback"
        )
    with socket.socket(socket.AF_INET6 if addresses[0].version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((hosts[0], 9))  # sends nothing
        return str(probe.getsockname()[0])


def host_of(peer: str) -> str:
    """The address in gRPC's name of a peer, such as ipv4:10.0.0.2:41234 or ipv6:%5B::1%5D:41234."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
