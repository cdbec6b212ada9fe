"""KV on disk: blocks that the cache evicts are kept in files, and come back for later prompts that begin alike.

    eviction     the engine's thread copies the block; the disk's thread writes the copy
    a prompt     before it is added, the disk's thread reads the blocks that memory lacks, and checks them
    admission    the engine's thread copies them into blocks of the cache, which are then indexed as any others

A recurrent state is evicted block by block, too, and comes back whole: a prompt gets the blocks up to the last complete
snapshot.

A file is named after the hash of a block, which covers all tokens before it, in a folder for each kind of KV: layout,
bytes of the weights, decoder, version of the files. So all workers of a machine that serve a model find each other's
blocks. A file gets its name when it is complete, and its content is verified against a digest: a crash or a flipped bit
costs a block, never a wrong answer. If blocks are evicted faster than they can be written, or the disk is full, they
are lost, as they would be without a disk. The files that were not used for the longest time go when the folder is over
its size.
"""

import contextlib
import errno
import os
import queue
import re
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import structlog
import xxhash

from engine.kv.sharded_cache import AnyKVCache
from engine.sequence import BlockPayloads
from mesh.domain.block_hashes import BlockHash, state_block_hashes
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

_MAX_WAITING_BYTES = 256 << 20
_TRIM_TO = 0.9
_STALE_S = 600.0
_MARK_STEP_NS = 1000  # file systems that round times keep microseconds
_WARN_INTERVAL_S = 60.0
_SUFFIX = ".kv"
_OWN_FOLDER = re.compile(r"[0-9a-f]{24}")
_OWN_FILE = re.compile(rf"[0-9a-f]+\{_SUFFIX}(\.\w+)?")
_DIGEST_BYTES = 8
_VERSION = 1
"""Counts changes of the files, and of the order of KV within a block of the same layout."""
_CLOSE_S = 10.0


@dataclass(slots=True)
class DiskCounts:
    """Blocks written, found, dropped because the disk was too slow or full, and refused because they were damaged."""

    written: int = 0
    found: int = 0
    dropped: int = 0
    damaged: int = 0


@dataclass(slots=True)
class _ByteLimit:
    """Bytes in use by several threads, up to a limit."""

    limit: int
    used: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)  # the garbage collector gives back, too, anywhere

    def take(self, num_bytes: int) -> bool:
        with self.lock:
            if self.used + num_bytes > self.limit:
                return False
            self.used += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        with self.lock:
            self.used -= num_bytes


