"""Keeps numba's machine code in one folder, wherever the sources lie.

numba's own cache tells functions apart by the path of their file, so that another checkout or environment with the same
files would compile everything again. It also has an index of each function's files, which only one process may change
at a time. Here the code of a function for one combination of types is one file, under a name that follows from all that
the code depends on. It is renamed into place when it is complete, so any number of processes may read and write at any
time. A lock only saves work.
"""

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import structlog
from numba.core import caching, compiler, compiler_lock, serialize
from numba.core.registry import CPUDispatcher, cpu_target

log = structlog.get_logger(__name__)

UNUSED_S = 30 * 24 * 3600.0
PATIENCE_S = 120.0
"""A process waits for another one that compiles what it needs, but no longer than this: the other may be stopped."""
_TOLD_AFTER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_DIGEST_BYTES = 16

# numba does not annotate these.
_Cache: Any = caching.Cache
_CompileResult: Any = compiler.CompileResult
_CPUDispatcher: Any = CPUDispatcher
_compiler_lock: Any = compiler_lock.global_compiler_lock
_serialize: Any = serialize
_target: Any = cpu_target


def open_folder(base: str, version: str) -> str | None:
    """The folder in `base` of one version's machine code, or None if it is not there and cannot be made. A new
    version's first start deletes the folders of versions that no process has opened for UNUSED_S.
    """
    folder = Path(base, f"compiled-{version}")
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    with suppress(OSError):  # a folder that may only be read
        os.utime(folder)
    if is_new:
        _delete_unused(base)
    return str(folder)


def _delete_unused(base: str) -> None:
    for folder in Path(base).glob("compiled-*"):
        with suppress(OSError):  # another process has deleted it
            if folder.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(folder)


class CodeCache(_Cache):
    """The kept code of one function, for all types of its arguments. Code that cannot be read is compiled again, and
    code that cannot be written is not kept.
    """

    def __init__(self, folder: str, function: Any) -> None:
        self._folder = Path(folder)
        self._py_func = function  # whose code and closure are part of numba's `_index_key`
        code = function.__code__
        source = blake2b(Path(code.co_filename).read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()
        self._source = (source, function.__qualname__, code.co_firstlineno)
        self.failure = ""
        """The reason why code was not kept; empty if all was."""

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def path(self, signature: Any) -> Path:
        """The file with the code for these types."""
        key = (*self._source, *self._index_key(signature, _target.target_context.codegen()))
        return self._folder / f"{self._py_func.__name__}-{_digest(str(key).encode()).hex()}.code"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        try:
            content = self.path(signature).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn("compiled code cannot be read", self.cache_path, str(error))
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if _digest(code) != digest:  # it ends too early, as after a power failure, or has changed
            return None
        return _CompileResult._rebuild(target_context, *_serialize.loads(code))

    def save_overload(self, signature: Any, result: Any) -> None:
        path = self.path(signature)
        new = path.with_suffix(f".{uuid4().hex}")
        code = _serialize.dumps(result._reduce())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(_digest(code) + code)
            new.replace(path)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            self.failure = error.strerror or str(error)
            _warn("compiled code cannot be kept", self.cache_path, self.failure)

    @contextmanager
    def turn(self, signature: Any) -> Iterator[None]:
        """Of several processes that need code which is not kept yet, as the workers of a first start do, let one into
        the block, which compiles it, and the others when it is there. All enter where files cannot be locked.
        """
        path = self.path(signature)
        with ExitStack() as lock:
            if not path.exists():
                with suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    subject = f"machine code of {self._py_func.__qualname__}"
                    lock.enter_context(_locked(path.with_suffix(".lock"), subject))
            yield


class KeptDispatcher(_CPUDispatcher):
    """A compiled function whose code a CodeCache keeps."""

    def compile(self, signature: Any) -> Any:
        with _compiler_lock, self._cache.turn(signature):
            return super().compile(signature)


def keep(dispatcher: Any, function: Any, folder: str) -> None:
    """Keep the code of a function that numba compiles."""
    dispatcher.__class__ = KeptDispatcher
    dispatcher._cache = CodeCache(folder, function)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


@contextmanager
def _locked(path: Path, subject: str) -> Iterator[None]:
    """Hold the lock of the file at `path` in the block, unless another process does not let go of it for PATIENCE_S.
    `subject` is what the log says it is for. Raises OSError if the file cannot be written or locked.
    """
    with path.open("a+") as file:
        if _wait(file, subject):
            with suppress(OSError):  # a full disk
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process has the file, too


def _wait(file: TextIO, subject: str) -> bool:
    """Take the lock; False if the patience for its holder has ended."""
    begun_s, pause_s, is_told = time.monotonic(), _FIRST_PAUSE_S, False
    while not _take(file):
        waited_s = time.monotonic() - begun_s
        if waited_s >= PATIENCE_S:
            log.warning("a lock is passed over", subject=subject, holder=_holder(file), waited_s=round(waited_s))
            return False
        if waited_s >= _TOLD_AFTER_S and not is_told:
            is_told = True
            log.info("waiting for another process", subject=subject, holder=_holder(file), lock=file.name)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _take(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read(200) or "an unknown process"


@cache
def _warn(event: str, folder: str, error: str) -> None:
    """Log this once, not for every function."""
    log.warning(event, folder=folder, error=error)
