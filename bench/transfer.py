"""Speed of KV transfers between two processes: `python -m bench.transfer`, on this host, or between two hosts:

    python -m bench.transfer --receive 10.0.0.7:50070        on one, and with the same --tokens, --runs, --transports
    python -m bench.transfer --send 10.0.0.7:50070           on the other

The time is end to end, from opening a transfer until the receiver has verified and committed it, with all groups of
layers announced one after the other. Requests only wait for the tail, because KV is transferred while the prompt is
computed: the tail is the time from the announcement of the last layer until the commit, when all other layers have
arrived. Block ids are shuffled on both sides, as in a used pool. `memcpy` copies the same number of bytes once, between
two warm buffers of one process, in turn with the transfers. It is a bound that no transport can reach. CPU times are
medians of a transfer, with the end of its call and without the warm-up.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import structlog
import torch
from rich.console import Console
from rich.table import Table

from engine.kv.cache import KVCache
from kvtransfer import (
    SERVICE_NAME,
    ExpectedTransfer,
    KVReceiver,
    KVSender,
    ReceiverCallbacks,
    TransferSettings,
    TransferSpec,
)
from mesh.domain.host import host_and_port
from mesh.domain.kv import KVLayout, Span
from mesh.interrupts import run_async, run_program, showing
from mesh.process import keep_freed_memory
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server

LAYOUT = KVLayout("bench", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 256
KEY = MeshKey("bench" * 8)
FIRST_TOKEN = 1
LAYER_GROUPS = [Span(first, min(8, LAYOUT.num_layers - first)) for first in range(0, LAYOUT.num_layers, 8)]
"""As many layers as workers announce together."""
SETTLE_S = 0.02
_CPUCLOCK_SCHED = 2
"""Linux: with the complement of a process id it names the CPU clock of that process, see clock_getcpuclockid(3)."""


@dataclass(frozen=True, slots=True)
class TransferBenchPlan:
    """Transfers to measure. Each transport and length has one additional warm-up run."""

    transports: tuple[str, ...]
    num_tokens: tuple[int, ...]
    num_runs: int
    chunk_bytes: int
    trust_fabric: bool = False
    """nixl and mooncake, and gloo beyond this host: the operator says that nobody else can use the network."""
    device: str = "cpu"
    """Where KV is on both sides."""

    def settings(self, *transports: str) -> TransferSettings:
        """The settings of a sender or receiver with these transports."""
        return TransferSettings(
            transports=transports or self.transports, chunk_bytes=self.chunk_bytes, trust_fabric=self.trust_fabric
        )

    def transfer_id(self, transport: str, num_tokens: int, run: int) -> str:
        """The id of a transfer. The transfer that measures the tail has the suffix "-tail"."""
        return f"{transport}-{num_tokens}-{run}"


@dataclass(slots=True)
class Figures:
    """Measurements of one transport and length, the warm-up first. CPU times are of the processes on this host, sender
    first, without the tail transfers."""

    seconds: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)
    cpu_s: list[list[float]] = field(default_factory=list)


def shuffled_blocks(num_tokens: int) -> tuple[int, ...]:
    """Block ids of one prompt, in random order."""
    return tuple(random.Random(num_tokens).sample(range(NUM_BLOCKS), LAYOUT.num_blocks_for(num_tokens)))


def make_cache(device: str) -> KVCache:
    """A KV cache whose memory has been touched completely."""
    cache = KVCache(LAYOUT, NUM_BLOCKS, torch.device(device))
    cache.tensor.fill_(1.0)
    cache.note_written(LAYOUT.whole.layers)
    return cache


def receive(plan: TransferBenchPlan, pipe: Connection) -> None:
    """Run the receiver, as in a decode worker, in the other process. Stops when the pipe closes."""
    quiet()
    keep_freed_memory()
    run_async(_receive(plan, pipe))


async def _receive(plan: TransferBenchPlan, pipe: Connection) -> None:
    async with receiving(plan, Listen("127.0.0.1", 0, KEY)) as address:
        pipe.send(address)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
        await stop.wait()
        asyncio.get_running_loop().remove_reader(pipe.fileno())


async def receive_from_others(plan: TransferBenchPlan, address: str) -> None:
    """Run the receiver at `address` for a sender on another host, until cancelled."""
    host, port = host_and_port(address, 0, name="--receive")
    async with receiving(plan, Listen(host, port, KEY)) as bound:
        print(f"receiving at {bound}; Ctrl-C ends it", flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def receiving(plan: TransferBenchPlan, listen: Listen) -> AsyncIterator[str]:
    """A receiver that expects all transfers of the plan; yields its address."""
    callbacks = ReceiverCallbacks(lambda *_: None, lambda *_: None)
    receiver = KVReceiver(make_cache(plan.device), "bench", callbacks, plan.settings())
    for transport in plan.transports:
        for num_tokens in plan.num_tokens:
            for run in range(plan.num_runs + 1):
                transfer_id = plan.transfer_id(transport, num_tokens, run)
                for reserved_id in (transfer_id, f"{transfer_id}-tail"):
                    receiver.expect(ExpectedTransfer(reserved_id, 1, shuffled_blocks(num_tokens), 0, num_tokens))
    server = Server(listen)
    receiver.add_to(server.grpc)
    await server.start([SERVICE_NAME])
    try:
        yield server.address
    finally:
        await receiver.close()
        await server.stop(0)


class Bench:
    """The sending process. Measures times and the CPU use of both processes, or its own if the receiver's is on
    another host."""

    def __init__(self, plan: TransferBenchPlan, address: str, receiver_pid: int | None) -> None:
        self._plan = plan
        self._address = address
        self._pids = [os.getpid(), *([] if receiver_pid is None else [receiver_pid])]
        cache = make_cache(plan.device)
        self._senders = {
            name: KVSender(cache, "bench", Credentials(KEY), plan.settings(name)) for name in plan.transports
        }

    async def measure(self, num_tokens: int) -> tuple[float, dict[str, Figures]]:
        """Median seconds of a memcpy, and the figures of each transport, measured in turn."""
        copies, figures = [], {name: Figures() for name in self._plan.transports}
        num_bytes = LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        for run in range(self._plan.num_runs + 1):
            start = time.perf_counter()
            np.copyto(target, source)
            copies.append(time.perf_counter() - start)
            for name in self._plan.transports:
                await self._transfer(self._plan.transfer_id(name, num_tokens, run), name, num_tokens, figures[name])
        return statistics.median(copies[1:]), figures

    async def _transfer(self, transfer_id: str, name: str, num_tokens: int, figures: Figures) -> None:
        """Measure a transfer with all layers at once, then a transfer whose last layer comes late."""
        block_ids = shuffled_blocks(num_tokens)
        blocks = Span(0, len(block_ids))
        used = self._cpu_s()
        start = time.perf_counter()
        spec = TransferSpec(transfer_id, 1, self._address, "bench", block_ids, LAYOUT.whole)
        transfer = self._senders[name].open(spec)
        for group in LAYER_GROUPS:
            transfer.announce(blocks, group)
        await transfer.commit(num_tokens, FIRST_TOKEN)
        figures.seconds.append(time.perf_counter() - start)
        await asyncio.sleep(SETTLE_S)  # the call ends
        figures.cpu_s.append([after - before for before, after in zip(used, self._cpu_s(), strict=True)])
        transfer = self._senders[name].open(replace(spec, transfer_id=f"{transfer_id}-tail"))
        transfer.announce(blocks, Span(0, LAYOUT.num_layers - 1))
        await asyncio.sleep(SETTLE_S + 3 * figures.seconds[-1])
        start = time.perf_counter()
        transfer.announce(blocks, Span(LAYOUT.num_layers - 1, 1))
        await transfer.commit(num_tokens, FIRST_TOKEN)
        figures.tail_s.append(time.perf_counter() - start)

    def _cpu_s(self) -> list[float]:
        """The CPU time of each process so far, to the nanosecond."""
        return [time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in self._pids]

    async def close(self) -> None:
        """Close the senders of all transports."""
        for sender in self._senders.values():
            await sender.close()


async def measure(plan: TransferBenchPlan, address: str, receiver_pid: int | None, table: Table) -> dict[str, float]:
    """Measure all lengths and transports, and add the rows to `table`; returns their milliseconds."""
    bench, medians_ms = Bench(plan, address, receiver_pid), {}
    for num_tokens in plan.num_tokens:
        megabytes = LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes / 1e6
        copy_s, figures = await bench.measure(num_tokens)
        for name, figure in figures.items():
            seconds = statistics.median(figure.seconds[1:])
            cpu_ms = [f"{statistics.median(used) * 1e3:.2f}" for used in zip(*figure.cpu_s[1:], strict=True)]
            cpu_ms += ["-"] * (2 - len(cpu_ms))  # the receiver on another host
            speeds = (f"{megabytes / copy_s / 1e3:.1f}", f"{megabytes / seconds / 1e3:.2f}", f"{copy_s / seconds:.0%}")
            times = (f"{seconds * 1e3:.1f}", f"{statistics.median(figure.tail_s[1:]) * 1e3:.1f}")
            table.add_row(name, str(num_tokens), f"{megabytes:.1f}", *speeds, *times, *cpu_ms)
            medians_ms[f"KV of {num_tokens} tokens, {name}, ms"] = 1e3 * seconds
    await bench.close()
    return medians_ms


def quiet() -> None:
    """Hide log lines below warnings."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))


