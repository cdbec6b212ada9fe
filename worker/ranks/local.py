"""Ranks of one machine that have memory of their own, as on GPUs: processes that the leader starts and ends.

They dial the leader over loopback, as ranks on other machines do (listener.py), with a key made for this start. A
process never outlives the leader: its connection ends, and Linux kills it when the thread that started it ends.
"""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from engine.ranks.divided_cores import DividedCores
from engine.ranks.messages import ending
from engine.settings import KVMemorySettings
from mesh.domain.errors import ConfigurationError, MeshError, WorkerLost
from mesh.domain.host import format_cores
from mesh.logs import log_format
from mesh.process import handing_over
from mesh.rpc.credentials import MeshKey
from mesh.rpc.server import Listen
from mesh.settings import as_flags, env_name
from worker.settings import WorkerSettings

log = structlog.get_logger(__name__)

_EXIT_WAIT_S = 1.0  # between the end of a rank's connection and that of its process
_REFUSED = 2  # the status of a process whose settings are wrong
_TAKEN_OVER = ("mesh_tls_cert", "mesh_tls_key", "mesh_tls_ca", "mesh_tls_name", "trust_fabric", "stuck_exit_s")


class LocalRanks:
    """The processes of ranks 1 and up. `devices` has the device of each rank, the leader's first."""

    def __init__(
        self, settings: WorkerSettings, model_dir: Path, memory: KVMemorySettings, devices: Sequence[str]
    ) -> None:
        self._settings = settings
        self._model_dir = model_dir
        self._memory = memory
        self._devices = devices
        self._key = secrets.token_hex(32)
        self._cores = DividedCores(len(devices))
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def listen(self) -> Listen:
        """Where the leader listens for them."""
        return Listen("127.0.0.1", 0, MeshKey(self._key))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(process.pid for process in self._processes)

    def start(self, port: int, on_end: Callable[[int], None]) -> None:
        """Start all, and divide the process's cores. They dial `port`. Calls `on_end` on a thread with the number of a
        rank that has ended. Raises WorkerLost.
        """
        size = len(self._devices)
        for rank in range(1, size):
            try:
                self._processes.append(self._start(rank, port))
            except OSError as error:
                raise WorkerLost(f"rank {rank} cannot be started: {error}") from error
            waiting = threading.Thread(target=self._wait, args=(rank, on_end), name="rank-wait", daemon=True)
            waiting.start()
        self._cores.take_own()
        threads = self._cores.threads_per_rank
        log.info("ranks started", pids=self.pids, devices=self._devices, threads_per_rank=threads)

    def loss(self, rank: int) -> MeshError:
        """Why a rank is lost whose connection has ended."""
        try:
            status = self._processes[rank - 1].wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return WorkerLost(f"rank {rank} has closed its connection")
        if status == _REFUSED:
            return ConfigurationError(f"rank {rank} cannot start; its last line in this log says why")
        return WorkerLost(f"rank {rank} {ending(status)}")

    def kill(self) -> None:
        """End all, and give the process its cores and threads back. For the thread that has started them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._cores.take_all()

    def _start(self, rank: int, port: int) -> "subprocess.Popen[bytes]":
        settings, memory = self._settings, self._memory
        level, is_json = log_format()
        values = {name: getattr(settings, name) for name in _TAKEN_OVER} | {
            "leader": f"127.0.0.1:{port}",
            "rank": rank,
            "group_size": len(self._devices),
            "parent": os.getpid(),
            "model": self._model_dir,
            "revision": "",
            "device": self._devices[rank],
            "kv_host": settings.host,
            "num_threads": self._cores.threads_per_rank,
            "cpu_list": format_cores(self._cores.of_rank[rank]),
            "kv_memory_fraction": memory.fraction,
            "memory_utilization": memory.utilization,
            "kv_memory_shares": memory.shares,
            "kv_memory_ledger": memory.ledger or "",
            "log_level": level,
            "log_json": is_json,
            "otlp_endpoint": "",
        }
        # Everything that a rank needs to know is in its flags; keys are not for the list of processes.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        keys = {env_name("mesh_key"): settings.mesh_key, env_name("leader_key"): self._key}
        with handing_over(keys) as (extra, secrets_fd):
            return subprocess.Popen(
                [sys.executable, "-m", "rank_worker", *as_flags(**values)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # announcements to the supervisor are the leader's
                env=environ | extra,
                pass_fds=(secrets_fd,),
            )

    def _wait(self, rank: int, on_end: Callable[[int], None]) -> None:
        self._processes[rank - 1].wait()
        on_end(rank)


def share_memory(memory: KVMemorySettings, devices: Sequence[str]) -> KVMemorySettings:
    """The settings of each rank, where ranks on one device divide the worker's share equally."""
    num_sharing = devices.count(devices[0])
    if num_sharing == 1:
        return memory
    # 0 shares are half of what is left.
    return replace(memory, shares=(memory.shares or 2) * num_sharing)
