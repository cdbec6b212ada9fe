"""Describes the machine on which figures were measured."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import tandem

_PACKAGES = ("torch", "grpcio", "numpy", "numba")


def describe_machine() -> dict[str, Any]:
    """Hardware, load and versions, which a reader needs in order to compare figures."""
    return {
        "cpu": _cpu_model(),
        "cores_allowed": num_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "tandem": tandem.__version__,
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
