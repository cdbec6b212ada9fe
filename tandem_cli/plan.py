"""`tandem plan`: memory and best-case speed of a model on a device, and the number of workers that a load needs.

The engine is imported only to measure this machine and to divide a model among ranks.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from rich.console import Console
from rich.table import Table

from checkpoint.partition import Partition, read_partition
from checkpoint.source import ModelSource
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.model_config import ModelConfig
from engine.models.read_config import load_config
from engine.quantized.config import read_quantization
from engine.settings import QUANTIZATIONS
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, Degrees, Span
from tandem_cli.capacity.prediction import (
    PREFILL,
    Load,
    PlanRequest,
    PlanResult,
    batches_to_plan,
    decode_name,
    plan_capacity,
    read_measured,
)
from tandem_cli.capacity.roofline import DEVICES, QUANTIZED, Capacity, Device, Precision, find_device, model_size
from tandem_cli.deployment import find_model
from tandem_cli.parser import CommandParser
from tandem_cli.terminal import wide_console

if TYPE_CHECKING:
    from tandem_cli.capacity.ranks import RankMemory

_HERE = "here"


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("model", nargs="?", default="tandem-small", help="model folder, or name of a bundled model")
    parser.add_argument(
        "--dtype",
        choices=DTYPE_BYTES,
        help="type of weights and KV (default: float32 on this machine, else that of the checkpoint)",
    )
    about = "quantization of the linear layers (none, or that of a partitioned model or a checkpoint in int8)"
    parser.add_argument("--quantize", choices=("none", *QUANTIZED), help=about)
    about = "ranks that divide heads and weights of a worker (1, or those of a partitioned model)"
    parser.add_argument("--tensor-parallel", type=_positive_int, metavar="N", help=about)
    about = "stages that divide the layers of a worker, each with as many ranks (1, or those of a partitioned model)"
    parser.add_argument("--pipeline-parallel", type=_positive_int, metavar="N", help=about)
    _add_device(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--input-tokens", type=_positive_int, default=256, metavar="N", help="tokens of a prompt (256)")
    load.add_argument("--output-tokens", type=_positive_int, default=64, metavar="N", help="tokens of an answer (64)")
    about = "sequences per decode step (default: those of 1 8 32 128 that fit)"
    load.add_argument("--batch", type=_positive_int, nargs="+", metavar="N", help=about)
    demand = load.add_mutually_exclusive_group()
    demand.add_argument("--rate", type=_positive, default=1.0, metavar="R", help="requests per second (1)")
    demand.add_argument(
        "--users",
        type=_positive_int,
        metavar="N",
        help="instead of a rate: users who send their next request immediately",
    )
    load.add_argument(
        "--link-gbit-per-s",
        type=_positive,
        nargs="+",
        default=[10.0, 100.0],
        metavar="G",
        help="bandwidth of the links that carry KV (10 100)",
    )
    measured = parser.add_argument_group("measurements to show beside the predictions")
    measured.add_argument("--measure", action="store_true", help="measure the engine with this model on this machine")
    measured.add_argument("--measured", type=Path, metavar="FILE", help="show results that tandem bench --json wrote")
    parser.add_argument(
        "--price-per-hour", type=_positive, metavar="P", help="price of the device, to compute prices of tokens"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _add_device(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("device")
    device.add_argument(
        "--device", metavar="NAME", help=f"here: this machine's CPU, measured (default); or {', '.join(DEVICES)}"
    )
    device.add_argument(
        "--threads", type=_positive_int, metavar="N", help="threads on this machine (default: all allowed cores)"
    )
    device.add_argument(
        "--memory", type=_positive, metavar="GB", help="describe an unlisted device: memory in 1e9 bytes"
    )
    device.add_argument("--bandwidth", type=_positive, metavar="GB/s", help="memory bandwidth of the unlisted device")
    device.add_argument(
        "--flops",
        type=_positive,
        metavar="TFLOP/s",
        help="dense arithmetic of the unlisted device, at the type of the weights",
    )
    device.add_argument(
        "--memory-share", type=_positive, default=0.9, metavar="S", help="share of the memory for weights and KV (0.9)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan on stdout."""
    model_dir = find_model(ModelSource(args.model))
    config = load_config(model_dir)
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(
            f"{config.architecture} has an encoder, whose output the decoder attends to: the formulas here hold "
            "for decoder-only models"
        )
    partition = read_partition(model_dir)
    args.quantize = args.quantize or _own_quantize(args, model_dir, partition)
    degrees = _degrees(args, partition)
    precision = _precision(args, config, has_ranks=degrees != Degrees())
    quantization = read_quantization(model_dir)
    load = Load(args.input_tokens, args.output_tokens, args.rate)
    with _only_warnings():
        device = _device(args, precision)
        capacity = Capacity(model_size(config), precision, device.rates(precision), args.memory_share)
        args.batch = batches_to_plan(capacity, load, args.batch)
        ranks = [] if degrees == Degrees() else _rank_memory(args, config, precision, degrees)
        measured_ms = _measured_ms(args, model_dir, degrees)
    request = PlanRequest(
        load,
        args.batch,
        args.users,
        args.link_gbit_per_s,
        args.price_per_hour,
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
        "partition": None if partition is None else _about(partition),
        "quantized_checkpoint": None if quantization is None or partition is not None else str(quantization),
        **plan_capacity(capacity, request, measured_ms),
    }
    if args.json:
        sys.stdout.write(json.dumps(plan) + "\n")
    else:
        show(plan, ranks, wide_console())
    return 0


