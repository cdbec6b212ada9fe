"""Processes of benchmarks: the cores that they may use, and the CPU time that they have used."""

from collections.abc import Iterable

import psutil

from mesh.domain.host import format_cores


def on_cores(cores: Iterable[int], *command: str) -> tuple[str, ...]:
    """The command on these cores.

    Not by `preexec_fn`: Python forks for it, and gRPC's threads of this process then begin anew in a child that has
    closed their files, which ends it now and then.
    """
    return ("taskset", "--cpu-list", format_cores(tuple(sorted(cores))), *command)


def cpu_s(*processes: psutil.Process) -> float:
    """CPU seconds of these processes so far."""
    return sum(float(times.user + times.system) for times in (process.cpu_times() for process in processes))
