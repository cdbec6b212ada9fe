"""Machine code of the kernels on disk, where the next process finds it.

numba identifies code by the file of the outermost function and ignores changes in the functions it calls. The folder's
name therefore contains a digest of all that the code depends on: the files of this package, versions, and the kind of
CPU. Where the package lies does not matter, so another checkout or environment with the same files compiles nothing.
Within the folder numba finds code by the types of arguments, which are the arithmetic of a model. The folder is in
numba's own folder (NUMBA_CACHE_DIR) if that is set, otherwise in the user's cache. If it is not writable, nothing is
kept: numba would write beside the sources instead, where code outlives an update.
"""

import fcntl
import os
import platform
import tempfile
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba.core import caching, config

from engine.kernels.cpu.machine import knows_amx, knows_avx512, knows_bf16, knows_vnni

# numba does not annotate these.
_caching: Any = caching
_config: Any = config
_binding: Any = binding


@lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of what all compiled code depends on: this package, the versions of what compiles it, and the CPU."""
    cpu = (
        _config.CPU_NAME or _binding.get_host_cpu_name(),
        _config.CPU_FEATURES or _binding.get_host_cpu_features().flatten(),
        (knows_avx512(), knows_vnni(), knows_bf16(), knows_amx()),
    )
    versions = (numba.__version__, llvmlite.__version__, platform.python_version())
    digest = blake2b(repr((versions, cpu)).encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def code_folder() -> str | None:
    """The folder of this version's machine code, or None if it is not writable."""
    base = _config.CACHE_DIR or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tandem"
    )
    folder = os.path.join(base, f"compiled-{code_version()}")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


class _Locator(_caching._CacheLocator):
    """Tells numba where the code of a function is kept."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file = file  # numba names it in warnings
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str | None:
        return code_folder()

    def get_source_stamp(self) -> bytes:
        return blake2b(Path(self._py_file).read_bytes(), digest_size=8).digest()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Any, file: str) -> "_Locator":
        return cls(function, file)


class _FunctionCode(_caching.CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class CodeCache(_caching.FunctionCache):
    """The kept code of one function, for all types of its arguments."""

    _impl_class = _FunctionCode

    def save_overload(self, signature: Any, data: Any) -> None:
        """numba numbers a function's files, so that two processes that save code for different types at the same
        moment would write the same file.
        """
        with open(os.path.join(self._cache_path, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(signature, data)
