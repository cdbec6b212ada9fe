"""KV on disk: files that are whole, right and of this user; a cache that loses blocks rather than time."""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache
from engine.kv.disk import BlockFiles, DiskCache
from engine.runner import RunnerOutput
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.block_hashes import state_block_hashes
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout
from mesh.domain.tokens import SampledToken
from tests.defects import Repaired
from tests.fakes.requests import make_request
from tests.waiting import until

LAYOUT = KVLayout("model", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
SIZE = LAYOUT.block_bytes
HASHES = [bytes([number]) * 32 for number in range(40)]


def files(root: Path, max_blocks: int = 100, kind: str = "kind") -> BlockFiles:
    return BlockFiles(root, kind, SIZE, max_blocks * (SIZE + 8))


def payload(number: int) -> bytes:
    return bytes([number]) * SIZE


def test_blocks_come_back_to_every_process_with_this_layout(tmp_path: Path) -> None:
    files(tmp_path).write(HASHES[1], payload(1))
    assert files(tmp_path).read(HASHES[1]) == payload(1)
    assert files(tmp_path).mark_used(HASHES[1])
    assert not files(tmp_path).mark_used(HASHES[2])
    assert files(tmp_path).read(HASHES[2]) is None
    assert files(tmp_path, kind="another").read(HASHES[1]) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20] + bytes([content[20] ^ 1]) + content[21:],
        lambda content: b"",
        lambda content: content + b"more",
    ],
)
def test_damaged_blocks_are_refused_and_removed(tmp_path: Path, damage: Any) -> None:
    folder = files(tmp_path)
    folder.write(HASHES[1], payload(1))
    (path,) = tmp_path.glob("*/*.kv")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="is damaged"):
        folder.read(HASHES[1])
    assert not path.exists()


def test_a_block_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    folder = files(tmp_path)
    folder.write(HASHES[1], payload(1))
    (path,) = tmp_path.glob("*/*.kv")
    path.rename(path.with_name(f"{HASHES[2].hex()}.kv"))
    with pytest.raises(ValueError, match="is damaged"):
        folder.read(HASHES[2])


def test_what_was_not_used_goes_first_in_all_folders(tmp_path: Path) -> None:
    other = files(tmp_path, kind="another")
    other.write(HASHES[0], payload(0))
    folder = files(tmp_path, max_blocks=20)
    for number in range(1, 20):
        folder.write(HASHES[number], payload(number))
    for path in tmp_path.glob("*/*.kv"):
        os.utime(path, (1000, 1000))
    folder.read(HASHES[3])
    for number in range(20, 30):
        folder.write(HASHES[number], payload(number))
    kept = {number for number in range(30) if (other if number == 0 else folder).mark_used(HASHES[number])}
    assert {3, 29} <= kept
    assert len(kept) <= 20


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"allows {SIZE} bytes, but one block of KV takes {SIZE + 8}"):
        BlockFiles(tmp_path / "new", "layout", SIZE, SIZE)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("max_blocks", [1, 5, 39])
def test_no_write_makes_a_full_folder_larger_than_it_may_be(tmp_path: Path, max_blocks: int) -> None:
    for number in range(max_blocks):
        files(tmp_path, max_blocks).write(HASHES[number], payload(number))
    folder = files(tmp_path, max_blocks)
    for number in range(30, 40):
        folder.write(HASHES[number], payload(number))
        num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
        assert num_bytes <= max_blocks * (SIZE + 8)
        assert folder.mark_used(HASHES[number])


def test_what_was_used_before_the_clock_was_set_back_goes_first(tmp_path: Path) -> None:
    folder, now_s = files(tmp_path, max_blocks=20), time.time()
    for number in range(20):
        folder.write(HASHES[number], payload(number))
    for number in range(20):
        before_s = now_s + 5 * 3600 - number * 600  # 0 was used last
        os.utime(folder._path(HASHES[number]), (before_s, before_s))
    for number in range(20, 25):
        folder.write(HASHES[number], payload(number))
    kept = {number for number in range(25) if folder._path(HASHES[number]).exists()}
    assert kept >= {0, *range(20, 25)}
    assert 19 not in kept
    assert folder._path(HASHES[0]).stat().st_mtime <= time.time(), "from here on its age is that of the others"


