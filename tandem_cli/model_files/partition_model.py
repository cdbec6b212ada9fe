"""The work of `tandem partition`, which needs the engine."""

import argparse
import sys
import time
from dataclasses import replace
from shlex import quote

from checkpoint.files import require_other_files
from checkpoint.new_folder import require_absent
from checkpoint.partition_manifest import Partition, read_partition, source_of
from checkpoint.source import ModelSource
from engine.cores import num_numa_nodes
from engine.loading.partition import write_partition
from engine.loading.resolve import fitting_ranks, kv_layout, resolve, rounded_to, weights_digest, why_eager
from engine.loading.runner_parts import load_packed
from engine.models.model_config import ModelConfig
from engine.models.share import rank_share, require_own_heads
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.model_files.model_folders import find_model


def partition_model(args: argparse.Namespace) -> int:
    """Partition the model. Returns the exit status."""
    began_s = time.monotonic()
    model_dir = find_model(ModelSource(args.model))
    if args.device != "cpu":
        raise ConfigurationError(
            f"partitions for {args.device} are not built: workers there load the checkpoint itself"
        )
    runner_settings = RunnerSettings(model_dir, quantize=args.quantize, dtype=args.dtype)
    degrees = Degrees(_tensor_parallel(args.tensor_parallel, runner_settings), args.pipeline_parallel)
    written = read_partition(args.out) if args.reuse else None
    if not written:
        require_absent(args.out)
    require_other_files(model_dir)
    source = {} if written else source_of(model_dir)  # before anything of it is read
    settings, config = resolve(runner_settings)
    if not isinstance(config, ModelConfig):
        raise ConfigurationError("an encoder-decoder model cannot be partitioned: its decoder is not compiled")
    digest = weights_digest(model_dir, rounded_to(settings, config)).hex()
    if written:
        _require(written, settings, degrees, digest)
        sys.stdout.write(f"{args.out}: holds this partition\n")
        return 0
    if read_partition(model_dir) is not None:
        raise ConfigurationError(f"{model_dir} is partitioned already")
    if (reason := why_eager(settings, config, kv_layout(config, settings))) is not None:
        raise ConfigurationError(f"only models of the compiled decoder can be partitioned: {reason}")
    require_own_heads(config, degrees)
    shares = [rank_share(config, rank, degrees) for rank in range(max(1, degrees.num_ranks))]
    ranks = (load_packed(settings, config, share) for share in shares)
    facts = {"weights_digest": digest, "quantize": settings.quantize, "dtype": settings.dtype}
    partition = write_partition(model_dir, args.out, ranks, degrees=degrees, source=source, **facts)
    flags = "".join(
        f" --{name} {value}"
        for name, value, default in (
            ("tensor-parallel", degrees.tensor, 1),
            ("pipeline-parallel", degrees.pipeline, 1),
            ("quantize", settings.quantize, "none"),
        )
        if value != default
    )
    sys.stdout.write(
        f"{args.out}: {len(shares)} x {partition.num_bytes / len(shares) / 1e6:.0f} MB "
        f"in {time.monotonic() - began_s:.1f} s; "
        f"serve it with: tandem up {quote(str(args.out))}{flags}\n"
    )
    return 0


def _tensor_parallel(degree: str, runner_settings: RunnerSettings) -> int:
    """The degree as a number, "max" as workers understand it. Raises ConfigurationError."""
    if degree == "max":
        return fitting_ranks(replace(runner_settings, tensor_parallel=num_numa_nodes()))
    if not degree.isdecimal() or int(degree) < 1:
        raise ConfigurationError(f"tensor_parallel must be at least 1, or max, got {degree!r}")
    return int(degree)


def _require(partition: Partition, settings: RunnerSettings, degrees: Degrees, digest: str) -> None:
    """Raise ConfigurationError unless the partition is the one that is to be written."""
    partition.require(degrees, settings.quantize, settings.dtype)
    if partition.weights_digest != digest:
        raise ConfigurationError(
            f"{partition.folder} is a partition of another checkpoint than {settings.model_dir}: choose another folder"
        )
    partition.require_source(settings.model_dir)
    for file in partition.files:
        partition.require_file(file)
