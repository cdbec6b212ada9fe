"""Clients that open streams and do not read them, beside others that do."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from tandem._requests import GenerateArguments
from tandem.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from tests.chaos.cluster import Cluster
from tests.waiting import until_told

# Every token comes with its twenty best alternatives, so a stream of these is far more than a connection buffers.
_NUM_TOKENS = 480
_TIMEOUT_S = 300.0
_NEIGHBOUR: GenerateArguments = {
    "token_ids": [1, 2, 3],
    "max_new_tokens": 60,
    "ignore_eos": True,
    "timeout": _TIMEOUT_S,
}
_NUM_NEIGHBOURS = 2
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0))


@dataclass
class Read:
    """The results of many readers: how their streams ended, in seconds from their start."""

    endings: Counter[str] = field(default_factory=Counter)
    most_rss_bytes: int = 0
    neighbours_gaps_s: list[float] = field(default_factory=list)


async def read_beside(cluster: Cluster, count: int, silent_s: float, num_choices: int) -> Read:
    """`count` readers that take one message, then nothing, then the rest; two neighbours that read.

    A stream of one choice is a little more than connections buffer: when its reader stops, all of it has been generated
    soon. With two choices, the reader has stopped long before. They read on `silent_s` after the last of them has been
    generated or cut, however long that takes; at once if that is 0.
    """
    router, read, stop, go_on = cluster.routers[0], Read(), asyncio.Event(), asyncio.Event()
    begun = asyncio.Semaphore(0)
    address = f"127.0.0.1:{cluster.proxies[router].port}"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_watch_rss(cluster, router, read, stop))
        for _ in range(_NUM_NEIGHBOURS):
            tasks.create_task(_read_on(cluster, router, read, stop))
        requests = [_long_request(number, num_choices) for number in range(count)]
        readers = [asyncio.create_task(_read_late(address, request, begun, go_on)) for request in requests]
        if silent_s:
            for _ in range(count):
                await begun.acquire()
            async with cluster.client(router, direct=True) as client:
                await until_told(client.mesh, lambda mesh: mesh.active_requests <= _NUM_NEIGHBOURS, _TIMEOUT_S)
            await asyncio.sleep(silent_s)
        go_on.set()
        read.endings.update(await asyncio.gather(*readers))
        stop.set()
    return read


async def _read_late(
    address: str, request: generation_pb2.GenerateRequest, begun: asyncio.Semaphore, go_on: asyncio.Event
) -> str:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=_TIMEOUT_S)
        try:
            try:
                if await call.read() is grpc.aio.EOF:
                    return "empty"
            finally:
                begun.release()
            await go_on.wait()
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
    return "complete"


def _long_request(number: int, num_choices: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[number % 256, 1, 2]),
        num_choices=num_choices,
        sampling=sampling_pb2.SamplingParams(max_new_tokens=_NUM_TOKENS, ignore_eos=True),
        output=generation_pb2.OutputOptions(top_logprobs=20),
    )


async def _watch_rss(cluster: Cluster, router: str, read: Read, stop: asyncio.Event) -> None:
    while not stop.is_set():
        read.most_rss_bytes = max(read.most_rss_bytes, cluster.rss_bytes(router))
        await asyncio.sleep(0.2)


async def _read_on(cluster: Cluster, router: str, read: Read, stop: asyncio.Event) -> None:
    """A neighbour: its waits between tokens."""
    async with cluster.client(router, direct=True) as client:
        while not stop.is_set():
            times_s = []
            async for _ in client.stream(**_NEIGHBOUR):
                times_s.append(time.monotonic())
            read.neighbours_gaps_s += [later - earlier for earlier, later in pairwise(times_s)]


async def watch_silently(address: str, for_s: float, options: tuple[tuple[str, int], ...]) -> str:
    """Hold a stream on which nothing comes; "" if it is still there at the end, else how it ended."""
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        try:
            async with asyncio.timeout(for_s):
                while await call.read() is not grpc.aio.EOF:
                    pass
                return "the server has ended the stream"
        except TimeoutError:
            return ""
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
