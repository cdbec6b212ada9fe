"""Keeps numba's machine code in one folder, wherever the sources lie.

numba's own locators tell functions apart by the path of their file, so that another checkout or environment with the
same files would compile everything again.
"""

import os
import shutil
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog
from numba.core import caching
from numba.core.registry import CPUDispatcher

from engine.kernels.cpu.code_lock import locked

log = structlog.get_logger(__name__)

UNUSED_S = 30 * 24 * 3600.0

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


@cache
def _warn(event: str, folder: str, error: str) -> None:
    """Log this once, not for every function."""
    log.warning(event, folder=folder, error=error)
