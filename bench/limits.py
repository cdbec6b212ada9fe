"""Prints the speed limits of this machine's cores and memory, and the tokens/s that they allow a load.

    python -m bench.limits [--shape 135m 0.5b] [--quantize none bf16 int8] [--clients 1 8 32]
    python -m bench.limits --reached FILE.json      # the shares of what bench.peers.compare --json FILE.json measured

No engine computes faster than the arithmetic (bench/arithmetic.py). The roofline of a load is that of `tandem plan`
(tandem_cli/capacity/roofline.py): all prompts at the speed of arithmetic or of memory, whichever takes longer, and then
all steps of all clients together.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.arithmetic import ARITHMETICS, operations_per_s
from bench.shapes import SHAPES, write_shape
from engine.loading.resolve import resolve
from engine.models.read_config import load_decoder_config
from engine.runner_settings import RunnerSettings
from mesh.interrupts import run_program
from tandem_cli.capacity.measurement import read_bytes_per_s
from tandem_cli.capacity.model_size import model_size
from tandem_cli.capacity.ranks import precision_of
from tandem_cli.capacity.roofline import Capacity, Device

WEIGHTS = {
    "none": ("float32", "none"),
    "bf16": ("bfloat16", "none"),
    "int8": ("auto", "int8"),
    "int4": ("auto", "int4"),
}
"""By their names in bench.peers: dtype and quantization."""
_COMPARED = ("shape", "precision", "input_tokens", "output_tokens", "rows")


def this_machine(num_threads: int) -> Device:
    """Its limits as a device to plan for. int4 is multiplied as int8, and fp16 at the speed of bf16."""
    rates = {arithmetic: operations_per_s(arithmetic, num_threads) for arithmetic in ARITHMETICS}
    rates["int4"] = rates["int8"]
    memory_bytes = psutil.virtual_memory().total
    return Device(
        "1 thread" if num_threads == 1 else f"{num_threads} threads",
        memory_bytes,
        read_bytes_per_s(num_threads),
        rates,
        "measured now",
    )


def roofline(device: Device, model_dir: Path, quantize: str) -> Capacity:
    """A model on the device, with weights and KV as a worker would choose them."""
    dtype, quantization = WEIGHTS[quantize]
    settings, config = resolve(RunnerSettings(model_dir, "cpu", dtype, quantize=quantization, load_format="dummy"))
    precision = precision_of(settings, config)
    return Capacity(model_size(load_decoder_config(model_dir)), precision, device.rates(precision))


def tokens_per_s(capacity: Capacity, clients: int, input_tokens: int, output_tokens: int) -> float:
    """Generated tokens per second of a closed loop of so many clients, at most."""
    prompts_s = clients * capacity.prefill_s(input_tokens)
    steps_s = (output_tokens - 1) * capacity.decode_step_s(clients, input_tokens + output_tokens / 2)
    return clients * output_tokens / (prompts_s + steps_s)


def read_comparison(file: Path) -> Mapping[str, Any]:
    """Read a file that `bench.peers.compare --json` has written. Exits with the reason if the file is not that."""
    try:
        compared: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{file} is not what bench.peers.compare --json writes: {error}") from error
    missing = [name for name in _COMPARED if name not in compared]
    if missing:
        raise SystemExit(f"{file} lacks {missing[0]!r}: write it anew with bench.peers.compare --json")
    return compared


def _limits_table(devices: Sequence[Device]) -> Table:
    table = Table("", "memory, GB/s", "fp32, GFLOP/s", "bf16, GFLOP/s", "int8, GOP/s", title="Limits of this machine")
    for device in devices:
        rates = (device.flops_per_s[name] / 1e9 for name in ARITHMETICS)
        table.add_row(device.name, f"{device.bandwidth_bytes_per_s / 1e9:.1f}", *(f"{rate:.0f}" for rate in rates))
    return table


def _loads_table(device: Device, options: argparse.Namespace) -> Table:
    what = f"{options.input_tokens} tokens in, {options.output_tokens} out"
    columns = (f"{clients} clients" for clients in options.clients)
    table = Table("shape", "weights", *columns, title=f"Tokens/s at most on {device.name}: {what}")
    with tempfile.TemporaryDirectory() as folder:
        for shape, quantize in product(options.shape, options.quantize):
            capacity = roofline(device, write_shape(shape, Path(folder)), quantize)
            rates = (
                tokens_per_s(capacity, clients, options.input_tokens, options.output_tokens)
                for clients in options.clients
            )
            table.add_row(shape, quantize, *(f"{rate:.0f}" for rate in rates))
    return table


def _reached_table(device: Device, compared: Mapping[str, Any]) -> Table:
    """The shares of the rooflines that the arms of a comparison have reached."""
    table = Table(
        "clients", "arm", "tokens/s", "of the roofline", title=f"{compared['shape']}, {compared['precision']}"
    )
    with tempfile.TemporaryDirectory() as folder:
        capacity = roofline(device, write_shape(compared["shape"], Path(folder)), compared["precision"])
    for row in sorted(compared["rows"], key=lambda row: row["clients"]):
        limit = tokens_per_s(capacity, row["clients"], compared["input_tokens"], compared["output_tokens"])
        reached = row["tokens_per_s"]
        table.add_row(str(row["clients"]), row["arm"], f"{reached:.0f}", f"{reached / limit:.0%} of {limit:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["135m", "0.5b"])
    parser.add_argument("--quantize", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="none is fp32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--reached", type=Path, metavar="FILE", help="what bench.peers.compare --json FILE has written")
    options = parser.parse_args()
    compared = read_comparison(options.reached) if options.reached else None
    console = Console(width=120)
    num_cores = len(os.sched_getaffinity(0))
    devices = [this_machine(threads) for threads in sorted({1, num_cores})]
    console.print(_limits_table(devices))
    if compared is not None:
        console.print(_reached_table(devices[-1], compared))
    else:
        console.print(_loads_table(devices[-1], options))


if __name__ == "__main__":
    run_program(main)
