"""One rank's connection as the leader sees it: messages to the rank, its reports, and orders about its KV."""

import ipaddress
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from urllib.parse import unquote

from mesh.domain.errors import ConfigurationError, MeshError, WorkerLost
from mesh.domain.host import join_host
from mesh.domain.kv import Degrees, KVSpan, kv_spans
from mesh.domain.worker import KVEndpoint, WorkerInfo, WorkerRole
from mesh.rpc.status import named_error
from mesh.v1 import rank_pb2
from worker.settings import WorkerSettings


class RankConnection:
    """The connection to one rank, which holds the KV of `span`. Implements kvtransfer.ranks.RankPeer."""

    def __init__(self, rank: int, host: str, span: KVSpan) -> None:
        self.rank = rank
        self.host = host
        self.span = span
        self.is_admitted = False
        self.reports: dict[str, rank_pb2.JoinRequest] = {}
        self.error: MeshError | None = None
        self._messages: SimpleQueue[rank_pb2.JoinResponse | None] = SimpleQueue()
        self._kv_orders: SimpleQueue[rank_pb2.KvOrder | None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[rank_pb2.KvReport]] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        self._holds_kv = False

    def messages(self) -> Iterator[rank_pb2.JoinResponse]:
        return iter(self._messages.get, None)

    def kv_orders(self) -> Iterator[rank_pb2.KvOrder]:
        return iter(self._kv_orders.get, None)

    def claim_kv(self) -> bool:
        """True for the first call after the rank was admitted: its KV has one connection."""
        with self._lock:
            if self._holds_kv or not self.is_admitted:
                return False
            self._holds_kv = True
        return True

    def send(self, message: rank_pb2.JoinResponse) -> None:
        self._messages.put(message)

    def ask(self, order: rank_pb2.KvOrder) -> "Future[rank_pb2.KvReport]":
        answer: Future[rank_pb2.KvReport] = Future()
        answer.set_running_or_notify_cancel()  # a task that waits for it may be cancelled, not the answer
        with self._lock:
            order.number = next(self._numbers)
            if self._has_ended:
                answer.set_exception(self._lost())
                return answer
            self._answers[order.number] = answer
            self._kv_orders.put(order)
        return answer

    def tell(self, order: rank_pb2.KvOrder) -> None:
        order.number = next(self._numbers)
        self._kv_orders.put(order)

    def answer(self, report: rank_pb2.KvReport) -> None:
        with self._lock:
            answer = self._answers.pop(report.number, None)
        if answer is None:
            return
        if report.HasField("failed"):
            answer.set_exception(named_error(report.failed.error, report.failed.reason))
        else:
            answer.set_result(report)

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
        self._kv_orders.put(None)

    def _lost(self) -> MeshError:
        return self.error or WorkerLost(f"rank {self.rank} ({self.host}) is lost")


def set_up_kv(
    connections: Sequence[RankConnection], settings: WorkerSettings, info: WorkerInfo
) -> tuple[KVEndpoint, ...]:
    """Let the ranks move KV, as those of this worker. Returns where a decode worker's ranks take it, that of the leader
    without address; nothing for other workers. Raises MeshError.
    """
    takes_kv = info.role is WorkerRole.DECODE
    setup = rank_pb2.KvSetup(
        transports=settings.transports, worker_id=info.worker_id, incarnation=info.incarnation if takes_kv else ""
    )
    answers = [(connection, connection.ask(rank_pb2.KvOrder(setup=setup))) for connection in connections]
    ports = [(connection, answer.result().port) for connection, answer in answers]
    if not takes_kv or not connections:
        return ()
    layout, degrees = info.layout, Degrees(info.tensor_parallel, info.pipeline_parallel)
    own_endpoint = KVEndpoint("", kv_spans(layout.num_layers, layout.num_kv_heads, degrees)[0])
    host = "" if settings.rank_listen else settings.advertise_host or settings.host  # they listen where the worker does
    return (
        own_endpoint,
        *(KVEndpoint(join_host(host or connection.host, port), connection.span) for connection, port in ports),
    )


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
