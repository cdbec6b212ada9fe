"""KV memory budget: the workers of a machine together never take more memory for KV than there is.

    enter ledger ──▶ load weights ──▶ take a share of what is left of the budget ──▶ allocate

On CPU the system maps pages of the cache when they are first written, or shortly before (engine/kv/page_commits.py). A
cache that is too large would only show under load, through the OOM killer. The ledger (engine/memory_ledger.py)
therefore counts what each worker has been promised, not pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
import torch

from engine.memory import DeviceMemory, device_memory
from engine.memory_ledger import Entry, HeldEntry, MemoryLedger, open_ledger
from engine.settings import KVMemorySettings
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for the KV of all workers on a device, in bytes, as one worker computes it once its weights are loaded.

    `own_mapped_bytes`: the part of its weights that stays in files, see Entry. `own_later_bytes`: memory that it will
    take once its KV is allocated, which own_weights_bytes includes.
    """

    memory: DeviceMemory
    settings: KVMemorySettings
    own_weights_bytes: int
    other_entries: Sequence[Entry]
    own_mapped_bytes: Mapping[str, int] = field(default_factory=dict)
    own_later_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """Memory that is free or filled by KV, minus memory for weights that are still to be loaded, and for weights in
        mapped files, which the system counts as free. Files that several workers map are subtracted once.
        """
        free_bytes = self.memory.free_bytes - sum(self._mapped_bytes.values()) - self.own_later_bytes
        touched = sum(entry.touched_kv_bytes(self.memory) for entry in self.other_entries)
        with_touched = free_bytes + touched
        if self.memory.is_lazy:  # a process may have grown for other reasons than KV
            limit = max((entry.usable_bytes for entry in self.other_entries), default=0)
            with_touched = max(free_bytes, min(with_touched, limit))
        loading = sum(entry.missing_weights_bytes(self.memory) for entry in self.other_entries)
        num_missing = max(0, self.settings.shares - 1 - len(self.other_entries))
        not_started = num_missing * (self.own_weights_bytes - sum(self.own_mapped_bytes.values()))
        return max(0, with_touched - loading - not_started)

    @property
    def _mapped_bytes(self) -> Mapping[str, int]:
        """Weights in files that this worker or another one maps, by the identity of the files."""
        mapped = dict(self.own_mapped_bytes)
        for entry in self.other_entries:
            mapped |= entry.mapped_bytes
        return mapped

    @property
    def total_bytes(self) -> int:
        """Memory for the KV of all workers together."""
        if self.settings.utilization:
            unused_bytes = (1 - self.settings.utilization) * self.memory.total_bytes
            return max(0, int(self.usable_bytes - unused_bytes))
        return int(self.usable_bytes * self.settings.fraction)

    @property
    def promised_bytes(self) -> int:
        """Memory that the other workers have been promised for KV."""
        return sum(entry.kv_bytes for entry in self.other_entries)

    @property
    def share_bytes(self) -> int:
        """Memory for the KV of this worker."""
        left_bytes = max(0, self.total_bytes - self.promised_bytes)
        if not self.settings.shares:
            return left_bytes // 2
        return min(left_bytes, self.total_bytes // self.settings.shares)

    def require(self, kv_bytes: int) -> None:
        """Raise ConfigurationError if `kv_bytes`, which the operator configured, exceed the memory that is left."""
        left_bytes = self.usable_bytes - self.promised_bytes
        if kv_bytes > left_bytes:
            raise ConfigurationError(
                f"{gib(kv_bytes)} are requested for KV, but {gib(max(0, left_bytes))} of memory are left"
                f"{self._holders()}: lower kv_cache_bytes or max_batch_total_tokens"
            )

    def describe(self, kv_bytes: int) -> str:
        """The worker's KV memory and how it was computed, in one line for the log."""
        rule = (
            f"memory_utilization {self.settings.utilization:g} of {gib(self.memory.total_bytes)}"
            if self.settings.utilization
            else f"{self.settings.fraction:g} of {gib(self.usable_bytes)} free of {gib(self.memory.total_bytes)}"
        )
        device = self.memory.key.split()[0]
        shared = f", shared by {self.settings.shares} workers" if self.settings.shares > 1 else ""
        return f"{gib(kv_bytes)} for KV on {device}; all workers there: {gib(self.total_bytes)} ({rule}){shared}"

    def too_small(self, block_bytes: int) -> ConfigurationError:
        """The error for a share that is smaller than one block."""
        return ConfigurationError(
            f"no memory for the KV cache: this worker's share is {gib(self.share_bytes)} of {gib(self.total_bytes)} "
            f"for all workers on this device, and one block takes {block_bytes} bytes{self._holders()}; stop other "
            "workers, free memory, raise kv_memory_fraction, or lower block_size"
        )

    def _holders(self) -> str:
        holders = [entry for entry in self.other_entries if entry.kv_bytes]
        held = [f"{entry.owner} (pid {entry.pid}) has {gib(entry.kv_bytes)}" for entry in holders]
        return f" ({', '.join(held)})" if held else ""


@dataclass(slots=True)
class KVMemoryShare:
    """One worker's memory for KV, and its entry in the ledger. The cache owns it: other workers count this memory as
    taken as long as the cache lives.
    """

    device: torch.device
    settings: KVMemorySettings
    weights_bytes: int
    mapped_bytes: Mapping[str, int] = field(default_factory=dict)
    later_bytes: int = 0
    summary: str = ""
    _ledger: MemoryLedger | None = field(default=None, repr=False)
    _held: HeldEntry | None = field(default=None, repr=False)

    @classmethod
    def enter(
        cls,
        device: torch.device,
        settings: KVMemorySettings,
        weights_bytes: int,
        mapped_bytes: Mapping[str, int] | None = None,
        later_bytes: int = 0,
    ) -> "KVMemoryShare":
        """Announce the worker before it loads weights. `mapped_bytes`: the weights that stay in files, see Entry;
        `later_bytes`: memory that it takes after its KV. If the folder is not usable, log a warning and use no ledger.
        """
        weights_bytes += later_bytes
        mapped_bytes = mapped_bytes or {}
        ledger: MemoryLedger | None = None
        held: HeldEntry | None = None
        if settings.ledger is not None:
            try:
                ledger = open_ledger(settings.ledger)
                held = ledger.enter(device_memory(device), settings.owner, weights_bytes, mapped_bytes)
            except OSError as error:
                log.warning("KV memory is not shared with other workers of this machine", error=str(error))
        return cls(device, settings, weights_bytes, mapped_bytes, later_bytes, _ledger=ledger, _held=held)

    def add_ranks(self, pids: Sequence[int], kv_fd: int) -> None:
        """Announce the worker's other ranks, which load their part of the weights, and the file of their KV."""
        with self._locked():
            if self._held is not None:
                self._held.add_ranks(pids, kv_fd)

    @contextmanager
    def blocks(self, block_bytes: int, *, num_blocks: int | None, max_blocks: int | None) -> Iterator[int]:
        """Yield the number of blocks to allocate inside the `with` block, while the ledger is locked.

        It is `num_blocks`, or, if None, the blocks in the worker's share, at most `max_blocks`. Raises
        ConfigurationError if there is not enough memory.
        """
        with self._locked() as other_entries:
            memory = device_memory(self.device)
            budget = Budget(
                memory, self.settings, self.weights_bytes, other_entries, self.mapped_bytes, self.later_bytes
            )
            if num_blocks is None:
                num_blocks = min(budget.share_bytes // block_bytes, max_blocks or budget.share_bytes)
                if num_blocks < 1:
                    raise budget.too_small(block_bytes)
            elif self._held is not None:
                budget.require(num_blocks * block_bytes)
            if self._held is not None:
                self._held.promise(num_blocks * block_bytes, budget.usable_bytes)
            self.summary = budget.describe(num_blocks * block_bytes)
            yield num_blocks

    @contextmanager
    def _locked(self) -> Iterator[list[Entry]]:
        if self._ledger is None or self._held is None:
            yield []
            return
        with self._ledger.locked():
            yield self._ledger.other_entries(self._held)


def gib(num_bytes: float) -> str:
    """Format as GiB with two decimals, or as MiB below 0.1 GiB."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"
