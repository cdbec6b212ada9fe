"""Holds streams of a router open: as many as the last line of standard input says.

    python -m bench.open_streams ADDRESS[,ADDRESS...]

Streams are bare gRPC calls, since what is measured is the router. The process prints its totals each second. It ends
with its standard input.
"""

import asyncio
import sys
import time
from collections import Counter

import grpc

from bench.modelled_workers import MAX_MODEL_LEN, MODEL_NAME
from bench.reporting import report_until_end
from mesh.interrupts import run_program
from mesh.process_limits import raise_open_files
from tandem.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

_NUM_PROMPT_TOKENS = 32
_MAX_NEW_TOKENS = MAX_MODEL_LEN - 2 * _NUM_PROMPT_TOKENS  # more than anybody waits for
_NUM_CONNECTIONS = 4  # to each router
_MAX_OPENING = 32
_RETRY_S = 1.0


class OpenStreams:
    """Streams over `channels`, which take them in turn."""

    def __init__(self, channels: list[grpc.aio.Channel]) -> None:
        self.totals: Counter[str] = Counter(open=0, failed=0, refused=0, messages=0)
        self.first_token_s = 0.0
        self._stubs = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]
        self._opening = asyncio.Semaphore(_MAX_OPENING)
        self._streams: list[asyncio.Task[None]] = []

    def hold(self, count: int) -> None:
        """Keep this many streams open from now on; never fewer than before."""
        while len(self._streams) < count:
            stub = self._stubs[len(self._streams) % len(self._stubs)]
            self._streams.append(asyncio.create_task(self._stay(stub, len(self._streams))))

    async def close(self) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def _stay(self, stub: generation_pb2_grpc.GenerationStub, number: int) -> None:
        """Keep one stream open until cancelled."""
        ids = [3 + (number * 7 + position) % 200 for position in range(_NUM_PROMPT_TOKENS)]
        request = generation_pb2.GenerateRequest(
            model=MODEL_NAME,
            token_ids=generation_pb2.TokenIds(ids=ids),
            sampling=sampling_pb2.SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, ignore_eos=True),
        )
        while True:
            try:
                await self._hold(stub, request)
                self.totals["ended"] += 1
            except grpc.aio.AioRpcError as error:
                is_refusal = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                self.totals["refused" if is_refusal else "failed"] += 1
                if not is_refusal:
                    sys.stderr.write(f"{error.code().name}: {error.details()}\n")
            await asyncio.sleep(_RETRY_S)

    async def _hold(self, stub: generation_pb2_grpc.GenerationStub, request: generation_pb2.GenerateRequest) -> None:
        is_open = False
        await self._opening.acquire()
        try:
            begun_s = time.monotonic()
            async for message in stub.Generate(request):
                self.totals["messages"] += 1
                if not is_open and message.tokens:
                    is_open = True
                    self.first_token_s += time.monotonic() - begun_s
                    self.totals["open"] += 1
                    self._opening.release()
        finally:
            if is_open:
                self.totals["open"] -= 1
            else:
                self._opening.release()


async def _run(addresses: list[str]) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(address, options=options) for address in addresses for _ in range(_NUM_CONNECTIONS)
    ]
    streams = OpenStreams(channels)
    try:
        await report_until_end(
            lambda: {**streams.totals, "first_token_s": streams.first_token_s}, lambda line: streams.hold(int(line))
        )
    finally:
        await streams.close()
        for channel in channels:
            await channel.close()


def main() -> None:
    raise_open_files()
    asyncio.run(_run(sys.argv[1].split(",")))


if __name__ == "__main__":
    run_program(main)
