"""Starts the ranks of a worker as processes, and loads a model into all of them.

The worker's process is rank 0, the leader. The others have a socket to it, over which it sends commands of a few bytes,
and three files without names: the memory of steps (`shared.py`), that of KV, and the store through which the eager
decoder's ranks meet (`collectives.py`). The first rank of a later stage also has the leader's end of the sockets of the
stage after it, and a socket for its reports to the leader. If one rank ends, all end: the others' work is useless
without it, and the router replays the worker's sequences elsewhere.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import structlog

from engine.compiled_code import reported_code
from engine.kv.sharded_cache import ShardedKVCache
from engine.loading.load_phases import load_phase
from engine.loading.load_runner import load_model_runner
from engine.loading.memory_needs import enter_ledger, kv_blocks
from engine.loading.resolve import kv_layout, resolve, why_eager
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.models.encodings import CUT_BY_INPUTS
from engine.models.model_config import ModelConfig
from engine.models.share import ALONE, rank_share, require_own_heads
from engine.ranks.collectives import shared_store
from engine.ranks.commands import Command, Report, decode_report, encode_command
from engine.ranks.divided_cores import DividedCores
from engine.ranks.messages import MAX_MESSAGE_BYTES, OnLost, RankSetup, ending, receive_message
from engine.ranks.rank import Rank, kv_bytes, map_kv
from engine.ranks.shared import SharedGroup, max_sequence_blocks, step_memory
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError, MeshError, WorkerLost
from mesh.domain.kv import Degrees

log = structlog.get_logger(__name__)

_EXIT_WAIT_S = 5.0  # between the end of a rank's socket and that of its process


def load_ranked_runner(
    settings: RunnerSettings,
    on_progress: Progress | None = None,
    *,
    on_lost: OnLost,
    log_level: str = "info",
    log_json: bool = True,
) -> ModelRunner:
    """As `load_model_runner`, over the ranks of `settings.degrees`, which the runner's `close` ends.

    Linux kills a rank when the thread that started it ends, so call it on a thread that outlives the runner. Raises
    ConfigurationError, and WorkerLost if a rank ends.
    """
    degrees = settings.degrees
    if degrees == ALONE:
        return load_model_runner(settings, on_progress)
    settings, config = resolve(settings)
    config = _require_divisible(settings, config)
    layout = kv_layout(config, settings)
    memory_share = enter_ledger(settings, config)
    max_blocks = max_sequence_blocks(settings, config)
    processes = RankProcesses(settings, max_blocks, log_level, log_json)
    try:
        memory_share.add_ranks(processes.pids, processes.kv_fd)
        memory = step_memory(settings, config, max_blocks, layout.groups.count, processes.memory_fd)
        group = SharedGroup(0, degrees, memory, processes.post, next_report=processes.next_report)
        leader = Rank(settings, config, group, shared_store(processes.store_fd), on_progress)
        with load_phase("ranks"):
            processes.wait("loaded")
        with load_phase("kv"), kv_blocks(layout, settings, memory_share) as num_blocks:
            num_bytes = kv_bytes(layout.block_bytes, num_blocks, degrees.num_ranks)
            os.ftruncate(processes.kv_fd, num_bytes)
            caches = leader.caches(num_blocks, map_kv(processes.kv_fd, num_bytes))
        processes.tell(num_blocks=num_blocks, kv_bytes=num_bytes)
        with load_phase("ranks"):
            _connect(leader, processes)
        processes.watch(on_lost)  # before the first step: this thread cannot leave a step that lacks a rank
        with load_phase("build"), reported_code(settings, config, layout):
            runner = leader.lead(caches[0], ShardedKVCache(caches[0], caches[1:], memory_share))
    except BaseException:
        processes.close()
        raise
    runner.on_close = processes.close
    runner.rank_pids = processes.pids
    return runner


def _connect(leader: Rank, processes: "RankProcesses") -> None:
    """Connect the ranks, and return when all are ready. Raises WorkerLost if one has ended, for which gloo alone would
    wait for minutes.
    """
    failures: list[Exception] = []
    is_over = threading.Event()

    def connect() -> None:
        try:
            leader.connect()
        except Exception as error:
            if is_over.wait(_EXIT_WAIT_S):  # another rank has ended, and `wait` raises its error
                return
            failures.append(error)
            processes.kill()  # they would wait for the leader

    connecting = threading.Thread(target=connect, name="rank-connect", daemon=True)
    connecting.start()
    try:
        processes.wait("ready")
    except BaseException:
        is_over.set()
        processes.leave_store_open()  # the thread reads it until gloo gives up
        if failures:
            raise WorkerLost(f"the ranks cannot be connected: {failures[0]}") from failures[0]
        raise
    connecting.join()
    if failures:
        raise WorkerLost(f"the ranks cannot be connected: {failures[0]}")


def _require_divisible(settings: RunnerSettings, config: object) -> ModelConfig:
    tensor = settings.tensor_parallel
    degree = f"tensor_parallel {tensor}" if tensor > 1 else f"pipeline_parallel {settings.pipeline_parallel}"
    if settings.device != "cpu":
        raise ConfigurationError(
            f"{degree} on {settings.device} does not fit rank_memory shared: GPUs have memory of their own; use auto"
        )
    if not isinstance(config, ModelConfig):
        raise ConfigurationError(
            f"{degree} does not fit an encoder-decoder model: ranks cannot divide its encoder yet; use 1"
        )
    require_own_heads(config, settings.degrees)
    rank_share(config, 0, settings.degrees)
    reason = why_eager(settings, config, kv_layout(config, settings))
    if reason is not None and tensor > 1:
        if settings.encoding not in CUT_BY_INPUTS:
            raise ConfigurationError(
                f"tensor_parallel {tensor} in {settings.encoding} needs the compiled decoder, "
                f"which cannot run here ({reason}): use 1"
            )
        log.warning("decoder not compiled; its ranks sum by gloo, which is slow on CPU", ranks=tensor, reason=reason)
    return config


class RankProcesses:
    """The processes of ranks 1 and up, seen by rank 0. The constructor starts them and divides the process's cores.
    Raises WorkerLost if the system cannot start them.
    """

    def __init__(self, settings: RunnerSettings, max_blocks: int, log_level: str, log_json: bool = True) -> None:
        self._degrees = settings.degrees
        self._cores = DividedCores(self._degrees.num_ranks)
        self.memory_fd = os.memfd_create("tandem-steps")
        self.kv_fd = os.memfd_create("tandem-kv")
        self.store_fd = os.memfd_create("tandem-store")
        self._fds = [self.memory_fd, self.kv_fd, self.store_fd]
        self._sockets: list[socket.socket] = []  # of ranks 1 and up
        self._reports: list[socket.socket] = []  # one, of all later stages
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watcher: threading.Thread | None = None
        self._is_closing = False
        try:
            fds = (self.memory_fd, self.kv_fd, self.store_fd)
            cores = self._cores
            leader = RankSetup(0, settings, max_blocks, cores.threads_per_rank, cores.of_rank[0], *fds, report_fd=-1)
            self._start_all(replace(leader, log_level=log_level, log_json=log_json))
        except ConfigurationError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise WorkerLost(f"rank {len(self._processes) + 1} cannot be started: {error}") from error
        self._cores.take_own()
        log.info("ranks started", pids=self.pids, threads_per_rank=self._cores.threads_per_rank)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(process.pid for process in self._processes)

    def _start_all(self, leader: RankSetup) -> None:
        """Start the other ranks with what the leader has."""
        with ExitStack() as stack:
            report = self._pair(self._reports, stack)
            theirs = [self._pair(self._sockets, stack) for _ in range(1, self._degrees.num_ranks)]
            for rank, channel in enumerate(theirs, 1):
                following = (self._sockets[next_rank - 1].fileno() for next_rank in _next_ranks(rank, self._degrees))
                setup = replace(
                    leader,
                    rank=rank,
                    cores=self._cores.of_rank[rank],
                    report_fd=report.fileno(),
                    next_fds=tuple(following),
                )
                setup.send(self._sockets[rank - 1])  # before the process starts: it cannot have closed the socket yet
                self._start(channel.fileno(), (channel.fileno(), *setup.fds))

    @staticmethod
    def _pair(ours: list[socket.socket], stack: ExitStack) -> socket.socket:
        """A pair of sockets; appends our end to a list, and returns the other end, which the stack will close."""
        end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.append(end)
        return stack.enter_context(other)

    def _start(self, socket_fd: int, fds: tuple[int, ...]) -> None:
        command = [sys.executable, "-m", "rank_worker", "--socket-fd", str(socket_fd), "--parent", str(os.getpid())]
        # Settings come over the socket, and keys, which the environment may hold, are not for ranks.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        # Announcements to the supervisor are the leader's: a rank prints to stderr.
        self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds, env=environ))

    def wait(self, event: str) -> None:
        """Return when every rank has reported `event`. Raises ConfigurationError if one cannot load its share, and
        WorkerLost if one has ended.
        """
        waiting = list(self._sockets)
        while waiting:
            for channel in connection.wait(waiting):
                assert isinstance(channel, socket.socket)
                rank = self._sockets.index(channel) + 1
                message = self._receive(rank)
                if event not in message:
                    raise WorkerLost(f"rank {rank} reported {sorted(message)}, not {event}")
                if "phases" in message:
                    log.info("rank loaded", rank=rank, phases=message["phases"])
                waiting.remove(channel)

    def tell(self, **message: Any) -> None:
        """Send a message to all ranks. Raises WorkerLost if one has ended."""
        self._send(range(1, self._degrees.num_ranks), json.dumps(message).encode())

    def post(self, stage: int, command: Command) -> None:
        """Send a command to the ranks of a stage, without rank 0. Raises WorkerLost if one has ended."""
        first = stage * self._degrees.tensor
        self._send(range(max(1, first), first + self._degrees.tensor), encode_command(command))

    def next_report(self) -> Report:
        """Wait for the next report of the later stages. Raises WorkerLost if they have ended."""
        if message := self._reports[0].recv(MAX_MESSAGE_BYTES):
            return decode_report(message)
        if self._watcher is not None:
            self._watcher.join(_EXIT_WAIT_S)  # it knows which rank has ended, and tells `on_lost` first
        raise WorkerLost("the ranks of later stages have ended")

    def watch(self, on_lost: OnLost) -> None:
        """From now on call `on_lost` as soon as a rank ends."""
        self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="rank-watch", daemon=True)
        self._watcher.start()

    def leave_store_open(self) -> None:
        """Let `close` leave the store open: a file descriptor that is used again would be another file."""
        self._fds.remove(self.store_fd)

    def close(self) -> None:
        """End all ranks, and give the process its cores and threads back. For the thread that has started them."""
        self._is_closing = True
        self.kill()
        if self._watcher is not None:
            self._watcher.join()
        for channel in (*self._sockets, *self._reports):
            channel.close()
        for fd in self._fds:
            os.close(fd)
        self._cores.take_all()

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _send(self, ranks: Iterable[int], message: bytes) -> None:
        for rank in ranks:
            try:
                self._sockets[rank - 1].send(message)
            except OSError:
                raise WorkerLost(f"rank {rank} {self._ending(rank)}") from None

    def _receive(self, rank: int) -> dict[str, Any]:
        """The rank's next message. Raises ConfigurationError if it cannot load its share, WorkerLost if it is gone."""
        try:
            message = receive_message(self._sockets[rank - 1])
        except OSError:
            raise WorkerLost(f"rank {rank} {self._ending(rank)}") from None
        if "refused" in message:
            raise ConfigurationError(f"rank {rank}: {message['refused']}")
        if "failed" in message:
            raise WorkerLost(f"rank {rank}: {message['failed']}")
        return message

    def _watch(self, on_lost: OnLost) -> None:
        channel = connection.wait(self._sockets)[0]
        if self._is_closing:
            return
        assert isinstance(channel, socket.socket)
        rank = self._sockets.index(channel) + 1
        try:
            reason = f"rank {rank} sent a message that nobody expects: {sorted(self._receive(rank))}"
        except (MeshError, ValueError) as error:
            reason = str(error)
        self.kill()
        on_lost(reason)

    def _ending(self, rank: int) -> str:
        """How a rank's process has ended."""
        try:
            status = self._processes[rank - 1].wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        return ending(status)


def _next_ranks(rank: int, degrees: Degrees) -> range:
    """The ranks to which a rank sends a step when its stage has computed its layers."""
    first = rank + degrees.tensor
    return range(first, min(first + degrees.tensor, degrees.num_ranks)) if rank % degrees.tensor == 0 else range(0)
