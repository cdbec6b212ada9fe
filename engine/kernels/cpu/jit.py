"""Compilation of the kernels: without the GIL, with machine code kept on disk.

numba identifies code on disk by the file of the outermost function and ignores changes in the functions it calls. The
cache folder's name therefore contains a digest of all files of this package. The folder is in numba's own folder
(NUMBA_CACHE_DIR) if that is set, otherwise in the user's cache. If it is not writable, nothing is kept: numba would
write beside the sources instead, where code outlives an update.
"""

import inspect
import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from llvmlite import binding
from numba.core import config
from numba.extending import overload

P = ParamSpec("P")
R = TypeVar("R")
_config: Any = config
_binding: Any = binding
_binding.initialize_native_asmparser()  # for the instructions that LLVM has no intrinsic for
OPTIONS: Any = {"nogil": True, "fastmath": True, "error_model": "numpy"}


@lru_cache(maxsize=1)
def _cache_dir() -> str | None:
    """The folder of this version's machine code, or None if it is not writable."""
    digest = blake2b(numba.__version__.encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    base = _config.CACHE_DIR or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tandem"
    )
    folder = os.path.join(base, f"compiled-{digest.hexdigest()}")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile the function at its first call with each combination of argument types."""
    previous, folder = _config.CACHE_DIR, _cache_dir()
    compiled: Callable[P, R]
    if folder is None:
        compiled = numba.njit(**OPTIONS)(function)
        return compiled
    _config.CACHE_DIR = folder  # numba reads it while decorating only
    try:
        compiled = numba.njit(cache=True, **OPTIONS)(function)
    finally:
        _config.CACHE_DIR = previous
    return compiled


def select_by_dtype(declared: Callable[P, R], dtype: Any, matching: Callable[P, R], other: Callable[P, R]) -> None:
    """Make compiled calls of `declared` run `matching` if the last argument is of this numba type, and `other` if not.

    The three functions must have the same parameters and annotations, which numba compares.
    """

    def select(*args: Any) -> Callable[P, R]:
        return matching if args[-1] == dtype else other

    select.__signature__ = inspect.signature(matching)  # type: ignore[attr-defined]
    overload(declared, jit_options=OPTIONS)(select)
