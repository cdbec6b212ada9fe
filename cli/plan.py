"""`tandem plan`: what a model needs of a device, how fast it can be at best, and how many workers a load takes."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog

from bench.capacity import Capacity, Precision, model_size
from bench.device_probe import probe
from bench.devices import DEVICES, Device, find_device
from bench.engine_steps import EngineSteps, StepPlan
from bench.fleet import Load, PassTimes, largest_batch, predicted_times, rate_of_users, workers_for
from bench.predictions import PREFILL, Question, blended, decode_name, predict, read_measured
from cli.plan_tables import show
from cli.tables import wide_console
from cli.up_settings import find_model
from engine.models.config import ModelConfig, load_config
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES

NAME = "plan"
ABOUT = "capacity of a model on a device: memory, users, speed at best, workers for a load, cost"

_QUANTIZATIONS = ("none", "int8", "fp8", "int4")
_HERE = "here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", nargs="?", default="tandem-small", help="model folder, or name of a bundled model")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="of weights and KV (here float32, else the checkpoint's)")
    parser.add_argument("--quantize", choices=_QUANTIZATIONS, default="none", help="of linear layers (none)")
    _add_device(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--input-tokens", type=_positive_int, default=256, metavar="N", help="of a prompt (256)")
    load.add_argument("--output-tokens", type=_positive_int, default=64, metavar="N", help="of an answer (64)")
    load.add_argument("--batch", type=_positive_int, nargs="+", default=[1, 8, 32], metavar="N", help="of a step")
    wanted = load.add_mutually_exclusive_group()
    wanted.add_argument("--rate", type=_positive, default=1.0, metavar="R", help="requests per second (1)")
    wanted.add_argument("--users", type=_positive_int, metavar="N", help="instead: users who ask again at once")
    load.add_argument(
        "--link-gbit-per-s", type=_positive, nargs="+", default=[10.0, 100.0], metavar="G", help="ways for KV (10 100)"
    )
    measured = parser.add_argument_group("beside the predictions")
    measured.add_argument("--measure", action="store_true", help="run the engine with this model on this machine")
    measured.add_argument("--measured", type=Path, metavar="FILE", help="results of tandem bench")
    parser.add_argument("--price-per-hour", type=_positive, metavar="P", help="of the device: adds prices of tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def _add_device(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("device")
    device.add_argument("--device", metavar="NAME", help=f"here (measured; default), {', '.join(DEVICES)}")
    device.add_argument("--threads", type=_positive_int, metavar="N", help="of this machine (all cores allowed)")
    device.add_argument("--memory", type=_positive, metavar="GB", help="instead of a name: memory in 1e9 bytes")
    device.add_argument("--bandwidth", type=_positive, metavar="GB/s", help="and how fast it is read")
    device.add_argument("--flops", type=_positive, metavar="TFLOP/s", help="and dense arithmetic at the weights' type")
    device.add_argument(
        "--memory-share", type=_positive, default=0.9, metavar="S", help="of memory for weights and KV (0.9)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan on stdout."""
    model_dir = find_model(args.model)
    config = load_config(model_dir)
    precision = _precision(args, config)
    with _only_warnings():
        device = _device(args, precision)
        measured_ms = _measured_ms(args, model_dir)
    capacity = Capacity(model_size(config), precision, device.rates(precision), args.memory_share)
    plan = describe(args, device, capacity, measured_ms)
    if args.json:
        sys.stdout.write(json.dumps(plan) + "\n")
    else:
        show(plan, wide_console())
    return 0


