"""The files of batches on disk, while several threads use them."""

import errno
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import pytest

from gateway.batches import store
from gateway.batches.store import CallerStore, Store, new_id
from gateway.errors import BodyTooLarge, InvalidField, NotStored

T = TypeVar("T")

NUM_THREADS = 8


@pytest.fixture
def caller_store(tmp_path: Path) -> Iterator[CallerStore]:
    kept = Store(tmp_path, 100_000)
    yield kept.of("key")
    kept.close()


def at_once(act: Callable[[], T], refusal: type[Exception]) -> list[T]:
    """What `act` returns on several threads that begin together; those that are refused are left out."""
    barrier = Barrier(NUM_THREADS)

    def on_thread() -> list[T]:
        barrier.wait()
        try:
            return [act()]
        except refusal:
            return []

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return [each for future in [threads.submit(on_thread) for _ in range(NUM_THREADS)] for each in future.result()]


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes its time between the check of the limits and its write."""

    def slow_id(kind: str) -> str:
        time.sleep(0.02)
        return new_id(kind)

    monkeypatch.setattr(store, "new_id", slow_id)


def test_what_goes_while_it_is_listed_is_left_out(caller_store: CallerStore, tmp_path: Path) -> None:
    """Entries of a folder whose files are gone by the time that they are read."""
    kept = caller_store.add_file("in.jsonl", b"x" * 1000)
    num_left = caller_store.bytes_left()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "batches" / f"{new_id('batch')}.json").symlink_to("gone")
    for suffix in (".json", ".jsonl"):
        (folder / "files" / f"{new_id('file')}{suffix}").symlink_to("gone")
    assert caller_store.bytes_left() == num_left
    assert caller_store.files() == [kept]
    assert caller_store.batches() == []


@pytest.mark.usefixtures("slow_writes")
def test_files_together_keep_to_the_limit_of_bytes(caller_store: CallerStore) -> None:
    kept = at_once(lambda: caller_store.add_file("in.jsonl", b"x" * 45_000), BodyTooLarge)
    assert len(kept) == 2
    assert {file["id"] for file in caller_store.files()} == {file["id"] for file in kept}


@pytest.mark.usefixtures("slow_writes")
def test_files_together_keep_to_their_number(caller_store: CallerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FILES", 3)
    assert len(at_once(lambda: caller_store.add_file("in.jsonl", b"x"), InvalidField)) == 3
    assert len(caller_store.files()) == 3


def test_files_of_one_second_are_listed_newest_first(
    caller_store: CallerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.5)
    made = [caller_store.add_file("in.jsonl", b"x")["id"] for _ in range(20)]
    assert [file["id"] for file in caller_store.files()] == made[::-1]


def test_a_file_is_deleted_once(caller_store: CallerStore) -> None:
    for _ in range(20):
        file_id = caller_store.add_file("in.jsonl", b"x")["id"]
        deletes = at_once(lambda file_id=file_id: caller_store.delete_file(file_id), NotStored)  # type: ignore[misc]
        assert len(deletes) == 1


def test_old_batches_are_forgotten_by_several(caller_store: CallerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_BATCHES", 5)
    for number in range(30):
        caller_store.save_batch({"id": new_id("batch"), "created_at": number, "status": "completed"})
    at_once(caller_store.forget_old_batches, NotStored)
    assert [batch["created_at"] for batch in caller_store.batches()] == [29, 28, 27, 26, 25]


@pytest.mark.parametrize("failing", [".jsonl", ".json"])
def test_a_full_disk_leaves_nothing_behind(
    caller_store: CallerStore, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Whichever of a file's two parts it is that cannot be written."""
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.suffix == failing:
            raise OSError(errno.ENOSPC, "no space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        caller_store.add_file("in.jsonl", b"x" * 1000)
    assert caller_store.bytes_left() == caller_store.max_bytes


@pytest.mark.parametrize("content", [b"", b"\0" * 9, b"{}", b"[1]"])
def test_what_a_machine_has_damaged_hides_nothing_else(
    caller_store: CallerStore, tmp_path: Path, content: bytes
) -> None:
    """Files without content, as some file systems leave them behind a loss of power."""
    kept = caller_store.add_file("in.jsonl", b"x")
    batch = {"id": new_id("batch"), "created_at": 1, "status": "completed"}
    caller_store.save_batch(batch)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    lost_file, lost_batch = new_id("file"), new_id("batch")
    (folder / "files" / f"{lost_file}.json").write_bytes(content)
    (folder / "batches" / f"{lost_batch}.json").write_bytes(content)
    assert caller_store.files() == [kept]
    assert caller_store.batches() == [batch]
    with pytest.raises(NotStored):
        caller_store.file(lost_file)
    with pytest.raises(NotStored):
        caller_store.batch(lost_batch)
    caller_store.delete_file(kept["id"])


def test_what_a_gateway_left_half_written_is_removed(tmp_path: Path) -> None:
    for _ in range(2):
        kept = Store(tmp_path, 1000)
        assert kept.of("key").bytes_left() == 1000
        (part,) = (path / "files" / f"{new_id('file')}.jsonl.part" for path in tmp_path.iterdir() if path.is_dir())
        part.write_bytes(b"x" * 10)
        kept.close()