def _precision(args: argparse.Namespace, config: ModelConfig, *, has_ranks: bool) -> Precision:
    is_cpu = has_ranks or ((args.device or _HERE) == _HERE and args.bandwidth is None)
    dtype = args.dtype or ("float32" if is_cpu else config.dtype)
    return Precision(dtype if args.quantize == "none" else args.quantize, dtype)


def _own_quantize(args: argparse.Namespace, model_dir: Path, partition: Partition | None) -> str:
    """The quantization of a model that no option says: that of the partition, or what workers here make of it."""
    if partition is not None:
        return partition.quantize
    is_here = (args.device or _HERE) == _HERE and args.bandwidth is None and args.dtype in (None, "float32")
    quantization = read_quantization(model_dir)
    return "int8" if is_here and quantization is not None and quantization.is_w8a8 else "none"


def _degrees(args: argparse.Namespace, partition: Partition | None) -> Degrees:
    """The degrees of a worker. A partitioned model says them if no option does."""
    own = partition.degrees if partition is not None else Degrees()
    degrees = Degrees(args.tensor_parallel or own.tensor, args.pipeline_parallel or own.pipeline)
    if partition is not None:
        partition.require(degrees, args.quantize)
    if degrees != Degrees() and (args.device or _HERE) != _HERE:
        raise ConfigurationError(f"the ranks of a worker are on one machine with CPUs: plan {args.device} without them")
    return degrees


def _about(partition: Partition) -> dict[str, object]:
    degrees = {"tensor_parallel": partition.degrees.tensor, "pipeline_parallel": partition.degrees.pipeline}
    return {"quantize": partition.quantize, "files": len(partition.files), "num_bytes": partition.num_bytes, **degrees}


def _rank_memory(
    args: argparse.Namespace, config: ModelConfig, precision: Precision, degrees: Degrees
) -> list["RankMemory"]:
    from tandem_cli.capacity.ranks import rank_memory

    return rank_memory(config, precision, degrees, _num_threads(args))


def _device(args: argparse.Namespace, precision: Precision) -> Device:
    numbers = (args.memory, args.bandwidth, args.flops)
    if any(value is not None for value in numbers):
        if args.device or not all(value is not None for value in numbers):
            raise ConfigurationError("use --memory, --bandwidth and --flops together, or use --device")
        rates = dict.fromkeys((precision.weights, precision.other), args.flops * 1e12)
        return Device("as given", args.memory * 1e9, args.bandwidth * 1e9, rates, "the command line")
    if (args.device or _HERE) == _HERE:
        from tandem_cli.capacity.measurement import probe

        return probe(_num_threads(args)).device()
    return find_device(args.device)