async def measure_own(plan: TransferBenchPlan, table: Table) -> dict[str, float]:
    """Measure with a receiver in another process of this host."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive fork
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(plan, theirs))
    # The process inherits what is blocked: Ctrl-C is for this one, which ends both. Starting the tracker unblocks it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    theirs.close()  # so that `ours` ends with the process
    try:
        assert process.pid is not None
        return await measure(plan, await asyncio.to_thread(ours.recv), process.pid, table)
    except BaseException:
        process.terminate()  # it may not have come to the pipe yet
        raise
    finally:
        with suppress(OSError):  # a signal for both has ended it
            ours.send(None)
        process.join()


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    plan = TransferBenchPlan(
        tuple(options.transports.split(",")),
        tuple(int(count) for count in options.tokens.split(",")),
        options.runs,
        options.chunk_bytes,
        options.trust_fabric,
        options.device,
    )
    quiet()
    keep_freed_memory()
    if options.receive:
        run_async(receive_from_others(plan, options.receive))
        return
    columns = ("transport", "prompt tokens", "MB", "memcpy GB/s", "GB/s", "of memcpy", "ms", "tail ms")
    table = Table(*columns, "sender CPU ms", "receiver", title="KV transfer, medians")
    measured = measure(plan, options.send, None, table) if options.send else measure_own(plan, table)
    with showing(table.rows, lambda: Console().print(table)):
        medians_ms = run_async(measured)
    if options.json:
        options.json.write_text(json.dumps(medians_ms))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description="GB/s of each KV transport")
    parser.add_argument("--transports", default="shm,gloo,grpc")
    parser.add_argument("--tokens", default="256,512,1024,1500")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--chunk-bytes", type=int, default=TransferSettings().chunk_bytes)
    parser.add_argument("--device", default="cpu", help="where KV is on both sides, such as cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians there")
    side = parser.add_mutually_exclusive_group()
    side.add_argument("--receive", metavar="HOST:PORT", help="receive there what another host sends, once")
    side.add_argument("--send", metavar="HOST:PORT", help="send to the receiver of another host")
    parser.add_argument(
        "--trust-fabric", action="store_true", help="nixl, mooncake, and gloo to another host: the network is your own"
    )
    return parser


if __name__ == "__main__":
    run_program(main)
