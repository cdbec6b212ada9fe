"""`tandem plan`: what a model needs of a device, how fast it can be at best, and how many workers a load takes."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import structlog

from bench.capacity import QUANTIZED, Capacity, Precision, model_size
from bench.capacity_answer import Question, answer
from bench.device_probe import probe
from bench.devices import DEVICES, Device, find_device
from bench.engine_steps import EngineSteps, StepPlan
from bench.fleet import Load
from bench.predictions import PREFILL, decode_name, read_measured
from cli.plan_tables import show
from cli.tables import wide_console
from cli.up_settings import find_model
from engine.models.config import ModelConfig, load_decoder_config
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES
from mesh.model_source import ModelSource

NAME = "plan"
ABOUT = "capacity of a model on a device: memory, users, speed at best, workers for a load, cost"

_HERE = "here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", nargs="?", default="tandem-small", help="model folder, or name of a bundled model")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="of weights and KV (here float32, else the checkpoint's)")
    parser.add_argument("--quantize", choices=("none", *QUANTIZED), default="none", help="of linear layers (none)")
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
    device.add_argument(
        "--device", metavar="NAME", help=f"here: this machine's CPU, measured (default); or {', '.join(DEVICES)}"
    )
    device.add_argument("--threads", type=_positive_int, metavar="N", help="of this machine (all cores allowed)")
    device.add_argument("--memory", type=_positive, metavar="GB", help="instead of a name: memory in 1e9 bytes")
    device.add_argument("--bandwidth", type=_positive, metavar="GB/s", help="and how fast it is read")
    device.add_argument("--flops", type=_positive, metavar="TFLOP/s", help="and dense arithmetic at the weights' type")
    device.add_argument(
        "--memory-share", type=_positive, default=0.9, metavar="S", help="of memory for weights and KV (0.9)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan on stdout."""
    model_dir = find_model(ModelSource(args.model))
    config = load_decoder_config(model_dir)
    precision = _precision(args, config)
    with _only_warnings():
        device = _device(args, precision)
        measured_ms = _measured_ms(args, model_dir)
    capacity = Capacity(model_size(config), precision, device.rates(precision), args.memory_share)
    question = Question(
        Load(args.input_tokens, args.output_tokens, args.rate),
        args.batch,
        args.users,
        args.link_gbit_per_s,
        args.price_per_hour,
    )
    plan = {
        "model": {"name": args.model, **asdict(capacity.model), "params": capacity.model.params},
        "device": {"name": device.name, "source": device.source, **asdict(capacity.device)},
        **answer(capacity, question, measured_ms),
    }
    if args.json:
        sys.stdout.write(json.dumps(plan) + "\n")
    else:
        show(plan, wide_console())
    return 0


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
        if (args.device or _HERE) != _HERE:
            raise ConfigurationError(f"--measure runs on this machine, not on {args.device}")
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
