"""Imported by the fork server of tests (warm_fork.py): reads the machine code that most workers need, which its forks
then have. Programs that are executed read it themselves.
"""

import torch

from engine.compiled_code import compile_code
from engine.loading.load_runner import load_model_runner
from engine.runner_settings import RunnerSettings
from tandem_cli.model_files.model_folders import BUNDLED

_DTYPES = ("float16", "float32")
"""That of the bundled model, and that of random checkpoints."""


def _read_kernels() -> None:
    """On this thread only: a fork has no other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in _DTYPES:
        compile_code(RunnerSettings(BUNDLED, dtype=dtype), load_model_runner)
    torch.set_num_threads(num_threads)


_read_kernels()
