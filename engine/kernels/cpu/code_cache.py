"""Keeps numba's machine code in one folder, wherever the sources lie.

numba's own locators tell functions apart by the path of their file, so that another checkout or environment with the
same files would compile everything again.
"""

import fcntl
import os
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numba.core import caching

_caching: Any = caching  # numba does not annotate it


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
    """The kept code of one function, for all types of its arguments."""

    def __init__(self, folder: str, function: Any) -> None:
        self._impl_class = partial(_FunctionCode, folder)
        super().__init__(function)

    def save_overload(self, signature: Any, data: Any) -> None:
        """numba numbers a function's files, so that two processes that save code for different types at the same
        moment would write the same file.
        """
        with open(os.path.join(self._cache_path, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(signature, data)