def test_unfinished_files_of_a_dead_process_go(tmp_path: Path) -> None:
    folder = files(tmp_path)
    folder.write(HASHES[1], payload(1))
    (path,) = tmp_path.glob("*/*.kv")
    left, busy = path.with_name(f"{path.name}.123"), path.with_name(f"{path.name}.124")
    left.write_bytes(b"half")
    busy.write_bytes(b"half")
    os.utime(left, (1000, 1000))
    folder.trim()
    assert (left.exists(), busy.exists(), path.exists()) == (False, True, True)


def test_files_of_others_in_its_folder_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "app" / "main.kv", tmp_path / "app" / "ab12.kv", tmp_path / "app" / "main.kv.bak"]
    files(tmp_path).write(HASHES[1], payload(1))
    (own,) = tmp_path.glob("*/*.kv")
    others.append(own.with_name("notes.kv"))
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(payload(2) * 100)
        os.utime(path, (1000, 1000))
    files(tmp_path, max_blocks=1)
    assert [path.exists() for path in (own, *others)] == [True] * 5


def test_an_emptied_folder_is_filled_again(tmp_path: Path) -> None:
    folder = files(tmp_path)
    folder.write(HASHES[1], payload(1))
    (own,) = tmp_path.iterdir()
    shutil.rmtree(own)
    folder.write(HASHES[2], payload(2))
    assert (folder.read(HASHES[1]), folder.read(HASHES[2])) == (None, payload(2))
    assert own.stat().st_mode & 0o777 == 0o700


