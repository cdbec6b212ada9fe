"""Workers that are only modelled, hundreds in one process: to a router and its registry they are real.

    python -m bench.modelled_workers --role decode --first 0 --count 250 --model DIR --registry ADDRESS

Each has an address of its own, a registration with heartbeats, and answers a router's calls over gRPC. Tokens come at a
rate that is each worker's, however many sequences share it: with more of them each waits longer, so that streams can be
many and tokens few. KV is never sent: a decode worker takes it for granted.

The process prints "listening", then a line of totals each second. Its workers join at the first line of its standard
input, and it ends with that input.
"""

import argparse
import asyncio
import contextlib
import json
import os
import string
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import grpc

from bench.reporting import report_until_end
from mesh import wire
from mesh.domain.errors import WorkerLost
from mesh.domain.kv import KVLayout
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import FinishReason, SampledToken, SequenceOutput
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole
from mesh.interrupts import run_async, run_program
from mesh.logs import configure_logging
from mesh.process_limits import raise_open_files
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router.served_model import ServedModel
from worker.redis_registration import RedisRegistration
from worker.registration import CacheSnapshot, Registration, Report

MODEL_NAME = "modelled"
MAX_MODEL_LEN = 1 << 17
_LAYOUT = KVLayout(MODEL_NAME, 1, 1, 1, 16, "float32")
_NUM_BLOCKS = 1 << 22
_MAX_NUM_SEQS = 1 << 18  # whatever number of streams a few workers share
_MAX_BATCH_TOKENS = 8192
_PREFILL_S = 0.01
_MIN_STEP_S = 0.02
_MAX_STEP_S = 60.0
_MAX_STEP_SEQS = 256  # about a real worker's batch: a message with tokens of 10,000 sequences is none that routers get
_LETTERS = [ord(letter) for letter in string.ascii_lowercase]  # ids of the bundled tokenizer, which knows bytes


def output(spec: SequenceSpec, index: int) -> SequenceOutput:
    """The token with this index of a sequence."""
    is_last = spec.num_prompt_tokens + index + 1 >= spec.max_total_tokens
    token = SampledToken(_LETTERS[index % len(_LETTERS)], -1.0)
    return SequenceOutput(spec.request_id, spec.attempt, index, (token,), FinishReason.LENGTH if is_last else None)


@dataclass(eq=False)
class _Link:
    """The sequences of one router at one worker, each with the index of its next token."""

    outbox: asyncio.Queue[decode_pb2.AttachResponse] = field(default_factory=asyncio.Queue)
    has_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[tuple[str, int], tuple[SequenceSpec, int]] = field(default_factory=dict)

    def take(self, request: decode_pb2.AttachRequest) -> None:
        if request.WhichOneof("command") == "abort":
            self.running.pop((request.abort.request_id, request.abort.attempt), None)
            return
        spec = wire.spec_from_proto(request.start.sequence)
        next_index = len(spec.token_ids) - spec.num_prompt_tokens
        if request.start.transfer_id:
            reserved = decode_pb2.SequenceReserved(request_id=spec.request_id, attempt=spec.attempt)
            self.outbox.put_nowait(decode_pb2.AttachResponse(reserved=reserved))
            next_index += 1  # the prefill worker tells the first one
        self.running[spec.request_id, spec.attempt] = (spec, next_index)
        self.has_arrived.set()

    def step(self) -> int:
        """One token for each of the sequences that have waited longest, all in one message. Returns how many."""
        outputs = []
        for key in list(islice(self.running, _MAX_STEP_SEQS)):
            spec, index = self.running.pop(key)
            made = output(spec, index)
            outputs.append(wire.output_to_proto(made))
            if made.finish_reason is None:
                self.running[key] = (spec, index + 1)
        if outputs:
            step = decode_pb2.StepOutputs(outputs=outputs)
            self.outbox.put_nowait(decode_pb2.AttachResponse(step=step))
        return len(outputs)


class ModelledWorker:
    """One worker's identity and load: a ReportSource, and its links to routers."""

    def __init__(self, info: WorkerInfo, totals: Counter[str]) -> None:
        self.info = info
        self.links: set[_Link] = set()
        self._totals = totals

    async def report(self) -> Report:
        self._totals["heartbeats"] += 1
        return Report(await self.load())

    async def load(self) -> WorkerLoad:
        num_running = sum(len(link.running) for link in self.links)
        return WorkerLoad(free_blocks=self.info.num_blocks - num_running, num_running=num_running)

    async def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(await self.load(), 0, [])


