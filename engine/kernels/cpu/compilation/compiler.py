"""Compilation of the kernels, and their machine code on disk.

Kernels run without the GIL, unless they take microseconds. numba identifies code on disk by the file of the outermost
function and ignores changes in the functions it calls. The cache folder's name therefore contains a digest of all that
the code depends on: the files of the kernels, versions, and the kind of CPU. Within the folder numba finds code by the
types of arguments, which are the arithmetic of a model (code_cache.py). The folder is in numba's own folder
(NUMBA_CACHE_DIR) if that is set, otherwise in the user's cache. A folder that is not writable is only read.
"""

import os
import platform
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import llvmlite
import numba
from llvmlite import binding
from numba.core import config
from numba.core.registry import cpu_target

from engine.kernels.cpu.compilation.code_cache import keep, open_folder
from engine.kernels.cpu.compilation.parts import OPTIONS, PART_OPTIONS, PartDispatcher
from engine.kernels.cpu.machine import (
    LIMIT_NAME,
    abilities,
    is_allowed,
)

P = ParamSpec("P")
R = TypeVar("R")
_config: Any = config
_binding: Any = binding
_binding.initialize_native_asmparser()  # for the instructions that LLVM has no intrinsic for
if LIMIT_NAME in os.environ and _config.CPU_FEATURES is None:
    _features = _binding.get_host_cpu_features()
    _features.update({name: has and is_allowed(name) for name, has in _features.items()})
    _config.CPU_FEATURES = _features.flatten()
# numba reads the declarations of its library, which takes a third of a second, before it runs its first function. It
# does so here, because forked services share what was read before.
_cpu_target: Any = cpu_target
_cpu_target.target_context.refresh()
dispatchers: list[Any] = []
"""numba's objects of all functions that `entry` has made: they count what they load and compile."""


@lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of what all compiled code depends on: the kernels, the versions of what compiles them, and the CPU."""
    cpu = (
        _config.CPU_NAME or _binding.get_host_cpu_name(),
        _config.CPU_FEATURES or _binding.get_host_cpu_features().flatten(),
        abilities(),
    )
    versions = (numba.__version__, llvmlite.__version__, platform.python_version())
    digest = blake2b(repr((versions, cpu)).encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def code_folder() -> str | None:
    """The folder of this version's machine code, or None if it is not there and cannot be made."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = _config.CACHE_DIR or os.path.join(cache_home, "tandem")
    # A user without a home, as in containers that run as any user id, has no ~ either.
    return None if base.startswith("~") else open_folder(base, code_version())


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile the function as a part of the compiled functions that call it, for each combination of argument types."""
    dispatcher: Any = numba.njit(**PART_OPTIONS)(function)
    dispatcher.__class__ = PartDispatcher
    compiled: Callable[P, R] = dispatcher
    return compiled


def entry(function: Callable[P, R], **options: bool) -> Callable[P, R]:
    """Compile the function, which may be one of `jit`, at its first call from Python with each combination of argument
    types, and keep its machine code on disk. Between short functions a step should keep the GIL (`nogil=False`), which
    it may get back late.
    """
    plain: Any = getattr(function, "py_func", function)
    dispatcher: Any = numba.njit(**{**OPTIONS, **options})(plain)
    if (folder := code_folder()) is not None:
        keep(dispatcher, plain, folder)
    dispatchers.append(dispatcher)
    compiled: Callable[P, R] = dispatcher
    return compiled