def test_two_processes_with_one_id_write_the_same_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers: the second begins before the first has named its file."""
    first, second = files(tmp_path), files(tmp_path)
    rename = Path.rename

    def late(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        second.write(HASHES[1], payload(1))
        return rename(part, target)

    monkeypatch.setattr(Path, "rename", late)
    first.write(HASHES[1], payload(1))
    assert first.read(HASHES[1]) == payload(1)
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_folders_that_others_can_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="nobody else may write to it"):
        files(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        files(tmp_path / "file")
    assert files(tmp_path / "new").read(HASHES[0]) is None
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def cache_of(num_blocks: int) -> KVCache:
    cache = KVCache(LAYOUT, num_blocks, torch.device("cpu"))
    for block in range(num_blocks):
        cache.write_blocks([block], LAYOUT.whole, payload(block + 1))
    return cache


def content(cache: KVCache, block: int) -> bytes:
    out = bytearray(SIZE)
    cache.read_blocks([block], LAYOUT.whole, out)
    return bytes(out)


def test_an_evicted_block_comes_back(tmp_path: Path) -> None:
    cache = cache_of(4)
    disk = DiskCache(files(tmp_path), cache)
    disk.evicted(2, HASHES[2])
    cache.write_blocks([2], LAYOUT.whole, payload(99))
    disk.close()
    disk = DiskCache(files(tmp_path), cache)
    found = disk.fetch([HASHES[2], HASHES[3], HASHES[2]]).result()
    assert list(found) == [HASHES[2]], "up to the first that is missing"
    disk.restore([0], list(found.values()))
    assert content(cache, 0) == payload(3)
    assert (disk.counts.written, disk.counts.found) == (0, 1)
    disk.close()


def test_a_block_that_is_evicted_again_was_in_use_until_then(tmp_path: Path) -> None:
    folder = files(tmp_path)
    folder.write(HASHES[1], payload(1))
    os.utime(folder._path(HASHES[1]), (1000, 1000))
    disk = DiskCache(folder, cache_of(4))
    disk.evicted(0, HASHES[1])
    disk.close()
    assert disk.counts.written == 0
    assert folder._path(HASHES[1]).stat().st_mtime > 1000


def test_the_end_of_a_prompt_goes_first(tmp_path: Path) -> None:
    folder = files(tmp_path)
    for number in range(4):
        folder.write(HASHES[number], payload(number))
    disk = DiskCache(folder, cache_of(4))
    assert len(disk.fetch(HASHES[:4]).result()) == 4
    disk.close()
    used_ns = [folder._path(HASHES[number]).stat().st_mtime_ns for number in range(4)]
    assert used_ns == sorted(set(used_ns), reverse=True)


def test_each_block_that_is_read_is_marked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, utime, marked = files(tmp_path), os.utime, list[Path]()
    for number in range(4):
        folder.write(HASHES[number], payload(number))

    def counted(path: Path, **times: Any) -> None:
        marked.append(path)
        utime(path, **times)

    monkeypatch.setattr("engine.kv.disk.os.utime", counted)
    disk = DiskCache(folder, cache_of(4))
    assert len(disk.fetch(HASHES[:4]).result()) == 4
    disk.close()
    assert marked == [folder._path(HASHES[number]) for number in range(4)]


def test_blocks_are_dropped_while_the_disk_is_slow_and_kept_again_later(tmp_path: Path) -> None:
    folder, may_write = files(tmp_path), threading.Event()
    write = folder.write
    folder.write = lambda *block: may_write.wait() and write(*block)  # type: ignore[method-assign]
    disk = DiskCache(folder, cache_of(4), max_waiting_bytes=2 * SIZE)
    for number in range(3):
        disk.evicted(0, HASHES[number])
    assert disk.counts.dropped == 1
    may_write.set()
    asyncio.run(until(lambda: disk.counts.written == 2, state=lambda: disk.counts))
    disk.evicted(0, HASHES[3])
    disk.close()
    assert (disk.counts.written, disk.counts.dropped) == (3, 1)


def test_a_full_disk_costs_blocks_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.kv.disk.os.writev", full)
    disk = DiskCache(files(tmp_path), cache_of(4))
    for number in range(3):
        disk.evicted(0, HASHES[number])
    disk.close()
    assert (disk.counts.written, disk.counts.dropped) == (0, 3)
    assert list(tmp_path.glob("*/*")) == []


def test_without_memory_blocks_are_lost_and_the_next_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    folder, write = files(tmp_path), BlockFiles.write

    def failing(self: BlockFiles, block_hash: bytes, payload: bytes) -> None:
        if block_hash == HASHES[0]:
            raise MemoryError
        write(self, block_hash, payload)

    monkeypatch.setattr(BlockFiles, "write", failing)
    disk = DiskCache(folder, cache_of(4), max_waiting_bytes=SIZE)
    disk.evicted(0, HASHES[0])
    asyncio.run(until(lambda: disk.counts.dropped == 1 and not disk._writes.used, state=lambda: disk.counts))
    disk.evicted(1, HASHES[1])
    disk.close()
    assert (disk.counts.written, disk.counts.dropped) == (1, 1)
    repaired("D45", "the block is lost, the next ones are written")


def test_a_disk_that_hangs_does_not_keep_a_worker_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    monkeypatch.setattr("engine.kv.disk._CLOSE_S", 0.1)
    goes_on = threading.Event()
    monkeypatch.setattr(BlockFiles, "write", lambda *_: goes_on.wait(60))
    monkeypatch.setattr(BlockFiles, "read", lambda *_: goes_on.wait(60) and None)
    disk = DiskCache(files(tmp_path), cache_of(4))
    disk.evicted(0, HASHES[0])
    disk.fetch([HASHES[1]])
    closing = threading.Thread(target=disk.close, daemon=True)
    closing.start()
    closing.join(30)
    try:
        assert not closing.is_alive()
    finally:
        goes_on.set()
    disk._writer.join()
    repaired("D45", "an orderly stop waits 10 s for the disk")


def test_a_disk_that_has_become_read_only_costs_damaged_blocks_and_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files(tmp_path)
    for number in range(2):
        folder.write(HASHES[number], payload(number))
    damaged = folder._path(HASHES[1])
    damaged.write_bytes(damaged.read_bytes()[:-1])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    disk = DiskCache(files(tmp_path, max_blocks=1), cache_of(4), max_waiting_bytes=2 * SIZE)
    for _ in range(3):
        assert list(disk.fetch(HASHES[:2]).result()) == [HASHES[0]]
    assert disk.counts.damaged == 3
    disk.close()


def test_a_state_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    folder, cache = files(tmp_path), KVCache(replace(LAYOUT, state_blocks=2), 4, torch.device("cpu"))
    states = {number: state_block_hashes(HASHES[number], 2) for number in (1, 3)}
    for name in (*HASHES[:3], *states[1], *states[3]):  # the block at whose end the last state is, memory may have
        folder.write(name, payload(0))
    disk = DiskCache(folder, cache)
    assert list(disk.fetch(HASHES[:4]).result()) == [*states[3], *HASHES[:3]]
    damaged = folder._path(states[3][1])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert not disk.fetch(HASHES[:4]).result()
    assert list(disk.fetch(HASHES[:4]).result()) == [*states[1], *HASHES[:2]], "the damaged block has gone"
    assert not disk.fetch(HASHES[:1]).result()
    assert disk.counts.damaged == 1
    asyncio.run(until(lambda: not disk._reads.used, state=lambda: disk._reads))
    disk.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("state_blocks", [0, 2])
def test_a_disk_that_can_no_longer_be_reached_costs_blocks_and_no_requests(tmp_path: Path, state_blocks: int) -> None:
    """As one that fails does, or a network's: looking for a file there is an error, too."""
    folder = files(tmp_path / "root")
    cache = KVCache(replace(LAYOUT, state_blocks=state_blocks), 4, torch.device("cpu"))
    for name in (*HASHES[:3], *state_block_hashes(HASHES[2], 2)):
        folder.write(name, payload(1))
    disk = DiskCache(folder, cache)
    (tmp_path / "root").chmod(0o700)
    os.seteuid(65534)
    try:
        assert not disk.fetch(HASHES[:3]).result()
        assert not folder.mark_used(HASHES[0])
    finally:
        os.seteuid(0)
    assert len(disk.fetch(HASHES[:3]).result()) == 3 + state_blocks
    disk.close()


