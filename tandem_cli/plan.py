"""`tandem plan`: memory and best-case speed of a model on a device, and the number of workers that a load needs.

The engine is imported only to measure this machine and to divide a model among ranks.
"""

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.partition_manifest import Partition, read_partition
from checkpoint.source import ModelSource
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.model_config import ModelConfig
from engine.models.read_config import load_config
from engine.quantized_formats.config import read_quantization
from engine.settings import QUANTIZATIONS, STORED_ENCODING
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, KV_DTYPE_BYTES, Degrees
from mesh.logs import quiet_logs
from tandem_cli.capacity.model_size import model_size
from tandem_cli.capacity.prediction import (
    PREFILL,
    Load,
    PlanRequest,
    batches_to_plan,
    decode_name,
    plan_capacity,
    read_measured,
)
from tandem_cli.capacity.roofline import DEVICES, QUANTIZED, Capacity, Device, Precision, find_device
from tandem_cli.model_files.model_folders import find_model, load_format_of
from tandem_cli.parser import CommandParser, count, positive
from tandem_cli.plan_tables import show
from tandem_cli.terminal import wide_console

if TYPE_CHECKING:
    from engine.runner_settings import RunnerSettings
    from tandem_cli.capacity.ranks import RankMemory

MODEL_HELP = (
    "model folder (its config.json is enough), name of a bundled model (default: tandem-small), or org/name or "
    "s3://bucket/prefix, which is fetched whole"
)
_HERE = "here"
_LENGTHS = (2048, 8192, 32_768, 131_072)


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("model", nargs="?", default="tandem-small", metavar="MODEL", help=MODEL_HELP)
    add_precision(parser)
    about = "ranks that divide heads and weights of a worker (1, or those of a partitioned model)"
    parser.add_argument("--tensor-parallel", type=count, metavar="N", help=about)
    about = "stages that divide the layers of a worker, each with as many ranks (1, or those of a partitioned model)"
    parser.add_argument("--pipeline-parallel", type=count, metavar="N", help=about)
    add_device(parser)
    _add_adapters(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--input-tokens", type=count, default=256, metavar="N", help="tokens of a prompt (256)")
    load.add_argument("--output-tokens", type=count, default=64, metavar="N", help="tokens of an answer (64)")
    about = "sequences per decode step (default: those of 1 8 32 128 that fit)"
    load.add_argument("--batch", type=count, nargs="+", metavar="N", help=about)
    demand = load.add_mutually_exclusive_group()
    demand.add_argument("--rate", type=positive, default=1.0, metavar="R", help="requests per second (1)")
    demand.add_argument(
        "--users",
        type=count,
        metavar="N",
        help="instead of a rate: users who send their next request immediately",
    )
    load.add_argument(
        "--link-gbit-per-s",
        type=positive,
        nargs="+",
        default=[10.0, 100.0],
        metavar="G",
        help="bandwidth of the links that carry KV (10 100)",
    )
    measured = parser.add_argument_group("measurements to show beside the predictions")
    measured.add_argument("--measure", action="store_true", help="measure the engine with this model on this machine")
    measured.add_argument("--measured", type=Path, metavar="FILE", help="show results that tandem bench --json wrote")
    parser.add_argument(
        "--price-per-hour", type=positive, metavar="P", help="price of the device, to compute prices of tokens"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_precision(parser: argparse._ActionsContainer) -> None:
    """Declare the types of weights and KV."""
    about = "type of weights (default: that of the checkpoint; on this machine: as its workers choose)"
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help=about)
    about = "quantization of the linear layers (none, or that of a partitioned model or a checkpoint in int8 or int4)"
    parser.add_argument("--quantize", choices=("none", *QUANTIZED), help=about)
    about = "type of KV (default: that of the weights; on this machine: as its workers choose)"
    parser.add_argument("--kv-dtype", choices=KV_DTYPE_BYTES, help=about)


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    adapters = parser.add_argument_group("LoRA adapters, as workers get them")
    about = "an adapter in PEFT's format, or a folder with a folder for each; repeatable"
    adapters.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER", help=about)
    about = "adapters in memory at once (all)"
    adapters.add_argument("--max-loaded-adapters", type=count, default=0, metavar="N", help=about)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare the device to plan for: `capacity_of` reads it."""
    device = parser.add_argument_group("device")
    device.add_argument(
        "--device", metavar="NAME", help=f"here: this machine's CPU, measured (default); or {', '.join(DEVICES)}"
    )
    device.add_argument(
        "--threads", type=count, metavar="N", help="threads on this machine (default: all allowed cores)"
    )
    device.add_argument(
        "--memory", type=positive, metavar="GB", help="describe an unlisted device: memory in 1e9 bytes"
    )
    device.add_argument("--bandwidth", type=positive, metavar="GB/s", help="memory bandwidth of the unlisted device")
    device.add_argument(
        "--flops",
        type=positive,
        metavar="TFLOP/s",
        help="dense arithmetic of the unlisted device, at the type of the weights",
    )
    device.add_argument(
        "--memory-share", type=_share, default=0.9, metavar="S", help="share of the memory for weights and KV (0.9)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan on stdout."""
    model_dir, config = _find_decoder(args)
    require_context(args, config.max_model_len)
    partition = read_partition(model_dir)
    args.quantize = args.quantize or _own_quantize(args, model_dir, partition)
    degrees = _degrees(args, partition)
    quantization = read_quantization(model_dir)
    load = Load(args.input_tokens, args.output_tokens, args.rate)
    with quiet_logs(logging.WARNING):
        precision = _precision(args, model_dir, config, has_ranks=degrees != Degrees())
        capacity, device = _capacity(args, config, precision, degrees.num_ranks if _has_gpus(args) else 1)
        adapters = _adapters(args, model_dir, config, degrees)
        capacity = replace(capacity, adapter_bytes=0 if adapters is None else adapters.adapter_bytes)
        args.batch = batches_to_plan(capacity, load, args.batch)
        ranks = [] if degrees == Degrees() else _rank_memory(args, config, capacity, degrees)
        measured_ms = _measured_ms(args, model_dir, degrees)
        alternatives, refused = _alternatives(args, model_dir, partition)
    request = PlanRequest(
        load,
        args.batch,
        args.users,
        args.link_gbit_per_s,
        args.price_per_hour,
        [length for length in _LENGTHS if length <= config.max_model_len],
    )
    plan = {
        "model": {
            "name": args.model,
            **asdict(capacity.model),
            "params": capacity.model.params,
            "active_params": capacity.model.active_params,
        },
        "device": {"name": device.name, "source": device.source, **asdict(capacity.device)},
        "ranks": [rank.to_json() for rank in ranks],
        "adapters": None if adapters is None else _about_adapters(adapters),
        "partition": None if partition is None else _about(partition),
        "quantized_checkpoint": None if quantization is None or partition is not None else str(quantization),
        **plan_capacity(capacity, request, measured_ms, alternatives),
        "refused": refused,
    }
    if args.json:
        sys.stdout.write(json.dumps(plan) + "\n")
    else:
        show(plan, ranks, wide_console())
    return 0


def capacity_of(args: argparse.Namespace) -> tuple[Capacity, Device, ModelConfig]:
    """The capacity of a worker with one rank, its device and its model, from the arguments of `add_precision` and
    `add_device`, and `model`. Raises ConfigurationError.
    """
    model_dir, config = _find_decoder(args)
    args.quantize = args.quantize or _own_quantize(args, model_dir, read_partition(model_dir))
    with quiet_logs(logging.WARNING):
        precision = _precision(args, model_dir, config, has_ranks=False)
        capacity, device = _capacity(args, config, precision)
    return capacity, device, config


def require_context(args: argparse.Namespace, max_total_tokens: int) -> None:
    """Raise ConfigurationError if the model refuses requests with the lengths of the load."""
    if args.input_tokens + args.output_tokens > max_total_tokens:
        lengths = f"--input-tokens {args.input_tokens} and --output-tokens {args.output_tokens}"
        raise ConfigurationError(f"{lengths} do not fit: the model has a context of {max_total_tokens:,} tokens")


def _find_decoder(args: argparse.Namespace) -> tuple[Path, ModelConfig]:
    model_dir = find_model(ModelSource(args.model))
    config = load_config(model_dir)
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(
            f"{config.architecture} has an encoder, whose output the decoder attends to: the formulas here hold "
            "for decoder-only models"
        )
    return model_dir, config


def _capacity(
    args: argparse.Namespace, config: ModelConfig, precision: Precision, num_gpus: int = 1
) -> tuple[Capacity, Device]:
    device = _device(args, precision)
    if num_gpus > 1:
        device = device.times(num_gpus)
    return Capacity(model_size(config), precision, device.rates(precision), args.memory_share), device


def _precision(args: argparse.Namespace, model_dir: Path, config: ModelConfig, *, has_ranks: bool) -> Precision:
    is_cpu = not _has_gpus(args) and (has_ranks or args.bandwidth is None)
    if is_cpu and (args.quantize == "none" or (_is_here(args) and read_partition(model_dir) is None)):
        from engine.loading.resolve import resolve
        from tandem_cli.capacity.ranks import precision_of

        return precision_of(*resolve(replace(_worker_settings(args, model_dir), quantize=args.quantize)))
    dtype = args.dtype or ("float32" if is_cpu else config.dtype)
    if args.quantize == "none":
        return Precision(dtype, dtype, args.kv_dtype or "")
    return Precision(args.quantize, dtype, args.kv_dtype or "", config.dtype if is_cpu else "", is_cpu)


def _own_quantize(args: argparse.Namespace, model_dir: Path, partition: Partition | None) -> str:
    """The quantization of a model that no option says: that of the partition, or what workers here make of it."""
    if partition is not None:
        return partition.quantize
    if not _is_here(args) or read_quantization(model_dir) is None:
        return "none"
    from engine.loading.resolve import resolve

    return resolve(_worker_settings(args, model_dir))[0].quantize


def _alternatives(
    args: argparse.Namespace, model_dir: Path, partition: Partition | None
) -> tuple[list[Precision] | None, dict[str, str]]:
    """The precisions to show beside the chosen one, and those that workers here refuse, with the reasons. None: those
    of any device. A partitioned model has its own only.
    """
    if not _is_here(args):
        return None, {}
    if partition is not None:
        return [], {}
    from tandem_cli.capacity.ranks import precisions_here

    return precisions_here(_worker_settings(args, model_dir))


def _is_here(args: argparse.Namespace) -> bool:
    """True if the plan is for the CPU of this machine, which the engine can ask."""
    return not _has_gpus(args) and args.bandwidth is None


def _worker_settings(args: argparse.Namespace, model_dir: Path) -> "RunnerSettings":
    """The settings of a worker on this machine's CPU."""
    from engine.runner_settings import RunnerSettings

    load_format, kv_dtype = load_format_of(model_dir), args.kv_dtype or "auto"
    return RunnerSettings(model_dir, "cpu", args.dtype or "auto", load_format=load_format, kv_dtype=kv_dtype)


def _degrees(args: argparse.Namespace, partition: Partition | None) -> Degrees:
    """The degrees of a worker. A partitioned model says them if no option does."""
    stored_degrees = partition.degrees if partition is not None else Degrees()
    degrees = Degrees(args.tensor_parallel or stored_degrees.tensor, args.pipeline_parallel or stored_degrees.pipeline)
    if partition is not None:
        partition.require(degrees, args.quantize, args.dtype or partition.dtype)
    return degrees


def _has_gpus(args: argparse.Namespace) -> bool:
    """True if the plan is for GPUs: each rank has one."""
    return (args.device or _HERE) != _HERE


def _about(partition: Partition) -> dict[str, object]:
    degrees = {"tensor_parallel": partition.degrees.tensor, "pipeline_parallel": partition.degrees.pipeline}
    about = {"quantize": partition.quantize, "dtype": partition.dtype}
    return {**about, "files": len(partition.files), "num_bytes": partition.num_bytes, **degrees}


def _adapters(
    args: argparse.Namespace, model_dir: Path, config: ModelConfig, degrees: Degrees
) -> "RunnerSettings | None":
    """The settings of a worker with the adapters, if there are any. Raises ConfigurationError for one that does not
    fit the model.
    """
    if not args.adapter:
        return None
    if degrees != Degrees() and _has_gpus(args):
        raise ConfigurationError("ranks on GPUs have no adapters yet: plan one rank, or without --adapter")
    from checkpoint.adapters import find_adapters, read_adapter
    from engine.models.adapters import adapter_shapes
    from engine.models.parameters import parameter_specs
    from engine.runner_settings import RunnerSettings

    folders = find_adapters(",".join(args.adapter))
    adapters = tuple(read_adapter(name, folder, sys.maxsize) for name, folder in folders.items())
    adapter_shapes(adapters, parameter_specs(config))
    loaded = args.max_loaded_adapters
    return RunnerSettings(model_dir, adapters=adapters, max_loaded_adapters=loaded, tensor_parallel=degrees.tensor)


def _about_adapters(settings: "RunnerSettings") -> dict[str, object]:
    names = [adapter.name for adapter in settings.adapters]
    return {"names": names, "num_loaded": settings.num_adapter_slots, "num_bytes": settings.adapter_bytes}


def _rank_memory(
    args: argparse.Namespace, config: ModelConfig, capacity: Capacity, degrees: Degrees
) -> list["RankMemory"]:
    from tandem_cli.capacity.ranks import rank_memory

    num_cores = None if _has_gpus(args) else _num_threads(args)
    return rank_memory(config, capacity.precision, degrees, num_cores, capacity.adapter_bytes)


def _device(args: argparse.Namespace, precision: Precision) -> Device:
    numbers = (args.memory, args.bandwidth, args.flops)
    if any(value is not None for value in numbers):
        if args.device or not all(value is not None for value in numbers):
            raise ConfigurationError("use --memory, --bandwidth and --flops together, or use --device")
        rates = dict.fromkeys((precision.weights, precision.attention), args.flops * 1e12)
        return Device("as given", args.memory * 1e9, args.bandwidth * 1e9, rates, "the command line")
    if not _has_gpus(args):
        from tandem_cli.capacity.measurement import probe

        return probe(_num_threads(args))
    return find_device(args.device)


def _measured_ms(args: argparse.Namespace, model_dir: Path, degrees: Degrees) -> dict[str, float]:
    times_ms: dict[str, float] = {}
    if args.measured is not None:
        times_ms = read_measured(args.measured, args.input_tokens)
    if args.measure:
        from tandem_cli.capacity.measurement import EngineSteps, StepWorkload

        if _has_gpus(args):
            raise ConfigurationError(f"--measure runs on this machine, not on {args.device}")
        if degrees.pipeline > 1:
            raise ConfigurationError("--measure runs one stage: plan a model and degrees with one")
        if args.quantize not in (*QUANTIZATIONS, STORED_ENCODING):
            choices = " or ".join(QUANTIZATIONS)
            raise ConfigurationError(f"the engine does not support {args.quantize}: --measure needs {choices}")
        context = args.input_tokens + args.output_tokens // 2
        workload = StepWorkload(
            model_dir,
            args.quantize,
            max(args.batch),
            args.input_tokens,
            context,
            _num_threads(args),
            args.kv_dtype or "auto",
        )
        steps = EngineSteps(replace(workload, num_ranks=degrees.tensor, dtype=args.dtype or "auto"))
        steps.prompt_ms()  # warm-up: compiles kernels, touches memory
        times_ms[PREFILL] = min(steps.prompt_ms() for _ in range(3))
        times_ms |= {decode_name(batch): steps.decode_ms(batch) for batch in args.batch}
    return times_ms


def _num_threads(args: argparse.Namespace) -> int:
    return args.threads or len(os.sched_getaffinity(0))


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value
