"""Starts the ranks of a worker as processes, and loads a model into all of them.

The worker's process is rank 0, the leader. The others have a socket to it, over which it sends commands of a few bytes,
and two files without names: the memory of steps (`shared.py`) and that of KV. If one rank ends, all end: the others'
work is useless without it, and the router replays the worker's sequences elsewhere.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import structlog
import torch

from checkpoint.model_files import RopeOverride
from engine.kv_memory import KVReservation
from engine.load import RunnerSettings, kv_layout, load_model_runner, reserve_blocks, resolve, weights_bytes, why_eager
from engine.model_runner import ModelRunner
from engine.models.facts import ModelConfig
from engine.ranks.rank import Rank, execute, kv_bytes, map_kv
from engine.ranks.share import rank_share
from engine.ranks.shared import Command, SharedGroup, StepMemory, decode_command, encode_command
from engine.weights import Progress
from mesh.domain.errors import ConfigurationError, WorkerLost

log = structlog.get_logger(__name__)

_MAX_MESSAGE_BYTES = 1 << 16


OnLost = Callable[[str], None]
"""Called on a thread with what has happened to a rank. It should end the process."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank is told at its start. `cores`: those it runs on."""

    rank: int
    size: int
    settings: RunnerSettings
    max_blocks: int
    num_threads: int
    cores: tuple[int, ...]
    memory_fd: int
    kv_fd: int
    log_level: str = "info"

    def send(self, rank: socket.socket) -> None:
        settings = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)}
        settings |= {"model_dir": str(self.settings.model_dir), "rope": asdict(self.settings.rope), "kv_memory": None}
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        _send(rank, **own | {"settings": settings})

    @classmethod
    def receive(cls, leader: socket.socket) -> "RankSetup":
        """Raises OSError if the leader has ended."""
        message = _receive(leader)
        settings = message.pop("settings")
        del settings["kv_memory"]
        model_dir, rope = Path(settings.pop("model_dir")), RopeOverride(**settings.pop("rope"))
        cores = tuple(message.pop("cores"))
        return cls(settings=RunnerSettings(model_dir, rope=rope, **settings), cores=cores, **message)

    @staticmethod
    def send_failure(leader: socket.socket, reason: str) -> None:
        with suppress(OSError):
            _send(leader, failed=reason)


def serve_rank(setup: RankSetup, leader: socket.socket) -> None:
    """Load the rank's share, then execute commands until the leader is gone. Raises ConfigurationError, and OSError if
    the leader ends before the rank is ready.
    """
    os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.num_threads)
    settings, config = resolve(setup.settings)
    assert isinstance(config, ModelConfig), "the leader has checked it"
    memory = StepMemory(config, max_rows=settings.max_batch_tokens, max_blocks=setup.max_blocks, fd=setup.memory_fd)
    group = SharedGroup(setup.rank, setup.size, memory)
    rank = Rank(settings, config, group)
    _send(leader, loaded=True)
    allocated = _receive(leader)
    num_blocks = allocated["num_blocks"]
    caches = rank.caches(num_blocks, map_kv(setup.kv_fd, allocated["kv_bytes"]))
    decoder = rank.build(caches[setup.rank])
    _send(leader, ready=True)
    while message := leader.recv(_MAX_MESSAGE_BYTES):
        execute(decoder, group, decode_command(message))


def fitting_ranks(settings: RunnerSettings) -> int:
    """The most ranks, up to `settings.tensor_parallel`, among which the model can be divided here; 1 for a model or
    device that has no ranks. Raises ConfigurationError.
    """
    size = settings.tensor_parallel
    if size == 1:
        return 1
    settings, config = resolve(settings)
    if not isinstance(config, ModelConfig):
        return 1
    if why_eager(settings, config, kv_layout(config, settings)) is not None:
        return 1
    return min(size, config.num_kv_heads)


def load_ranked_runner(
    settings: RunnerSettings, on_progress: Progress | None = None, *, on_lost: OnLost, log_level: str = "info"
) -> ModelRunner:
    """As `load_model_runner`, over `settings.tensor_parallel` ranks. Must be called on a thread that lives as long as
    the process, because the system ends the ranks with it. Raises ConfigurationError.
    """
    size = settings.tensor_parallel
    if size == 1:
        return load_model_runner(settings, on_progress)
    settings, config = resolve(settings)
    config = _require_divisible(settings, config, size)
    layout = kv_layout(config, settings)
    reservation = KVReservation.enter(torch.device("cpu"), settings.kv_memory, weights_bytes(settings, config))
    max_blocks = config.max_model_len // settings.block_size + 2
    processes = RankProcesses(settings, max_blocks, log_level)
    try:
        memory = StepMemory(config, max_rows=settings.max_batch_tokens, max_blocks=max_blocks, fd=processes.memory_fd)
        leader = Rank(settings, config, SharedGroup(0, size, memory, processes.post), on_progress)
        processes.wait("loaded")
        with reserve_blocks(layout, settings, reservation) as num_blocks:
            num_bytes = kv_bytes(layout.block_bytes, num_blocks, size)
            os.ftruncate(processes.kv_fd, num_bytes)
            caches = leader.caches(num_blocks, map_kv(processes.kv_fd, num_bytes))
        processes.tell(num_blocks=num_blocks, kv_bytes=num_bytes)
        processes.wait("ready")
        runner = leader.lead(settings, caches, reservation)
    except BaseException:
        processes.kill()
        raise
    processes.watch(on_lost)
    return runner