def _measured_ms(args: argparse.Namespace, model_dir: Path, degrees: Degrees) -> dict[str, float]:
    times_ms: dict[str, float] = {}
    if args.measured is not None:
        times_ms = read_measured(args.measured, args.input_tokens)
    if args.measure:
        from tandem_cli.capacity.measurement import EngineSteps, StepWorkload

        if (args.device or _HERE) != _HERE:
            raise ConfigurationError(f"--measure runs on this machine, not on {args.device}")
        if degrees.pipeline > 1:
            raise ConfigurationError("--measure runs one stage: plan a model and degrees with one")
        if args.quantize not in QUANTIZATIONS:
            known = " or ".join(QUANTIZATIONS)
            raise ConfigurationError(f"the engine does not support {args.quantize}: --measure needs {known}")
        context = args.input_tokens + args.output_tokens // 2
        workload = StepWorkload(
            model_dir, args.quantize, max(args.batch), args.input_tokens, context, _num_threads(args)
        )
        steps = EngineSteps(replace(workload, num_ranks=degrees.tensor))
        steps.prompt_ms()  # warm-up: compiles kernels, touches memory
        times_ms[PREFILL] = min(steps.prompt_ms() for _ in range(3))
        times_ms |= {decode_name(batch): steps.decode_ms(batch) for batch in args.batch}
    return times_ms


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Hide log lines of the engine below warnings, which are not part of the plan."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)


def _num_threads(args: argparse.Namespace) -> int:
    return args.threads or len(os.sched_getaffinity(0))


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def show(plan: PlanResult, ranks: Sequence["RankMemory"], console: Console) -> None:
    """Print the tables, and the lines between them."""
    model, device = plan["model"], plan["device"]
    console.print(
        f"{model['name']}: {_number(model['params'])} parameters, {model['num_layers']} layers{_experts(model)}"
    )
    console.print(
        f"{device['name']} ({device['source']}): {_number(device['memory_bytes'])}B, "
        f"{_number(device['bandwidth_bytes_per_s'])}B/s, {_number(device['flops_per_s'])}FLOP/s in "
        f"{plan['precision']['weights']}"
    )
    console.print(
        f"KV: {plan['kv_bytes_per_token']:,.0f} bytes per token; critical batch: {plan['critical_batch']:.0f}; "
        f"arithmetic is the bound above {plan['device_flops_per_byte']:.0f} FLOP/byte\n"
    )
    if plan["partition"] is not None:
        files, num_bytes = plan["partition"]["files"], plan["partition"]["num_bytes"]
        console.print(f"partitioned: {_number(num_bytes)}B in {files} {'file' if files == 1 else 'files'}\n")
    if plan["quantized_checkpoint"] is not None:
        console.print(f"the checkpoint is quantised ({plan['quantized_checkpoint']}): {_loaded_as(plan)}\n")
    console.print(_memory(plan))
    console.print()
    if ranks:
        console.print(_ranks(ranks, plan["context_tokens"]))
        console.print()
    console.print(_predictions(plan))
    if plan["blended_price_per_million"] is not None:
        console.print(f"blended price, 3 of input to 1 of output: {plan['blended_price_per_million']:.4g} per million")
    console.print()
    console.print(_load(plan))


def _loaded_as(plan: PlanResult) -> str:
    weights = plan["precision"]["weights"]
    return "computed in int8" if weights == "int8" else f"its matrices are loaded as {weights}"


def _experts(model: PlanResult) -> str:
    if model["num_experts"] == 1:
        return ""
    active = f"{_number(model['active_params'])} parameters"
    return f"; each token uses {active}: {model['experts_per_token']} of {model['num_experts']} experts"


