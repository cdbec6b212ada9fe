"""`tandem up --partition FOLDER`: the model is partitioned into the folder, unless it is there, and served from it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesh.domain.errors import ConfigurationError
from tandem_cli.deployment import Deployment
from tandem_cli.display import Display


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
    workers = [deployment.resolve(worker, environ) for worker in deployment.workers("127.0.0.1:1")]
    partitions = {
        (worker.tensor_parallel, worker.degrees().pipeline, worker.quantize, worker.dtype) for worker in workers
    }
    if len(partitions) > 1:
        listed = " and ".join(
            f"tensor_parallel {tensor}, pipeline_parallel {pipeline}, dtype {dtype} with quantize {scheme}"
            for tensor, pipeline, scheme, dtype in sorted(partitions)
        )
        raise ConfigurationError(f"--partition is for workers with equal settings, and these have {listed}")
    [(tensor, pipeline, quantize, dtype)] = partitions
    display.line(f"partition: {folder}")
    degrees = (f"--tensor-parallel={tensor}", f"--pipeline-parallel={pipeline}")
    flags = ("--reuse", *degrees, f"--quantize={quantize}", f"--dtype={dtype}")
    display.line(_run((*flags, "--", model.folder, folder), environ.get("PYTHONPATH", "")))
    return replace(deployment, models=(replace(model, folder=folder),))


def _run(arguments: Sequence[str], python_path: str) -> str:
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
