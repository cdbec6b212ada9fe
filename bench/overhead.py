"""CPU time and memory of each process outside the model, against the length of prompts.

    python -m bench.overhead [--tokens 2048 8192 32768 131072] [--output-tokens 1] [--requests 20]

Workers compute nothing (tandem_cli.load_test.paced), so what is left is the work on token ids, blocks, hashes and KV:
router, prefill worker, KV transfer, decode worker. Work that grows as the prompt does has the same figure per 1,000
tokens in every row; twice the figure at twice the length is a quadratic. Memory is what a process has more at most.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from bench.processes import cpu_s
from bench.shapes import write_shape
from mesh.interrupts import run_async, run_program, showing
from tandem_cli.load_test.endpoints import own_mesh

_PACE = "0,0"
_KV_BYTES_OF_TOKEN = 2 * 2 * 2 * 16 * 4
"""Of the shape "narrow": layers, keys and values, heads, numbers of a head, bytes."""
_ROLES = ("router", "prefill", "decode")
_VOCAB = range(3, 250)


@dataclass(frozen=True, slots=True)
class Usage:
    """One process: CPU seconds since its start, and bytes of its own memory."""

    cpu_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of requests of `num_tokens` tokens in one process: mean CPU seconds, growth of memory in bytes."""

    num_tokens: int
    cpu_s: float
    num_bytes: int

    @property
    def cpu(self) -> str:
        """Milliseconds, and milliseconds per 1,000 tokens."""
        return f"{1000 * self.cpu_s:.1f} ({1e6 * self.cpu_s / self.num_tokens:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--output-tokens", type=int, default=1)
    parser.add_argument("--requests", type=int, default=20, help="requests of each length, one after the other")
    options = parser.parse_args()
    costs: dict[str, list[Cost]] = {}
    with showing(costs, lambda: Console(width=120).print(table_of(costs))):
        run_async(measure(options.tokens, options.output_tokens, options.requests, costs))


async def measure(lengths: Sequence[int], num_output: int, num_requests: int, costs: dict[str, list[Cost]]) -> None:
    """Add the costs in each role, for one length after the other."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape("narrow-long", Path(folder))
        kv_bytes = _KV_BYTES_OF_TOKEN * 2 * (max(lengths) + num_output + 64)
        flags = ("--model", str(model), "--load-format=dummy", "--prefill-overflow=0", f"--kv-cache-bytes={kv_bytes}")
        async with own_mesh(flags, _PACE) as address, tandem.AsyncClient(address) as client:
            await _send(client, min(lengths), num_output, 0)  # connects, imports what is imported late
            processes = _processes()
            for length in lengths:
                before, after = _usage(processes), []
                for number in range(num_requests):
                    await _send(client, length, num_output, number)
                    after.append(_usage(processes))
                for role in _ROLES:
                    # Of all requests together: the system counts hundredths of a second.
                    cpu_s = (after[-1][role].cpu_s - before[role].cpu_s) / num_requests
                    grown = max(usage[role].num_bytes for usage in after) - before[role].num_bytes
                    costs.setdefault(role, []).append(Cost(length, cpu_s, max(0, grown)))


async def _send(client: tandem.AsyncClient, length: int, num_output: int, seed: int) -> None:
    rng = random.Random(f"{length} {seed}")
    prompt = rng.choices(_VOCAB, k=length)
    async for _ in client.stream(token_ids=prompt, max_new_tokens=num_output, ignore_eos=True):
        pass


def _processes() -> Mapping[str, psutil.Process]:
    """The processes of the mesh by role. Raises LookupError if one is missing."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process(os.getpid()).children(recursive=True):
        line = process.cmdline()
        for role in _ROLES:
            if role in line or f"{role}_worker" in line:
                found.setdefault(role, process)
    if missing := set(_ROLES) - set(found):
        raise LookupError(f"no process of the mesh is {', '.join(sorted(missing))}")
    return found


def _usage(processes: Mapping[str, psutil.Process]) -> dict[str, Usage]:
    return {role: Usage(cpu_s(process), process.memory_full_info().uss) for role, process in processes.items()}


def table_of(costs: Mapping[str, Sequence[Cost]]) -> Table:
    """CPU time and memory of each role, one row for each length."""
    table = Table("tokens", title="outside the model, for one request")
    for role in costs:
        table.add_column(f"{role}: CPU ms (per 1,000 tokens)", justify="right")
        table.add_column("MiB more", justify="right")
    for row in zip(*costs.values(), strict=True):
        cells = [cell for cost in row for cell in (cost.cpu, f"{cost.num_bytes / 2**20:.1f}")]
        table.add_row(f"{row[0].num_tokens:,}", *cells)
    return table


if __name__ == "__main__":
    run_program(main)
