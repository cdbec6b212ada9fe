"""How fast KV moves between two processes on this host: `python -m bench.transfer`.

The time is end to end, from opening a transfer until the receiver has verified and committed it, with everything
pushed at once, layer by layer. Block ids are shuffled on both sides, as in a pool that has been in use. `memcpy` copies
as many bytes once, within one process: a bound that no transport can reach.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import structlog
import torch
from rich.console import Console
from rich.table import Table

from engine.kv_cache import KVCache
from kvtransfer import (
    SERVICE_NAME,
    KVReceiver,
    KVSender,
    KvTransferServicer,
    ReceiverCallbacks,
    Reservation,
    TransferSettings,
    TransferSpec,
)
from mesh.domain.kv import KVLayout
from mesh.domain.tokens import SampledToken
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from tandem.v1 import kvtransfer_pb2_grpc

LAYOUT = KVLayout("bench", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 256
KEY = MeshKey("bench" * 8)
FIRST_TOKEN = SampledToken(1, 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; one more run of each warms up."""

    transports: tuple[str, ...]
    num_tokens: tuple[int, ...]
    num_runs: int
    chunk_bytes: int

    def transfers(self, transport: str, num_tokens: int) -> list[str]:
        """Transfer ids of one row of the table."""
        return [f"{transport}-{num_tokens}-{run}" for run in range(self.num_runs + 1)]


def shuffled_blocks(num_tokens: int) -> tuple[int, ...]:
    """Block ids for one prompt."""
    return tuple(random.Random(num_tokens).sample(range(NUM_BLOCKS), LAYOUT.num_blocks_for(num_tokens)))


def make_cache() -> KVCache:
    """A cache of which every page has been touched."""
    cache = KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    cache.tensor.fill_(1.0)
    return cache


def receive(plan: Plan, pipe: Connection) -> None:
    """The other process: a decode worker's receiver. Stops when the pipe closes."""
    quiet()
    asyncio.run(_receive(plan, pipe))


async def _receive(plan: Plan, pipe: Connection) -> None:
    receiver = KVReceiver(make_cache(), "bench", ReceiverCallbacks(lambda *_: None, lambda *_: None))
    for transport in plan.transports:
        for num_tokens in plan.num_tokens:
            for transfer_id in plan.transfers(transport, num_tokens):
                receiver.expect(Reservation(transfer_id, 1, shuffled_blocks(num_tokens), 0, num_tokens))
    server = Server(Listen("127.0.0.1", 0, KEY))
    kvtransfer_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(receiver), server.grpc)
    await server.start([SERVICE_NAME])
    pipe.send(server.address)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
    await stop.wait()
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    await receiver.close()
    await server.stop(0)


async def time_transfers(sender: KVSender, address: str, transfer_ids: Sequence[str], num_tokens: int) -> float:
    """Median seconds of one transfer."""
    block_ids = shuffled_blocks(num_tokens)
    times = []
    for transfer_id in transfer_ids:
        start = time.perf_counter()
        transfer = sender.open(TransferSpec(transfer_id, 1, address, "bench", block_ids))
        for layer in range(LAYOUT.num_layers):
            transfer.push(0, len(block_ids), layer, 1)
        await transfer.commit(num_tokens, FIRST_TOKEN)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def time_memcpy(num_bytes: int, num_runs: int) -> float:
    """Median seconds of one copy."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def measure(plan: Plan, address: str, table: Table) -> None:
    """Fill the table."""
    cache = make_cache()
    seconds: dict[tuple[str, int], float] = {}
    for transport in plan.transports:
        settings = TransferSettings(transports=(transport,), chunk_bytes=plan.chunk_bytes)
        sender = KVSender(cache, "bench", Credentials(KEY), settings)
        for num_tokens in plan.num_tokens:
            ids = plan.transfers(transport, num_tokens)
            seconds[transport, num_tokens] = await time_transfers(sender, address, ids, num_tokens)
        await sender.close()
    for num_tokens in plan.num_tokens:
        num_bytes = LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes
        copied = num_bytes / time_memcpy(num_bytes, plan.num_runs) / 1e9
        cells = [f"{num_bytes / seconds[name, num_tokens] / 1e9:.2f}" for name in plan.transports]
        times = [f"{seconds[name, num_tokens] * 1e3:.1f}" for name in plan.transports]
        table.add_row(str(num_tokens), f"{num_bytes / 1e6:.1f}", f"{copied:.2f}", *cells, *times)


def quiet() -> None:
    """No log lines between the numbers."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description="GB/s of each KV transport")
    parser.add_argument("--transports", default="shm,grpc")
    parser.add_argument("--tokens", default="256,512,1024,1500")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--chunk-bytes", type=int, default=TransferSettings().chunk_bytes)
    options = parser.parse_args(argv)
    tokens = tuple(int(count) for count in options.tokens.split(","))
    plan = Plan(tuple(options.transports.split(",")), tokens, options.runs, options.chunk_bytes)
    quiet()
    context = multiprocessing.get_context("spawn")  # gRPC does not survive fork
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(plan, theirs))
    process.start()
    names = plan.transports
    gbps, millis = [f"{name} GB/s" for name in names], [f"{name} ms" for name in names]
    table = Table("prompt tokens", "MB", "memcpy GB/s", *gbps, *millis, title="KV transfer, median")
    try:
        asyncio.run(measure(plan, ours.recv(), table))
    finally:
        ours.send(None)
        process.join()
    Console().print(table)


if __name__ == "__main__":
    main()
