"""Imported by the fork server of tests (warm_fork.py), so that workers start with less than half of the CPU time.

It reads the machine code that most of them need, which forks then have. They commit fewer pages of KV ahead: clearing
those of a usual worker takes 0.15 s on a virtual machine. Programs that are executed do all this themselves.
"""

from functools import partial
from typing import Any

import torch

from engine.compiled_code import compile_code
from engine.kv_pages import PagesAhead
from engine.load_runner import load_model_runner
from engine.runner_settings import RunnerSettings
from tandem_cli.model_folders import BUNDLED
from worker import engine_host

_DTYPES = ("float16", "float32")
"""That of the bundled model, and that of random checkpoints."""
_AHEAD_BYTES = 1 << 20
_host: Any = engine_host


def _read_kernels() -> None:
    """On this thread only: a fork has no other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in _DTYPES:
        compile_code(RunnerSettings(BUNDLED, dtype=dtype), load_model_runner)
    torch.set_num_threads(num_threads)


_read_kernels()
_host.PagesAhead = partial(PagesAhead, ahead_bytes=_AHEAD_BYTES)
