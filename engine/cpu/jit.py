"""How loops are compiled here: for threads without the GIL, machine code kept on disk.

numba knows code on disk by the file of the outermost function and not by what it calls; so the folder's name has a
digest of all files of this package. It is in numba's own folder (NUMBA_CACHE_DIR) if that is set, else in the user's
cache. Where it cannot be written, nothing is kept: numba's next choice, beside the sources, would outlive an update.
"""

import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core import config

_config: Any = config
_binding: Any = binding
_binding.initialize_native_asmparser()  # for the few instructions that LLVM has no name for
OPTIONS: Any = {"nogil": True, "fastmath": True, "error_model": "numpy"}


@lru_cache(maxsize=1)
def _cache_dir() -> str | None:
    """None if it cannot be written."""
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


def jit(function: Callable[..., Any]) -> Any:
    """Compile at the first call with each combination of types."""
    usual, folder = _config.CACHE_DIR, _cache_dir()
    if folder is None:
        return numba.njit(**OPTIONS)(function)
    _config.CACHE_DIR = folder  # looked at while decorating only
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    finally:
        _config.CACHE_DIR = usual
