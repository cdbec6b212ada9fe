"""Messages between the leader and the other ranks. Over sockets, until they are ready (then commands, `shared.py`):

leader ── RankSetup ────────────▶ rank     before the rank's process starts
       ◀─ loaded ───────────────
       ── num_blocks, kv_bytes ─▶
       ◀─ ready ────────────────
       ◀─ failed, refused                  in place of an answer

Ranks without shared memory (`remote.py`) then get StepMessages, over connections of which RemoteRanks is the contract.
"""

import json
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from checkpoint.adapters import read_adapter
from checkpoint.rope_override import RopeOverride
from engine.runner_settings import RunnerSettings
from engine.settings import GraphSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MAX_MESSAGE_BYTES = 1 << 16
_MAX_REASON_CHARS = 4000

OnLost = Callable[[str], None]
"""Called on a thread with what has happened to a rank. It should end the process."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The first message to a rank. `cores`: those it runs on. `next_fds`: sockets to the ranks of the next stage."""

    rank: int
    settings: RunnerSettings
    max_blocks: int
    num_threads: int
    cores: tuple[int, ...]
    memory_fd: int
    kv_fd: int
    store_fd: int
    report_fd: int
    next_fds: tuple[int, ...] = ()
    log_level: str = "info"
    log_json: bool = True

    @property
    def fds(self) -> tuple[int, ...]:
        """Files and sockets that the rank inherits."""
        return (self.memory_fd, self.kv_fd, self.store_fd, self.report_fd, *self.next_fds)

    def send(self, rank: socket.socket) -> None:
        """Raises ConfigurationError if the settings are too long for a message."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        send_message(rank, **values | {"settings": plain_settings(self.settings)})

    @classmethod
    def receive(cls, leader: socket.socket) -> "RankSetup":
        """Raises ConnectionError if the leader has ended."""
        message = receive_message(leader)
        for name in ("cores", "next_fds"):
            message[name] = tuple(message[name])
        return cls(settings=read_settings(message.pop("settings")), **message)

    @staticmethod
    def send_failure(leader: socket.socket, error: Exception) -> None:
        """Tell the leader why this rank ends. It raises ConfigurationError for one, WorkerLost for any other error."""
        kind, reason = "failed", f"{type(error).__name__}: {error}; its log has the details"
        if isinstance(error, ConfigurationError):
            kind, reason = "refused", str(error)
        with suppress(OSError):
            send_message(leader, **{kind: reason[:_MAX_REASON_CHARS]})


def plain_settings(settings: RunnerSettings) -> dict[str, Any]:
    """The settings for JSON, without those of memory for KV, which are each process's own."""
    plain = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "kv_memory"}
    adapters = [(adapter.name, str(adapter.folder), adapter.rank, adapter.digest) for adapter in settings.adapters]
    plain |= {"rope": asdict(settings.rope), "graphs": asdict(settings.graphs)}
    return plain | {"model_dir": str(settings.model_dir), "adapters": adapters}


def read_settings(plain: dict[str, Any]) -> RunnerSettings:
    """Read the settings that `plain_settings` has made plain. Raises ConfigurationError."""
    adapters = tuple(read_adapter(name, Path(folder), rank, digest) for name, folder, rank, digest in plain["adapters"])
    values = {"model_dir": Path(plain["model_dir"]), "rope": RopeOverride(**plain["rope"]), "adapters": adapters}
    graphs = plain["graphs"] | {"sizes": tuple(plain["graphs"]["sizes"])}
    return RunnerSettings(**plain | values | {"graphs": GraphSettings(**graphs)})


def ending(status: int) -> str:
    """How a process has ended, from its exit status as subprocess tells it."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def send_message(channel: socket.socket, **message: Any) -> None:
    """Raises ConfigurationError if the message is too long, which a list of adapters can make it."""
    encoded = json.dumps(message).encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise ConfigurationError(
            f"the settings of a rank have {len(encoded):,} bytes, over {MAX_MESSAGE_BYTES:,}: give workers with "
            "several ranks fewer adapters, or folders with shorter paths"
        )
    channel.send(encoded)


def receive_message(channel: socket.socket) -> dict[str, Any]:
    """Raises ConnectionError if the other side has ended."""
    message = channel.recv(MAX_MESSAGE_BYTES)
    if not message:
        raise ConnectionResetError("the other side has closed the socket")
    decoded: dict[str, Any] = json.loads(message)
    return decoded


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A step for a rank with memory of its own: the command, and the arrays that the command describes."""

    command: bytes
    token_ids: bytes
    positions: bytes
    sequences: bytes


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block within the rank's KV: after the steps that were sent before, before those that are sent later."""

    source: int
    target: int


class RemoteRanks(Protocol):
    """The ranks from 1 on, as the leader sees them. Plug point: worker.ranks.listener.RankListener.

    All methods but `close` raise WorkerLost once a rank is lost, and `wait_loaded` raises ConfigurationError if one
    cannot load its share.
    """

    @property
    def store(self) -> "Store":
        """The store by which all ranks meet."""
        ...

    def gather(self, settings: RunnerSettings, layout: KVLayout) -> str:
        """Wait until all ranks have joined, with checkpoints of this layout's fingerprint. Returns this machine's
        address that reaches theirs.
        """
        ...

    def wait_loaded(self) -> list[int]:
        """Wait until all have loaded their weights. Returns the blocks that fit each."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Let all ranks allocate their KV and meet the others."""
        ...

    def wait_ready(self) -> None:
        """Wait until all execute steps."""
        ...

    def post(self, message: StepMessage | BlockCopy) -> None:
        """Send a message to all ranks. A rank executes messages in order."""
        ...

    def clear_blocks(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        """Fill blocks of their KV with zeros, from this token of each on."""
        ...

    def watch(self, on_lost: OnLost) -> None:
        """From now on call `on_lost` as soon as a rank is lost."""
        ...

    def close(self) -> None:
        """End all ranks, and the calls that wait for them."""
        ...