class ModelledWorkers(decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer):
    """All workers of this process, behind one gRPC server with a port for each."""

    def __init__(self, tokens_per_s: float) -> None:
        self.totals: Counter[str] = Counter(heartbeats=0, links=0, steps=0, tokens=0, prompts=0)
        self._tokens_per_s = tokens_per_s
        self._by_incarnation: dict[str, ModelledWorker] = {}

    def add(self, info: WorkerInfo) -> ModelledWorker:
        worker = self._by_incarnation[info.incarnation] = ModelledWorker(info, self.totals)
        return worker

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        """Serve one router's link to one decode worker."""
        incarnation = (await anext(aiter(request_iterator))).hello.worker_incarnation
        if incarnation not in self._by_incarnation:
            raise WorkerLost("no such worker")
        worker, link = self._by_incarnation[incarnation], _Link()
        worker.links.add(link)
        self.totals["links"] += 1
        tasks = [asyncio.create_task(self._follow(link, request_iterator)), asyncio.create_task(self._run(link))]
        try:
            yield decode_pb2.AttachResponse(welcome=decode_pb2.AttachWelcome(worker_incarnation=incarnation))
            while True:
                yield await link.outbox.get()
        finally:
            worker.links.discard(link)
            for task in tasks:
                task.cancel()

    async def _follow(self, link: _Link, requests: AsyncIterator[decode_pb2.AttachRequest]) -> None:
        async for request in requests:
            link.take(request)

    async def _run(self, link: _Link) -> None:
        while True:
            while not link.running:  # hundreds of idle links that looked again and again would fill a core
                link.has_arrived.clear()
                await link.has_arrived.wait()
            num_tokens = min(len(link.running), _MAX_STEP_SEQS)
            await asyncio.sleep(min(_MAX_STEP_S, max(_MIN_STEP_S, num_tokens / self._tokens_per_s)))
            num_tokens = link.step()
            self.totals["tokens"] += num_tokens
            self.totals["steps"] += num_tokens > 0

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Compute a prompt in no time worth the name, and say that its KV has arrived."""
        self.totals["prompts"] += 1
        spec = wire.spec_from_proto(request.sequence)
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        await asyncio.sleep(_PREFILL_S)
        first = output(spec, len(spec.token_ids) - spec.num_prompt_tokens)
        yield prefill_pb2.PrefillResponse(first_token=wire.output_to_proto(first))
        finished = prefill_pb2.TransferFinished(bytes=0, duration_ms=0.0)
        yield prefill_pb2.PrefillResponse(finished=finished)


def _info(args: argparse.Namespace, number: int, address: str, tokenizer_fingerprint: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{args.role}-{number:05}",
        incarnation=f"{args.role}-{number:05}-{os.getpid()}",
        role=WorkerRole(args.role),
        address=address,
        model=MODEL_NAME,
        tokenizer_fingerprint=tokenizer_fingerprint,
        layout=_LAYOUT,
        max_batch_tokens=_MAX_BATCH_TOKENS,
        max_num_seqs=_MAX_NUM_SEQS,
        num_blocks=_NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
    )


async def _serve(args: argparse.Namespace) -> None:
    key = MeshKey(os.environ["TANDEM_MESH_KEY"])
    credentials = Credentials(key, None)
    fingerprint = ServedModel.load(MODEL_NAME, Path(args.model)).facts.tokenizer_fingerprint
    server, workers = Server(Listen("127.0.0.1", 0, key)), ModelledWorkers(args.tokens_per_s)
    decode_pb2_grpc.add_DecodeServicer_to_server(workers, server.grpc)
    prefill_pb2_grpc.add_PrefillServicer_to_server(workers, server.grpc)
    ports = [server.grpc.add_insecure_port("127.0.0.1:0") for _ in range(args.count)]
    await server.start([])
    print(json.dumps({"event": "listening"}), flush=True)
    running: list[asyncio.Task[None]] = []

    def join(_: str) -> None:
        for number, port in enumerate(ports, args.first):
            worker = workers.add(_info(args, number, f"127.0.0.1:{port}", fingerprint))
            registration = Registration(worker.info, worker, credentials)
            is_redis = "://" in args.registry
            run = (
                RedisRegistration(args.registry, key, registration).run()
                if is_redis
                else registration.run(args.registry)
            )
            running.append(asyncio.create_task(run))

    try:
        await report_until_end(lambda: dict(workers.totals), join)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--role", choices=[role.value for role in WorkerRole], required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first worker, in its name")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--model", required=True, help="folder of the model that the router serves")
    parser.add_argument("--registry", required=True, help="host:port of a router's registry, or a Redis URL")
    parser.add_argument("--tokens-per-s", type=float, default=4.0, help="of each decode worker and router")
    raise_open_files()
    configure_logging("modelled_workers", level="error")
    run_async(_serve(parser.parse_args()))


if __name__ == "__main__":
    run_program(main)