def test_blocks_that_wait_for_their_sequence_are_limited(tmp_path: Path) -> None:
    folder = files(tmp_path)
    for number in range(4):
        folder.write(HASHES[number], payload(number))
    disk = DiskCache(folder, cache_of(4), max_waiting_bytes=3 * SIZE)
    first = disk.fetch(HASHES[:2]).result()
    second = disk.fetch(HASHES[:4]).result()
    assert (len(first), len(second)) == (2, 1)
    del first, second
    assert len(disk.fetch(HASHES[:4]).result()) == 3
    disk.close()


class Kept:
    """Blocks by hash, as an EvictedBlockStore; `restored` are the ids of blocks that were filled."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.restored: list[int] = []

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        self.blocks[block_hash] = b"kept"

    def fetch(self, hashes: Sequence[bytes]) -> Any:
        raise NotImplementedError

    def restore(self, block_ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        assert set(payloads) == {b"kept"}
        self.restored += block_ids

    def close(self) -> None:
        raise NotImplementedError


def test_a_prompt_gets_its_evicted_blocks_back() -> None:
    kept = Kept()
    config = SchedulerConfig(4, max_batch_tokens=64, max_num_seqs=4, max_model_len=64)
    scheduler = Scheduler(config, BlockPool(10, kept.evicted), kept)
    first, other = [list(range(begin, begin + 26)) for begin in (1, 101)]
    for name, prompt in (("a", first), ("b", other)):
        run(scheduler, SequenceState(make_request(name, prompt, max_new_tokens=1)))
    again = SequenceState(make_request("again", first, max_new_tokens=1))
    missing = scheduler.tables.missing(again)
    assert missing
    assert set(missing) <= set(kept.blocks)
    again.from_disk.update({block_hash: kept.blocks[block_hash] for block_hash in missing})
    run(scheduler, again)
    assert again.num_cached_tokens == 24, "all but the last, partly filled block"
    assert len(kept.restored) == len(missing)
    assert not again.from_disk
    scheduler.check_integrity()
    after = SequenceState(make_request("after", first, max_new_tokens=1))
    assert scheduler.tables.missing(after) == [], "restored blocks are indexed as any others"


def run(scheduler: Scheduler, sequence: SequenceState) -> None:
    scheduler.add(sequence)
    while (batch := scheduler.schedule()).items:
        sampled = (SampledToken(7, -0.5),)
        scheduler.update(batch, [RunnerOutput(sampled if item.needs_sampling else ()) for item in batch.items])