def describe(
    args: argparse.Namespace, device: Device, capacity: Capacity, measured_ms: Mapping[str, float]
) -> dict[str, Any]:
    """The plan for machines; tables are made from it."""
    load = Load(args.input_tokens, args.output_tokens, args.rate)
    batch = largest_batch(capacity, load, args.batch)
    if batch is not None and args.users is not None:
        rate = rate_of_users(load, predicted_times(capacity, load, batch), args.users)
        load = replace(load, requests_per_s=rate)
    predictions = predict(capacity, Question(load, args.batch, args.price_per_hour), measured_ms)
    context = args.input_tokens + args.output_tokens
    return {
        "model": {"name": args.model, **asdict(capacity.model), "params": capacity.model.params},
        "device": {"name": device.name, "source": device.source, **asdict(capacity.device)},
        "precision": asdict(capacity.precision),
        "memory": [_memory(capacity, each, context) for each in _precisions(capacity.precision)],
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "context_tokens": context,
        "critical_batch": capacity.critical_batch,
        "device_flops_per_byte": capacity.device.flops_per_s / capacity.device.bandwidth_bytes_per_s,
        "predictions": [
            asdict(each)
            | {
                "tokens_per_s": each.tokens_per_s,
                "measured_tokens_per_s": each.measured_tokens_per_s,
                "ratio": each.ratio,
            }
            for each in predictions
        ],
        "blended_price_per_million": None if batch is None else blended(predictions, batch),
        "transfer_ms": {
            f"{rate:g}": 1000 * capacity.transfer_s(args.input_tokens, rate * 1e9 / 8) for rate in args.link_gbit_per_s
        },
        "load": asdict(load),
        "batch": batch,
        "workers": {} if batch is None else _workers(load, predicted_times(capacity, load, batch), measured_ms),
    }


def _workers(load: Load, predicted: PassTimes, measured_ms: Mapping[str, float]) -> dict[str, Any]:
    """By predicted times and, where both passes were measured, by those."""
    times = {"predicted": predicted}
    prefill_ms, step_ms = measured_ms.get(PREFILL), measured_ms.get(decode_name(predicted.batch))
    if prefill_ms is not None and step_ms is not None:
        times["measured"] = PassTimes(prefill_ms / 1000, step_ms / 1000, predicted.batch)
    needs = {name: workers_for(load, each) for name, each in times.items()}
    return {
        name: asdict(need) | {"decode_per_prefill": need.decode_per_prefill, "whole": need.whole}
        for name, need in needs.items()
    }


def _precisions(chosen: Precision) -> list[Precision]:
    """The chosen one first, then the other ways to hold the linear layers."""
    others = [Precision(name, name) for name in ("float32", "bfloat16")]
    others += [Precision(name, chosen.other) for name in _QUANTIZATIONS[1:]]
    return [chosen, *(each for each in others if each != chosen)]


def _memory(capacity: Capacity, precision: Precision, context_tokens: int) -> dict[str, Any]:
    other = Capacity(capacity.model, precision, capacity.device, capacity.memory_share)
    return {
        "weights": precision.weights,
        "other": precision.other,
        "weights_bytes": other.weights_bytes,
        "kv_bytes_per_token": other.kv_bytes_per_token,
        "kv_tokens": other.kv_tokens,
        "users": other.users(context_tokens),
    }


def _precision(args: argparse.Namespace, config: ModelConfig) -> Precision:
    is_here = (args.device or _HERE) == _HERE and args.bandwidth is None
    other = args.dtype or ("float32" if is_here else config.dtype)
    return Precision(other if args.quantize == "none" else args.quantize, other)


def _device(args: argparse.Namespace, precision: Precision) -> Device:
    given = (args.memory, args.bandwidth, args.flops)
    if any(value is not None for value in given):
        if args.device or not all(value is not None for value in given):
            raise ConfigurationError("give --memory, --bandwidth and --flops together, or a --device")
        rates = dict.fromkeys((precision.weights, precision.other), args.flops * 1e12)
        return Device("as given", args.memory * 1e9, args.bandwidth * 1e9, rates, "the command line")
    if (args.device or _HERE) == _HERE:
        return probe(_num_threads(args)).device()
    return find_device(args.device)


def _measured_ms(args: argparse.Namespace, model_dir: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    if args.measured is not None:
        found = read_measured(args.measured, args.input_tokens)
    if args.measure:
        if args.quantize not in ("none", "int8"):
            raise ConfigurationError(f"the engine has no {args.quantize}: --measure goes with none and int8")
        context = args.input_tokens + args.output_tokens // 2
        steps = EngineSteps(
            StepPlan(model_dir, args.quantize, max(args.batch), args.input_tokens, context, _num_threads(args))
        )
        steps.prompt_ms()  # compiles, touches memory
        found[PREFILL] = min(steps.prompt_ms() for _ in range(3))
        found |= {decode_name(batch): steps.decode_ms(batch) for batch in args.batch}
    return found


@contextmanager
def _only_warnings() -> Iterator[None]:
    """The engine's own log lines are not part of the plan."""
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