def private_folder(root: Path) -> None:
    """Make the folder if need be. Raises ConfigurationError if it cannot be used, or if others could write to it,
    who could then change answers.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise ConfigurationError(f"kv_disk {root} cannot be used: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigurationError(f"kv_disk {root} must belong to this user, and nobody else may write to it")


class BlockFiles:
    """Blocks as files below `root`, in a folder for their kind; all folders together have at most `max_bytes`. KV of
    one kind is equal to the bit wherever the hashes of blocks are.

    Several processes may share a root, and other files may be there: they are left alone. A process looks at what all
    of them have written each time it has written a twentieth of `max_bytes`, so each one beside it may exceed the limit
    by as much. Raises ConfigurationError as `private_folder`, and if no block fits into `max_bytes`.
    """

    def __init__(self, root: Path, kind: str, block_bytes: int, max_bytes: int) -> None:
        self._root = root
        self._folder = root / blake2b(f"{_VERSION}:{kind}".encode(), digest_size=12).hexdigest()
        self._block_bytes = block_bytes
        self._file_bytes = _DIGEST_BYTES + block_bytes
        self._max_bytes = max_bytes
        if max_bytes < self._file_bytes:
            raise ConfigurationError(
                f"kv_disk_gib allows {max_bytes} bytes, but one block of KV takes {self._file_bytes}: raise kv_disk_gib"
            )
        self._room = 0  # bytes to write before the next look at what is there
        self._writer = secrets.token_hex(8)  # processes of two containers may have the same id
        private_folder(root)
        private_folder(self._folder)
        self.trim()

    def has(self, block_hash: BlockHash) -> bool:
        return _is_there(self._path(block_hash))

    def mark_used(self, block_hash: BlockHash, used_ns: int | None = None) -> bool:
        """Say that a block was used until now, or until `used_ns`. Returns False if there is none."""
        path, used_ns = self._path(block_hash), time.time_ns() if used_ns is None else used_ns
        try:
            os.utime(path, ns=(used_ns, used_ns))  # finer than the system's own time
        except OSError:
            return _is_there(path)
        return True

    def write(self, block_hash: BlockHash, payload: bytes) -> None:
        """Raises OSError, for example on a full disk."""
        if self._room < self._file_bytes:
            self.trim(room=max(self._file_bytes, int(self._max_bytes * (1 - _TRIM_TO) / 2)))
        path = self._path(block_hash)
        part = path.with_name(f"{path.name}.{self._writer}")
        self._folder.mkdir(mode=0o700, exist_ok=True)  # the root may have been emptied
        try:
            with part.open("wb", buffering=0) as file:
                os.writev(file.fileno(), (_digest(block_hash, payload), payload))
                if os.fstat(file.fileno()).st_size != self._file_bytes:
                    raise OSError(errno.ENOSPC, "the block was not written completely")
            part.rename(path)
        except OSError:
            _remove(part)
            raise
        self._room -= self._file_bytes

    def read(self, block_hash: BlockHash, used_ns: int | None = None) -> bytes | None:
        """Return a block and mark it as used, as `mark_used` does; None if there is none. Raises ValueError, and
        removes it, if it is damaged."""
        path = self._path(block_hash)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        payload = content[_DIGEST_BYTES:]
        if len(payload) != self._block_bytes or content[:_DIGEST_BYTES] != _digest(block_hash, payload):
            _remove(path)
            raise ValueError(f"{path} is damaged")
        self.mark_used(block_hash, used_ns)
        return payload

    def trim(self, room: int = 0) -> None:
        """Remove the files that were not used for the longest time until there is space for `room` more bytes, and
        unfinished files.
        """
        self._room = room
        files: list[tuple[float, int, Path]] = []
        now_s = time.time()
        for path in self._root.glob(f"*/*{_SUFFIX}*"):
            if not (_OWN_FOLDER.fullmatch(path.parent.name) and _OWN_FILE.fullmatch(path.name)):
                continue
            with contextlib.suppress(OSError):  # another worker has removed it
                status = path.stat()
                if path.suffix == _SUFFIX:
                    files.append((status.st_mtime, status.st_size, path))
                elif now_s - status.st_mtime > _STALE_S:
                    _remove(path)
        files = _with_true_ages(files, time.time())
        num_bytes, max_bytes = sum(size for _, size, _ in files), self._max_bytes - room
        if num_bytes <= max_bytes:
            return
        excess = num_bytes - min(max_bytes, int(self._max_bytes * _TRIM_TO))
        for _, size, path in sorted(files):
            _remove(path)
            excess -= size
            if excess <= 0:
                return

    def _path(self, block_hash: BlockHash) -> Path:
        return self._folder / f"{block_hash.hex()}{_SUFFIX}"


def _with_true_ages(files: list[tuple[float, int, Path]], now_s: float) -> list[tuple[float, int, Path]]:
    """Date back the files of the future, which were used before the clock was set back: else those used since would go
    first. The newest becomes one of now."""
    ahead_s = max((used_s for used_s, _, _ in files), default=now_s) - now_s
    if ahead_s < _STALE_S:  # the clocks of machines that share the folder differ a little
        return files
    aged = []
    for used_s, size, path in files:
        if used_s > now_s:
            used_s -= ahead_s
            with contextlib.suppress(OSError):
                os.utime(path, (used_s, used_s))
        aged.append((used_s, size, path))
    return aged


def _is_there(path: Path) -> bool:
    """False also if the disk has failed or can no longer be reached, where `Path.exists` raises."""
    return os.path.exists(path)


def _remove(path: Path) -> None:
    """Remove a file if possible: a disk that fails is often made read-only, and its blocks are still read."""
    with contextlib.suppress(OSError):
        path.unlink()


def _digest(block_hash: BlockHash, payload: bytes) -> bytes:
    hasher = xxhash.xxh3_64(block_hash)
    hasher.update(payload)
    return hasher.digest()


class DiskCache:
    """The disk behind one KV cache. `evicted` and `restore` are called by the engine's thread, the rest by any.

    `max_waiting_bytes` limits copies that are not written yet, and as much those that are read and not admitted yet;
    two recurrent states have room.
    """

    def __init__(self, files: BlockFiles, cache: AnyKVCache, max_waiting_bytes: int = _MAX_WAITING_BYTES) -> None:
        self.counts = DiskCounts()
        self._files = files
        self._cache = cache
        self._block_bytes = cache.layout.block_bytes
        self._state_blocks = cache.layout.state_blocks
        max_waiting_bytes = max(max_waiting_bytes, 2 * self._state_blocks * self._block_bytes)
        self._writes = _ByteLimit(max_waiting_bytes)
        self._reads = _ByteLimit(max_waiting_bytes)
        self._queue: queue.SimpleQueue[tuple[BlockHash, bytearray] | None] = queue.SimpleQueue()
        self._reader = ThreadPoolExecutor(1, "kv-disk-read")
        self._writer = threading.Thread(target=self._write_all, name="kv-disk-write", daemon=True)
        self._warned_s = -_WARN_INTERVAL_S
        self._writer.start()

    def evicted(self, block_id: int, block_hash: BlockHash) -> None:
        """Keep a block whose memory is about to be used anew."""
        if not self._writes.take(self._block_bytes):
            self.counts.dropped += 1
            return
        copy = bytearray(self._block_bytes)
        self._cache.read_blocks([block_id], self._cache.layout.whole, copy)
        self._queue.put((block_hash, copy))

    def fetch(self, hashes: Sequence[BlockHash]) -> "Future[BlockPayloads]":
        """Read the leading blocks that are on disk; b"" names a block to skip. Blocks of groups of layers with a window
        (mesh/domain/kv_groups.py) may be missing: a longer prefix does without them. With recurrent states: read the
        last state on disk at the end of one of the blocks, and the blocks up to there that are on disk.
        """
        return self._reader.submit(self._fetch, hashes)

    def restore(self, block_ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Copy blocks into the cache."""
        for block_id, payload in zip(block_ids, payloads, strict=True):
            self._cache.write_blocks([block_id], self._cache.layout.whole, payload)
        self.counts.found += len(block_ids)

    def close(self) -> None:
        """Write what was evicted so far, and end the threads. A disk that hangs costs what is not written yet."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._queue.put(None)
        self._writer.join(_CLOSE_S)
        if self._writer.is_alive():
            log.warning("KV was left unwritten: the disk is too slow", blocks=self._queue.qsize())

    def _fetch(self, hashes: Sequence[BlockHash]) -> BlockPayloads:
        found, begun_ns = BlockPayloads(), time.time_ns()
        if self._state_blocks:
            hashes = self._through_last_state(hashes)
        groups = self._cache.layout.groups
        for number, block_hash in enumerate(hashes):
            if not block_hash:
                continue
            if not self._reads.take(self._block_bytes):
                break
            # The beginning goes last: without it the rest is worth nothing.
            payload = self._read(block_hash, begun_ns - number * _MARK_STEP_NS)
            if payload is None:
                self._reads.give_back(self._block_bytes)
                if number % groups.count < groups.num_full:
                    break
                continue
            found[block_hash] = payload
        if self._state_blocks and len(found) < len(hashes):
            self._reads.give_back(len(found) * self._block_bytes)
            found.clear()
        # A sequence that is admitted, refused or aborted drops them.
        weakref.finalize(found, self._reads.give_back, len(found) * self._block_bytes)
        return found

    def _through_last_state(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """The blocks of the last recurrent state that is on disk, and the blocks of tokens before it that are."""
        for end in range(len(hashes), 0, -1):
            if self._files.has(*state_block_hashes(hashes[end - 1], 1)):  # of most blocks there is no state
                state = state_block_hashes(hashes[end - 1], self._state_blocks)
                if all(map(self._files.has, state)):
                    return [*state, *filter(self._files.has, hashes[:end])]
        return []

    def _read(self, block_hash: BlockHash, used_ns: int) -> bytes | None:
        try:
            return self._files.read(block_hash, used_ns)
        except ValueError as error:
            self.counts.damaged += 1
            log.warning("a block of KV on disk is damaged", error=str(error))
            return None

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            block_hash, copy = item
            try:
                if not self._files.mark_used(block_hash):
                    self._files.write(block_hash, bytes(copy))
                    self.counts.written += 1
            except (OSError, MemoryError) as error:
                self.counts.dropped += 1
                self._warn_seldom(error)
            finally:
                self._writes.give_back(self._block_bytes)

    def _warn_seldom(self, error: Exception) -> None:
        if time.monotonic() - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = time.monotonic()
            log.warning("KV cannot be kept on disk", error=repr(error))