def _memory(plan: PlanResult) -> Table:
    columns = ("weights", "rest and KV", "weights bytes", "KV bytes/token", "KV tokens")
    table = _table(*columns, f"users of {plan['context_tokens']} tokens")
    for row in plan["memory"]:
        fits = row["kv_tokens"] > 0
        table.add_row(
            row["weights"],
            row["other"],
            f"{_number(row['weights_bytes'])}B",
            f"{row['kv_bytes_per_token']:,.0f}",
            f"{row['kv_tokens']:,}" if fits else "does not fit",
            f"{row['users']:,}",
        )
    return table


def _ranks(ranks: Sequence["RankMemory"], context_tokens: int) -> Table:
    columns = ("layers", "KV heads", "weights bytes", "KV bytes/token", f"KV of {context_tokens} tokens", "cores")
    table = _table("rank", *columns)

    def add(name: str, spans: tuple[Span, ...], sizes: tuple[float, float], cores: int) -> None:
        weights_bytes, kv_bytes = sizes
        sizes_text = (f"{_number(weights_bytes)}B", f"{kv_bytes:,.0f}", f"{_number(context_tokens * kv_bytes)}B")
        spans_text = (f"{span.first}..{span.end - 1}" for span in spans)
        table.add_row(name, *spans_text, *sizes_text, str(cores or "shared"))

    for rank in ranks:
        add(str(rank.rank), (rank.layers, rank.heads), (rank.weights_bytes, rank.kv_bytes_per_token), rank.cores)
    whole = Span(0, ranks[-1].layers.end), Span(0, ranks[-1].heads.end)
    from tandem_cli.capacity.ranks import total

    add("worker", whole, total(ranks), sum(rank.cores for rank in ranks))
    return table


def _predictions(plan: PlanResult) -> Table:
    has_prices = plan["predictions"][0]["price_per_million"] is not None
    columns = ["pass", "FLOP/byte", "ms at best", "measured ms", "times longer", "tokens/s at best", "measured"]
    table = _table(*columns, *(["price per million"] if has_prices else []))
    for row in plan["predictions"]:
        is_prefill = row["name"] == "prefill_ms"
        fits = row["fits"]
        cells = [
            f"prefill of {row['tokens']} tokens" if is_prefill else f"decode step of {row['tokens']}",
            f"{row['flops_per_byte']:.1f}",
            _ms(row["predicted_ms"]) if fits else "",
            "" if row["measured_ms"] is None else _ms(row["measured_ms"]),
            _maybe(row["ratio"], ".2f"),
            f"{row['tokens_per_s']:,.0f}" if fits else "does not fit",
            _maybe(row["measured_tokens_per_s"], ",.0f"),
        ]
        table.add_row(*cells, *([f"{row['price_per_million']:.4g}" if fits else ""] if has_prices else []))
    return table


def _load(plan: PlanResult) -> str:
    load = plan["load"]
    lines = [
        f"KV of a prompt over {rate} Gbit/s: {_ms(ms)} ms, without overlap" for rate, ms in plan["transfer_ms"].items()
    ]
    demand = f"{load['requests_per_s']:.4g} requests/s, {load['input_tokens']} tokens in, {load['output_tokens']} out"
    if plan["batch"] is None:
        return "\n".join([*lines, f"{demand}: no batch fits into memory"])
    lines.append(f"{demand}, in decode steps of {plan['batch']}, keeps busy")
    for name, need in plan["workers"].items():
        prefill, decode = need["whole"]
        lines.append(
            f"  {name}: {need['prefill']:.3g} prefill and {need['decode']:.3g} decode workers, "
            f"1 : {need['decode_per_prefill']:.2f}; start at least {prefill} + {decode}"
        )
    return "\n".join(lines)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column, name in enumerate(columns):
        table.add_column(name, justify="left" if column == 0 else "right")
    return table


def _maybe(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ms(value: float) -> str:
    """Format milliseconds with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float) -> str:
    """Format with three digits and a unit prefix: 1.24 G."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
