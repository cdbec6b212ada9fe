"""Keeps numba's machine code in one folder, wherever the sources lie.

numba's own locators tell functions apart by the path of their file, so that another checkout or environment with the
same files would compile everything again.
"""

import fcntl
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import structlog
from numba.core import caching
from numba.core.registry import CPUDispatcher

log = structlog.get_logger(__name__)

UNUSED_S = 30 * 24 * 3600.0
SIGN_S, PATIENCE_S = 1.0, 20.0
"""The system frees the lock of a process that has died, but not that of one that is stopped, or whose machine swaps. So
the holder of a lock touches its file every SIGN_S, and others wait only until it has not done so for PATIENCE_S.
"""
_MAX_SIGNS = 900  # a compilation that hangs while its process runs
_TOLD_AFTER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

_caching: Any = caching  # numba does not annotate it
_CPUDispatcher: Any = CPUDispatcher
_DAMAGED = (EOFError, _caching.pickle.UnpicklingError)
"""What numba raises for files that end too early, as after a power failure."""


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


class _Locator(_caching._CacheLocator):
    """Tells numba where the code of a function is kept."""

    def __init__(self, folder: str, function: Any, file: str) -> None:
        self._folder = folder
        self._py_file = file  # numba names it in warnings
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> bytes:
        return blake2b(Path(self._py_file).read_bytes(), digest_size=8).digest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _FunctionCode(_caching.CompileResultCacheImpl):
    def __init__(self, folder: str, function: Any) -> None:
        self._folder = folder
        self._locator_classes = (self,)
        super().__init__(function)

    def from_function(self, function: Any, file: str) -> _Locator:
        """numba asks its classes of locators this."""
        return _Locator(self._folder, function, file)


class CodeCache(_caching.FunctionCache):
    """The kept code of one function, for all types of its arguments. Code that cannot be read is compiled again, and
    code that cannot be written is not kept. Of several processes that need the same code, as the workers of a first
    start do, one compiles it and the others wait, as long as it gives signs of life.
    """

    def __init__(self, folder: str, function: Any) -> None:
        self._impl_class = partial(_FunctionCode, folder)
        self.failure = ""
        """The reason why code was not kept; empty if all was."""
        self._compiling: dict[Any, ExitStack] = {}
        super().__init__(function)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        found = self._load(signature, target_context)
        if found is None and signature not in self._compiling:
            self._compiling[signature] = ExitStack()
            with suppress(OSError):  # a folder that may only be read, or a holder that is stopped
                self._compiling[signature].enter_context(self._locked(f"{self._digest(signature)}.lock"))
                found = self._load(signature, target_context)
        return found

    def _load(self, signature: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(signature, target_context)
        except _DAMAGED:
            with suppress(OSError), self._locked():
                self.flush()
        except OSError as error:
            _warn("compiled code cannot be read", self._cache_path, str(error))
        return None

    def save_overload(self, signature: Any, data: Any) -> None:
        try:
            with self._locked():
                super().save_overload(signature, data)
        except OSError as error:
            self.failure = error.strerror or str(error)
            _warn("compiled code cannot be kept", self._cache_path, self.failure)

    def let_others(self, signature: Any) -> None:
        """The code is loaded, compiled, or cannot be compiled."""
        self._compiling.pop(signature, ExitStack()).close()

    def _digest(self, signature: Any) -> str:
        return blake2b(f"{self._impl.filename_base} {signature}".encode(), digest_size=8).hexdigest()

    def _locked(self, name: str = "lock") -> AbstractContextManager[None]:
        """Without `name`: numba numbers a function's files, so that two processes that save code for different types at
        the same moment would write the same file.
        """
        os.makedirs(self._cache_path, exist_ok=True)
        return locked(os.path.join(self._cache_path, name), f"machine code of {self._py_func.__qualname__}")


class KeptDispatcher(_CPUDispatcher):
    """A compiled function whose code a CodeCache keeps."""

    def compile(self, signature: Any) -> Any:
        try:
            return super().compile(signature)
        finally:
            self._cache.let_others(signature)


def keep(dispatcher: Any, function: Any, folder: str) -> None:
    """Keep the code of a function that numba compiles."""
    dispatcher.__class__ = KeptDispatcher
    dispatcher._cache = CodeCache(folder, function)


@contextmanager
def locked(path: str, subject: str) -> Iterator[None]:
    """Hold the lock of the file at `path` in the block. `subject` is what the log says it is for. Raises OSError if the
    file cannot be written, and TimeoutError, which is one, if the holder of the lock gives no sign.
    """
    with open(path, "a+") as file:
        _wait(file, subject)
        is_over = threading.Event()
        signs = threading.Thread(target=_give_signs, args=(file.fileno(), is_over), name="code-lock", daemon=True)
        try:
            with suppress(OSError):  # a full disk
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
            with suppress(RuntimeError):  # the system has no thread for it
                signs.start()
            yield
        finally:
            is_over.set()
            if signs.ident is not None:
                signs.join()
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process has the file, too


def _give_signs(fd: int, is_over: threading.Event) -> None:
    for _ in range(_MAX_SIGNS):
        if is_over.wait(SIGN_S):
            return
        with suppress(OSError):
            os.utime(fd)


def _wait(file: TextIO, subject: str) -> None:
    begun_s = seen_s = time.monotonic()
    sign, pause_s, is_told = None, _FIRST_PAUSE_S, False
    while not _take(file):
        now_s, last_sign = time.monotonic(), os.fstat(file.fileno()).st_mtime_ns
        if last_sign != sign:
            sign, seen_s = last_sign, now_s
        if now_s - seen_s >= PATIENCE_S:
            log.warning("a lock is passed over", subject=subject, holder=_holder(file), silent_s=round(now_s - seen_s))
            raise TimeoutError(f"{_holder(file)} holds the lock {file.name} and gives no sign of life")
        if now_s - begun_s >= _TOLD_AFTER_S and not is_told:
            is_told = True
            log.info("waiting for another process", subject=subject, holder=_holder(file), lock=file.name)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


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
