"""A great many frames that are nearly right, without a search: bits, lengths and pieces of honest messages changed.

TANDEM_FUZZ_FRAMES=1000000 python -m pytest -m soak tests/unit/fuzz
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import DecodeError

from kvtransfer.messages import reply_from_proto, request_from_bytes
from mesh import wire
from mesh.domain.errors import MeshError
from mesh.v1 import decode_pb2, kvtransfer_pb2, prefill_pb2, sequence_pb2, worker_pb2
from tests.evidence import Evidence
from tests.service.worker_rig import MESH_KEY, WorkerRig, worker_rig
from tests.unit.fuzz.mutations import edit_at_random
from tests.unit.fuzz.test_requests import ATTACHES, REGISTERS, SEQUENCES
from tests.unit.fuzz.test_transfers import HONEST

FRAMES = int(os.environ.get("TANDEM_FUZZ_FRAMES", "100000"))
SOCKET_FRAMES = FRAMES // 50

METHODS = {
    "/mesh.v1.Decode/Attach": ("decode_address", ATTACHES),
    "/mesh.v1.KvTransfer/Push": ("decode_address", HONEST),
    "/mesh.v1.Prefill/Prefill": ("prefill_address", SEQUENCES),
}


def translate_worker(raw: bytes) -> None:
    message = worker_pb2.RegisterRequest.FromString(raw)
    wire.load_from_proto(message.heartbeat.load)
    wire.state_from_proto(message.heartbeat.state)
    wire.worker_from_proto(message.record)


HANDLERS: list[tuple[list[bytes], Callable[[bytes], object]]] = [
    (SEQUENCES, lambda raw: wire.spec_from_proto(sequence_pb2.SequenceSpec.FromString(raw))),
    (ATTACHES, lambda raw: wire.spec_from_proto(decode_pb2.AttachRequest.FromString(raw).start.sequence)),
    (SEQUENCES, lambda raw: wire.spec_from_proto(prefill_pb2.PrefillRequest.FromString(raw).sequence)),
    (HONEST, request_from_bytes),
    (HONEST, lambda raw: reply_from_proto(kvtransfer_pb2.PushResponse.FromString(raw))),
    (REGISTERS, translate_worker),
]


@pytest.mark.soak
@pytest.mark.timeout(60 + FRAMES / 1000)
def test_frames_are_understood_or_refused(evidence: Evidence) -> None:
    rng = random.Random(17)
    outcomes: Counter[str] = Counter()
    for _ in range(FRAMES):
        honest, handle = rng.choice(HANDLERS)
        try:
            handle(edit_at_random(rng, rng.choice(honest)))
        except (DecodeError, MeshError) as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["understood"] += 1
    assert min(outcomes["understood"], outcomes["DecodeError"], outcomes["InvalidRequest"]) > FRAMES / 1000
    evidence("R17", "unhandled exceptions, mutated frames", f"0 of {FRAMES}", target="0", ok=True)


async def send(rig: WorkerRig, rng: random.Random, outcomes: Counter[str]) -> None:
    """A few mutated frames to a worker, as a holder of the mesh key."""
    method = rng.choice(list(METHODS))
    address, honest = METHODS[method]
    async with grpc.aio.insecure_channel(getattr(rig, address)) as channel:
        for _ in range(50):
            frames = [edit_at_random(rng, rng.choice(honest)) for _ in range(rng.randint(1, 3))]
            if method == "/mesh.v1.Prefill/Prefill":
                call = channel.unary_stream(method)(frames[0], metadata=MESH_KEY.metadata(), timeout=1)
            else:
                call = channel.stream_stream(method)(iter(frames), metadata=MESH_KEY.metadata(), timeout=1)
            try:
                async for _ in call:
                    pass
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1


@pytest.mark.soak
@pytest.mark.timeout(120 + SOCKET_FRAMES)
async def test_workers_survive_frames_through_their_sockets(evidence: Evidence) -> None:
    rng, outcomes = random.Random(18), Counter[str]()
    async with worker_rig() as rig:
        while outcomes.total() < SOCKET_FRAMES:
            await asyncio.gather(*(send(rig, random.Random(rng.random()), outcomes) for _ in range(4)))
        assert outcomes["UNKNOWN"] == 0, outcomes  # how gRPC shows an exception that nobody has handled
        assert not rig.prefill.died.is_set()
        assert not rig.decode.died.is_set()
        await rig.wait_whole()
    evidence("R17", "dead workers, mutated calls over sockets", f"0 of {outcomes.total()}", target="0", ok=True)
