"""The work of `tandem up` before it starts services: download within a time limit, and what a deployment takes from the
settings of its services: switchable workers, the address for ranks on other machines, a partition.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from checkpoint.source import Progress
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import is_loopback
from mesh.line_writer import flush_steady_output
from mesh.settings import as_flags
from router.settings import RouterSettings
from tandem_cli.local_mesh.deployment import Deployment
from tandem_cli.local_mesh.display import Display

_ANY_ADDRESS = ("0.0.0.0", "[::]")


@contextmanager
def limited_download(limit_s: float | None, display: Display) -> Iterator[Callable[[str], Progress]]:
    """Yield the callback for `prepare_models`, which shows the progress. Ends the process after `limit_s`."""
    fractions: dict[str, float] = {}

    def show(name: str, fraction: float) -> None:
        fractions[name] = fraction
        display.loading(f"download {name}", fraction)

    def give_up() -> None:
        display.loaded()
        done = ", ".join(f"{fraction:.0%} of {name}" for name, fraction in fractions.items()) or "nothing"
        sys.stderr.write(f"tandem: {done} downloaded after {limit_s:g} s: raise model_loading_timeout, or try again\n")
        flush_steady_output()
        # An orderly exit is impossible: threads of the download are in the middle of a read.
        os._exit(1)

    timer = threading.Timer(threading.TIMEOUT_MAX if limit_s is None else limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield lambda name: partial(show, name)
    finally:
        timer.cancel()
        display.loaded()


def with_switchable(deployment: Deployment, environ: Mapping[str, str]) -> Deployment:
    """Make all workers switchable if the router is to let them change their roles. Raises ConfigurationError."""
    router: RouterSettings = deployment.resolve(deployment.router(), environ)
    settings = deployment.settings
    if not (settings.switchable or router.switch_roles):
        return deployment
    if settings.on:
        name = "switch_roles" if router.switch_roles else "switchable"
        raise ConfigurationError(f"{name} and on={settings.on} do not fit: workers on Ray have one role each")
    return replace(deployment, settings=replace(settings, switchable=True))


def with_decode_host(deployment: Deployment, environ: Mapping[str, str]) -> Deployment:
    """Let decode workers listen where ranks of prefill workers on other machines, which send KV themselves, reach them:
    at the address that these ranks dial. Raises ConfigurationError.
    """
    hosts = {
        settings.listen_for_ranks().host
        for worker, settings in deployment.worker_settings(environ)
        if worker.role == "prefill" and settings.rank_listen
    }
    if not (far := sorted(host for host in hosts if not is_loopback(host))):
        return deployment
    if far[0] in _ANY_ADDRESS:
        raise ConfigurationError(
            f"prefill.rank_listen must name an address of this machine, not {far[0]}: ranks on other machines send KV "
            "to the decode workers, which listen there, too"
        )
    return replace(deployment, decode_host=far[0])


def with_partition(deployment: Deployment, environ: Mapping[str, str], display: Display) -> Deployment:
    """The deployment with the partition in place of the model's folder; the same if none is wanted.

    Writing takes about as long as a worker takes to load the checkpoint. Raises ConfigurationError.
    """
    folder = deployment.settings.partition
    if not folder:
        return deployment
    if len(deployment.models) > 1:
        raise ConfigurationError("--partition is for a mesh with one model: run `tandem partition` for each")
    [model] = deployment.models
    partitions = {
        (settings.tensor_parallel, settings.degrees().pipeline, settings.quantize, settings.dtype)
        for _, settings in deployment.worker_settings(environ)
    }
    if len(partitions) > 1:
        listed = " and ".join(
            f"tensor_parallel {tensor}, pipeline_parallel {pipeline}, dtype {dtype} with quantize {scheme}"
            for tensor, pipeline, scheme, dtype in sorted(partitions)
        )
        raise ConfigurationError(f"--partition is for workers with equal settings, and these have {listed}")
    [(tensor, pipeline, quantize, dtype)] = partitions
    display.line(f"partition: {folder}")
    flags = as_flags(tensor_parallel=tensor, pipeline_parallel=pipeline, quantize=quantize, dtype=dtype)
    display.line(_run_partition(("--reuse", *flags, "--", model.folder, folder), environ.get("PYTHONPATH", "")))
    return replace(deployment, models=(replace(model, folder=folder),))


def _run_partition(arguments: Sequence[str], python_path: str) -> str:
    """Run `tandem partition` in a process of its own, whose memory is free afterwards. Returns what it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem_cli", "partition", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which passes it on
        text=True,
        env=os.environ | ({"PYTHONPATH": python_path} if python_path else {}),
    )
    try:
        out, err = process.communicate()
    except BaseException:  # a signal: the child removes what it has written
        process.terminate()
        process.communicate()
        raise
    if process.returncode != 0:
        lines = err.strip().splitlines() or [f"tandem partition ended with status {process.returncode}"]
        raise ConfigurationError(lines[-1].removeprefix("tandem: "))
    return out.partition(";")[0].strip()
