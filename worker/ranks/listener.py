"""The leader's side of ranks that share no memory with it: a gRPC server of their own, into which they dial.

    hello ─▶ setup ─▶ checked ─▶ admitted           until all ranks have joined; who does not fit is refused
    loaded ─▶ allocate ─▶ ready ─▶ steps, copies    from then on all ranks end together

It has threads in place of an event loop: the leader's own loop stands still while a model loads, and steps are posted
by the engine's thread.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import grpc
import structlog

from engine.ranks.collectives import NoteStore
from engine.ranks.messages import BlockCopy, OnLost, StepMessage, plain_settings
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError, InvalidRequest, MeshError, Unauthenticated, WorkerBusy, WorkerLost
from mesh.domain.host import join_host
from mesh.domain.kv import Degrees, KVLayout, KVSpan, kv_spans
from mesh.domain.request import mint_id
from mesh.rpc.server import Listen
from mesh.rpc.status import details_of, status_of
from mesh.v1 import rank_pb2, rank_pb2_grpc
from worker.ranks.connection import RankConnection, host_of, own_address
from worker.ranks.local import LocalRanks
from worker.ranks.server import bind_server, versions

log = structlog.get_logger(__name__)

_STOP_GRACE_S = 2.0
_MAX_NOTE_BYTES = 64 << 10
_MAX_NOTES_PER_RANK = 16
"""Gloo writes one for each rank and group that it is in, at most three, of some 200 bytes."""
_GREETING_S = 60.0  # within which a rank must say what it is; it reads headers of its checkpoint


class RankListener(rank_pb2_grpc.RanksServicer):
    """The ranks of `degrees` but the first. Implements engine.ranks.remote.RemoteRanks.

    The constructor binds the port. `on_leaving` is called on a thread once a rank has been asked to stop, `on_progress`
    when the loading of one makes progress. `local`: the processes of ranks on this machine, which are started here once
    it listens; others start by themselves.
    """

    def __init__(
        self,
        listen: Listen,
        degrees: Degrees,
        *,
        timeout_s: float,
        on_leaving: Callable[[], None],
        on_progress: Callable[[], None] = lambda: None,
        local: LocalRanks | None = None,
    ) -> None:
        self._listen = listen
        self._degrees = degrees
        self._num_ranks = num_ranks = degrees.num_ranks
        self._local = local
        self._timeout_s = timeout_s
        self._on_leaving = on_leaving
        self._on_progress = on_progress
        self._on_lost: OnLost | None = None
        self._changed = threading.Condition()
        self._connections: dict[int, RankConnection] = {}
        self._notes: dict[str, bytes] = {}
        self._lost: MeshError | None = None
        self._is_gathered = self._is_closing = False
        self._setup = rank_pb2.RankSetup(num_ranks=num_ranks, group=mint_id())
        self._fingerprint = ""
        self._spans: tuple[KVSpan, ...] = ()
        self.store = NoteStore(self._put_note, self._get_note)
        self._server, self.port = bind_server(listen, self, max_calls=8 * degrees.num_ranks)

    def gather(self, settings: RunnerSettings, layout: KVLayout) -> str:
        plain = plain_settings(settings)
        self._setup.settings = json.dumps({name: value for name, value in plain.items() if name != "model_dir"})
        self._fingerprint = layout.model_fingerprint
        self._spans = kv_spans(layout.num_layers, layout.num_kv_heads, self._degrees)
        self._server.start()
        log.info("waiting for ranks", address=join_host(self._listen.host, self.port), ranks=self._num_ranks)
        if self._local is not None:
            self._local.start(self.port, self._end_local)
        with self._changed:
            self._changed.wait_for(lambda: self._all_are_admitted() or self._has_ended, self._timeout_s)
            if self._lost is not None:
                raise self._lost
            if not self._all_are_admitted():
                raise WorkerLost(
                    f"{self._missing()} of {self._num_ranks} not joined at {self._listen.host}:{self.port} within "
                    f"rank_timeout_s {self._timeout_s:g}: start `python -m rank_worker --leader HOST:{self.port} "
                    "--rank NUMBER` on their machines"
                )
            self._is_gathered = True
            hosts = [connection.host for connection in self._connections.values()]
        log.info("ranks joined", hosts=hosts)
        return own_address(hosts)

    def wait_loaded(self) -> list[int]:
        return [report.loaded.num_blocks for report in self._wait("loaded")]

    def allocate(self, num_blocks: int) -> None:
        self._send(rank_pb2.JoinResponse(allocate=rank_pb2.RankAllocate(num_blocks=num_blocks)))

    def wait_ready(self) -> None:
        self._wait("ready")

    def post(self, message: StepMessage | BlockCopy) -> None:
        if isinstance(message, BlockCopy):
            copy = rank_pb2.RankCopy(source=message.source, target=message.target)
            self._send(rank_pb2.JoinResponse(copy=copy))
            return
        step = rank_pb2.RankStep(
            command=message.command,
            token_ids=message.token_ids,
            positions=message.positions,
            sequences=message.sequences,
        )
        self._send(rank_pb2.JoinResponse(step=step))

    def clear_blocks(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        clear = rank_pb2.KvClear(block_ids=block_ids, first_token=first_token)
        for answer in [connection.ask(rank_pb2.KvOrder(clear=clear)) for connection in self._connections.values()]:
            answer.result()

    @property
    def connections(self) -> tuple[RankConnection, ...]:
        """The connections to the ranks, from rank 1 on, once they have joined."""
        return tuple(connection for _, connection in sorted(self._connections.items()))

    def watch(self, on_lost: OnLost) -> None:
        with self._changed:
            self._on_lost = on_lost
            loss = self._lost
        if loss is not None:
            on_lost(str(loss))

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            connections = list(self._connections.values())
            self._changed.notify_all()
        for connection in connections:
            connection.end()
        self._server.stop(_STOP_GRACE_S).wait()
        if self._local is not None:
            self._local.kill()

    def Join(
        self, request_iterator: Iterator[rank_pb2.JoinRequest], context: grpc.ServicerContext
    ) -> Iterator[rank_pb2.JoinResponse]:
        """The conversation with one rank."""
        with self._answering(context):
            impatience = threading.Timer(_GREETING_S, context.cancel)
            impatience.daemon = True
            impatience.start()
            connection = self._greet(_next(request_iterator, "hello").hello, context.peer())
            if not context.add_callback(partial(self._end, connection)):
                self._end(connection)
            try:
                yield rank_pb2.JoinResponse(setup=self._setup)
                self._admit(connection, _next(request_iterator, "checked").checked)
                impatience.cancel()
                yield rank_pb2.JoinResponse(admitted=rank_pb2.RankAdmitted(host=connection.host))
                threading.Thread(target=self._read, args=(connection, request_iterator), daemon=True).start()
                yield from connection.messages()
                if self._lost is not None:
                    raise self._lost
            finally:
                self._end(connection)

    def HoldKv(
        self, request_iterator: Iterator[rank_pb2.KvReport], context: grpc.ServicerContext
    ) -> Iterator[rank_pb2.KvOrder]:
        """The leader's orders about the KV of one rank."""
        with self._answering(context):
            try:
                first = next(request_iterator, rank_pb2.KvReport())
            except grpc.RpcError:
                raise WorkerLost("the rank has left") from None
            self._require_group(first.group)
            connection = self._connections.get(first.rank)
            if connection is None or not connection.claim_kv():
                raise InvalidRequest(f"rank {first.rank} has not joined, or holds its KV already")
            if not context.add_callback(partial(self._end, connection)):
                self._end(connection)
            threading.Thread(target=self._read_kv, args=(connection, request_iterator), daemon=True).start()
            yield from connection.kv_orders()

    def PutNote(self, request: rank_pb2.PutNoteRequest, context: grpc.ServicerContext) -> rank_pb2.PutNoteResponse:
        """Write a note for all ranks."""
        with self._answering(context):
            self._require_group(request.group)
            self._put_note(request.key, request.value)
        return rank_pb2.PutNoteResponse()

    def GetNote(self, request: rank_pb2.GetNoteRequest, context: grpc.ServicerContext) -> rank_pb2.GetNoteResponse:
        """Wait until a note is there, and return it."""
        with self._answering(context):
            self._require_group(request.group)
            return rank_pb2.GetNoteResponse(value=self._get_note(request.key))
        raise AssertionError("abort raises")

    @contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Check the caller's credential, and turn errors into statuses."""
        try:
            if self._listen.guard is not None:
                self._listen.guard.check(context.invocation_metadata())
            yield
        except MeshError as error:
            code, trailing = status_of(error)
            if isinstance(error, ConfigurationError | Unauthenticated | InvalidRequest) and error is not self._lost:
                log.warning("rank refused", host=host_of(context.peer()), reason=str(error))
            context.set_trailing_metadata(trailing)
            context.abort(code, details_of(error))

    def _greet(self, hello: rank_pb2.RankHello, peer: str) -> RankConnection:
        """Give the rank its place. Raises ConfigurationError if it does not fit, WorkerBusy if the place is taken."""
        if not 0 < hello.rank < self._num_ranks:
            raise ConfigurationError(
                f"rank {hello.rank} is out of range: this worker has {self._num_ranks} ranks ({self._degrees}), and "
                f"takes ranks 1 to {self._num_ranks - 1}"
            )
        if hello.group_size not in (0, self._num_ranks):
            raise ConfigurationError(
                f"rank {hello.rank} is one of {hello.group_size}, this worker has {self._num_ranks} ranks "
                f"({self._degrees})"
            )
        if hello.versions != versions():
            raise ConfigurationError(f"rank {hello.rank} has {hello.versions}; the leader has {versions()}")
        with self._changed:
            if (other := self._connections.get(hello.rank)) is not None:
                raise WorkerBusy(f"rank {hello.rank} is taken, by {other.host}")
            connection = self._connections[hello.rank] = RankConnection(
                hello.rank, host_of(peer), self._spans[hello.rank]
            )
        return connection

    def _admit(self, connection: RankConnection, checked: rank_pb2.RankChecked) -> None:
        if checked.model_fingerprint != self._fingerprint:
            raise ConfigurationError(
                f"rank {connection.rank} has another model: fingerprint {checked.model_fingerprint}, not the leader's "
                f"{self._fingerprint}; give it the same checkpoint"
            )
        with self._changed:
            connection.is_admitted = True
            self._changed.notify_all()
        log.info("rank joined", rank=connection.rank, host=connection.host)

    def _read(self, connection: RankConnection, requests: Iterator[rank_pb2.JoinRequest]) -> None:
        try:
            for request in requests:
                kind = request.WhichOneof("message")
                if kind == "failed":
                    connection.fail(request.failed)
                    return
                if kind == "leaving":
                    log.warning("a rank is asked to stop, draining", rank=connection.rank, host=connection.host)
                    self._on_leaving()
                elif kind == "loading":
                    self._on_progress()
                else:
                    with self._changed:
                        connection.reports[kind or ""] = request
                        self._changed.notify_all()
        except grpc.RpcError:
            pass  # the connection is broken
        finally:
            self._end(connection)

    def _read_kv(self, connection: RankConnection, reports: Iterator[rank_pb2.KvReport]) -> None:
        try:
            for report in reports:
                connection.answer(report)
        except grpc.RpcError:
            pass
        finally:
            self._end(connection)

    def _end(self, connection: RankConnection) -> None:
        """The rank's connection has ended: the rank is lost, unless it may still be replaced."""
        if self._has_ended or self._connections.get(connection.rank) is not connection:
            connection.end()
            return
        error = connection.error or self._loss(
            connection
        )  # may wait for the rank's process to end, so without the lock
        with self._changed:
            if self._has_ended or self._connections.get(connection.rank) is not connection:
                connection.end()
                return
            is_gathered = self._is_gathered
            if is_gathered:
                self._lost = error
            else:
                del self._connections[connection.rank]
            self._changed.notify_all()
            on_lost, connections = self._on_lost, list(self._connections.values())
        connection.end()
        if not is_gathered:
            if connection.is_admitted:
                log.warning("a rank has left before all have joined", rank=connection.rank, reason=str(error))
            return
        for other in connections:
            other.end()
        if on_lost is not None:
            on_lost(str(error))

    def _end_local(self, rank: int) -> None:
        """The process of a rank has ended, perhaps before it has joined."""
        assert self._local is not None
        if (connection := self._connections.get(rank)) is not None and self._is_gathered:
            self._end(connection)
            return
        with self._changed:
            if not self._has_ended:
                self._lost = self._local.loss(rank)
                self._changed.notify_all()

    def _loss(self, connection: RankConnection) -> MeshError:
        if self._local is not None:
            return self._local.loss(connection.rank)
        return WorkerLost(f"rank {connection.rank} ({connection.host}) is lost: its connection has ended")

    @property
    def _has_ended(self) -> bool:
        return self._lost is not None or self._is_closing

    def _wait(self, kind: str) -> list[rank_pb2.JoinRequest]:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._lost is not None
                    or all(kind in connection.reports for connection in self._connections.values())
                )
            )
            if self._lost is not None:
                raise self._lost
            return [connection.reports[kind] for connection in self._connections.values()]

    def _send(self, message: rank_pb2.JoinResponse) -> None:
        if self._lost is not None:
            raise self._lost
        for connection in self._connections.values():
            connection.send(message)

    def _put_note(self, key: str, value: bytes) -> None:
        """Raises InvalidRequest for a note, or a number of notes, that no rank needs."""
        num_bytes, max_notes = len(key.encode()) + len(value), _MAX_NOTES_PER_RANK * self._num_ranks
        if num_bytes > _MAX_NOTE_BYTES:
            raise InvalidRequest(f"a note of {num_bytes} bytes is over the limit of {_MAX_NOTE_BYTES}")
        with self._changed:
            if key not in self._notes and len(self._notes) >= max_notes:
                raise InvalidRequest(f"{max_notes} notes are written, and {self._num_ranks} ranks need no more")
            self._notes[key] = value
            self._changed.notify_all()

    def _get_note(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._notes or self._lost is not None or self._is_closing)
            if key not in self._notes:
                raise self._lost or WorkerLost("the worker stops")
            return self._notes[key]

    def _require_group(self, group: str) -> None:
        if group != self._setup.group:
            raise WorkerLost("the rank is of an earlier run of this worker")

    def _all_are_admitted(self) -> bool:
        connections = self._connections.values()
        return len(connections) == self._num_ranks - 1 and all(connection.is_admitted for connection in connections)

    def _missing(self) -> str:
        joined = {connection.rank for connection in self._connections.values() if connection.is_admitted}
        absent = [rank for rank in range(1, self._num_ranks) if rank not in joined]
        return f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"


def _next(requests: Iterator[rank_pb2.JoinRequest], kind: str) -> rank_pb2.JoinRequest:
    try:
        request = next(requests, None)
    except grpc.RpcError:
        raise WorkerLost("the rank has left") from None
    if request is None or request.WhichOneof("message") != kind:
        raise InvalidRequest(f"a rank must send {kind} now")
    return request
