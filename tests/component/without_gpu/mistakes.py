"""Copies of Triton kernels in which something is wrong."""

import inspect
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def changed(kernels: ModuleType, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """A copy of the kernels, in a file that Triton can read; `changes`: text that occurs once, and what replaces it."""
    source = inspect.getsource(kernels)
    for right, wrong in changes:
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    path = folder / "kernels_with_a_mistake.py"
    path.write_text(source)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
