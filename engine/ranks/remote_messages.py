"""Messages between the leader and ranks without shared memory once they compute; the contract of their connections."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.ranks.messages import OnLost
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import KVLayout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


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