def _require_divisible(settings: RunnerSettings, config: object, size: int) -> ModelConfig:
    if not isinstance(config, ModelConfig):
        raise ConfigurationError(f"tensor_parallel {size} does not fit an encoder-decoder model: use 1")
    rank_share(config, 0, size)
    if (reason := why_eager(settings, config, kv_layout(config, settings))) is not None:
        raise ConfigurationError(f"tensor_parallel {size} needs the compiled decoder, which cannot run here: {reason}")
    return config


class RankProcesses:
    """The processes of ranks 1 and up, seen by rank 0. The constructor starts them and divides the process's cores."""

    def __init__(self, settings: RunnerSettings, max_blocks: int, log_level: str) -> None:
        size = settings.tensor_parallel
        cores, num_threads = _divide_cores(size), max(1, torch.get_num_threads() // size)
        self.memory_fd = os.memfd_create("tandem-steps")
        self.kv_fd = os.memfd_create("tandem-kv")
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._processes.append(self._start(theirs))
            self._sockets.append(ours)
            setup = RankSetup(
                rank, size, settings, max_blocks, num_threads, cores[rank], self.memory_fd, self.kv_fd, log_level
            )
            setup.send(ours)
        os.sched_setaffinity(0, cores[0])
        torch.set_num_threads(num_threads)
        log.info("ranks started", pids=[process.pid for process in self._processes], threads_per_rank=num_threads)

    def _start(self, leader: socket.socket) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "rank_worker"]
        command += ["--socket-fd", str(leader.fileno()), "--parent", str(os.getpid())]
        fds = (leader.fileno(), self.memory_fd, self.kv_fd)
        # Settings come over the socket, and keys, which the environment may hold, are not for ranks.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        # Announcements to the supervisor are the leader's: a rank prints to stderr.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds, env=environ)

    def wait(self, event: str) -> None:
        """Return when every rank has reported `event`. Raises ConfigurationError if one has failed instead."""
        for rank, channel in enumerate(self._sockets, 1):
            try:
                message = _receive(channel)
            except OSError:
                raise ConfigurationError(f"rank {rank} {self._ending(rank)}; its log has the details") from None
            if "failed" in message:
                raise ConfigurationError(f"rank {rank}: {message['failed']}")
            if event not in message:
                raise ConfigurationError(f"rank {rank} reported {sorted(message)}, not {event}")

    def tell(self, **message: Any) -> None:
        for channel in self._sockets:
            _send(channel, **message)

    def post(self, command: Command) -> None:
        """Send a command to all ranks. Raises WorkerLost if one has ended."""
        message = encode_command(command)
        for rank, channel in enumerate(self._sockets, 1):
            try:
                channel.send(message)
            except OSError:
                raise WorkerLost(f"rank {rank} {self._ending(rank)}") from None

    def watch(self, on_lost: OnLost) -> None:
        """From now on call `on_lost` as soon as a rank ends."""
        threading.Thread(target=self._watch, args=(on_lost,), name="rank-watch", daemon=True).start()

    def kill(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _watch(self, on_lost: OnLost) -> None:
        poll = select.poll()
        for channel in self._sockets:
            poll.register(channel, select.POLLIN)
        fd, _ = poll.poll()[0]
        rank = next(rank for rank, channel in enumerate(self._sockets, 1) if channel.fileno() == fd)
        message = self._sockets[rank - 1].recv(_MAX_MESSAGE_BYTES)
        reason = json.loads(message)["failed"] if message else self._ending(rank)
        self.kill()
        on_lost(f"rank {rank} {reason}")

    def _ending(self, rank: int) -> str:
        """How a rank's process has ended."""
        status = self._processes[rank - 1].wait()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _divide_cores(size: int) -> list[tuple[int, ...]]:
    """The cores of each rank. With fewer cores than ranks, all ranks have all of them."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < size:
        log.warning("ranks share cores and will wait for each other", ranks=size, cores=len(cores))
        return [tuple(cores)] * size
    return [tuple(cores[len(cores) * rank // size : len(cores) * (rank + 1) // size]) for rank in range(size)]


def _send(channel: socket.socket, **message: Any) -> None:
    channel.send(json.dumps(message).encode())


def _receive(channel: socket.socket) -> dict[str, Any]:
    """Raises OSError if the other side has ended."""
    message = channel.recv(_MAX_MESSAGE_BYTES)
    if not message:
        raise ConnectionResetError("the other side has closed the socket")
    decoded: dict[str, Any] = json.loads(message)
    return decoded
