"""Files and batches on disk, apart for each caller.

    FOLDER/lock                          held by the gateway that uses the folder
    FOLDER/OWNER/files/ID.json, ID.jsonl     what OpenAI's API says of a file, and the file
    FOLDER/OWNER/batches/ID.json             what OpenAI's API says of a batch
OWNER is a digest of the API key, so a caller sees what was made with the same key. No key is ever written.
"""

import fcntl
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import structlog

from gateway.errors import BodyTooLarge, InvalidField, NotStored
from gateway.schema import Json
from mesh.atomic_file import PART, write_atomically
from mesh.domain.errors import ConfigurationError

T = TypeVar("T")

log = structlog.get_logger(__name__)

MAX_FILES = 1000
MAX_BATCHES = 200
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_ID = re.compile(r"(?:file|batch)-[0-9a-f]{32}")


class Store:
    """The folder, locked until `close`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes` is for each caller. Raises ConfigurationError if the folder cannot be used."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._by_caller: dict[str, CallerStore] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigurationError(f"batch_folder {folder} is in use by another gateway") from None
        except OSError as error:
            raise ConfigurationError(f"batch_folder {folder}: {error.strerror}") from error

    def close(self) -> None:
        self._lock.close()

    def of(self, key: str | None) -> "CallerStore":
        name = sha256(key.encode()).hexdigest()[:32] if key else "anyone"
        if name not in self._by_caller:
            self._by_caller[name] = CallerStore(self._folder / name, self._max_bytes)
        return self._by_caller[name]


class CallerStore:
    """One caller's files and batches. Each caller has one such object.

    Methods that check and then change something run on a thread and hold the lock. Reading takes no lock, so the event
    loop never waits for a thread.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._files = folder / "files"
        self._batches = folder / "batches"
        self._lock = threading.Lock()
        for subfolder in (self._files, self._batches):
            subfolder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in subfolder.glob(f"*{PART}"):  # of a gateway that died
                part.unlink()

    def bytes_left(self) -> int:
        return self.max_bytes - sum(_of_existing(lambda path: path.stat().st_size, self._files.iterdir()))

    def add_file(self, name: str, content: bytes) -> Json:
        """Keep a batch's input. Raises BodyTooLarge or InvalidField."""
        with self._lock:
            if len(content) > self.bytes_left():
                raise BodyTooLarge(f"your files may have {self.max_bytes} bytes together: delete some")
            if sum(1 for _ in self._files.glob("*.json")) >= MAX_FILES:
                raise InvalidField(f"you may have {MAX_FILES:,} files: delete some")
            file_id = new_id("file")
            write_atomically(self.path_of(file_id), content)
            try:
                return self.describe_file(file_id, name, "batch")
            except OSError:
                self.path_of(file_id).unlink()
                raise

    def describe_file(self, file_id: str, name: str, purpose: str) -> Json:
        """Write the metadata of the file at `path_of(file_id)`."""
        about = {
            "id": file_id,
            "object": "file",
            "bytes": self.path_of(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": name[:256],
            "purpose": purpose,
            "status": "processed",
        }
        _write(self._files / f"{file_id}.json", about)
        return about

    def path_of(self, file_id: str) -> Path:
        """The file's place, whether it exists or not. Raises NotStored for an invalid id."""
        return self._files / f"{_checked(file_id)}.jsonl"

    def file(self, file_id: str) -> Json:
        return _read(self._files / f"{_checked(file_id)}.json", file_id)

    def files(self) -> list[Json]:
        return _newest_first(self._files.glob("*.json"))

    def delete_file(self, file_id: str) -> None:
        """Raises NotStored, or InvalidField while a batch reads the file. Answers appear as files at their end only."""
        with self._lock:
            self.file(file_id)
            for batch in self.batches():
                if batch["status"] not in ENDED and batch["input_file_id"] == file_id:
                    raise InvalidField(f"batch {batch['id']} reads this file: cancel it first")
            (self._files / f"{file_id}.json").unlink()
            self.path_of(file_id).unlink(missing_ok=True)

    def save_batch(self, batch: Json) -> None:
        _write(self._batches / f"{_checked(batch['id'])}.json", batch)

    def batch(self, batch_id: str) -> Json:
        return _read(self._batches / f"{_checked(batch_id)}.json", batch_id)

    def batches(self) -> list[Json]:
        return _newest_first(self._batches.glob("*.json"))

    def forget_old_batches(self) -> None:
        """Keep the newest. Their files stay."""
        with self._lock:
            for batch in self.batches()[MAX_BATCHES:]:
                if batch["status"] in ENDED:
                    (self._batches / f"{batch['id']}.json").unlink()


def new_id(kind: str) -> str:
    """Ids sort by the time at which they were made: OpenAI's `created_at` has whole seconds only."""
    return f"{kind}-{time.time_ns():016x}{uuid4().hex[16:]}"


def _checked(stored_id: str) -> str:
    """Ids become file names, so only ids of our form pass. Raises NotStored."""
    if not _ID.fullmatch(stored_id):
        raise NotStored(f"there is no {stored_id[:64]!r}")
    return stored_id


def _read(path: Path, stored_id: str) -> Json:
    try:
        return _about(path)
    except FileNotFoundError:
        raise NotStored(f"there is no {stored_id!r}") from None


def _about(path: Path) -> Json:
    """Raises FileNotFoundError also for a file that a machine has damaged when it lost its power."""
    try:
        about: Json = json.loads(path.read_bytes())
        about["id"], about["created_at"]
    except (ValueError, TypeError, KeyError):
        log.warning("a damaged file in batch_folder is left out", path=str(path))
        raise FileNotFoundError(path) from None
    return about


def _write(path: Path, about: Json) -> None:
    write_atomically(path, json.dumps(about).encode())


def _newest_first(paths: Iterable[Path]) -> list[Json]:
    return sorted(_of_existing(_about, paths), key=lambda about: (about["created_at"], about["id"]), reverse=True)


def _of_existing(read: Callable[[Path], T], paths: Iterable[Path]) -> Iterator[T]:
    """Yield `read(path)` of each file; those deleted meanwhile are left out."""
    for path in paths:
        try:
            yield read(path)
        except FileNotFoundError:
            continue
