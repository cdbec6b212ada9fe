"""Whatever bytes come as a request, to a worker or to the router: it is served, or a MeshError comes out."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given

from mesh import wire
from mesh.domain.errors import MeshError
from mesh.domain.tokens import SampledToken, SequenceOutput
from mesh.v1 import decode_pb2, prefill_pb2, sequence_pb2, worker_pb2
from router.admission.forecast import Forecast
from router.admission.limiter import LocalLimiter
from router.api.generation_servicer import GenerationServicer
from router.journal import Journal
from router.served_model import ServedModel
from router.service import GenerationService
from router.service_directory import ServiceDirectory
from router.settings import RouterSettings
from router.tenants import NoKeys
from router.text.input_processor import InputProcessor
from tandem.v1 import generation_pb2
from tests.fakes.requests import make_request
from tests.fakes.router_model import write_checkpoint
from tests.fakes.router_views import decode, no_traffic
from tests.unit.fuzz.mutations import fuzzed, near

SPEC = wire.spec_to_proto(make_request("r", range(20), top_logprobs=2, cache_namespace="m", time_left_s=3.0))
SEQUENCES = [
    SPEC.SerializeToString(),
    wire.spec_to_proto(
        make_request("r", [1], sampling={"logit_bias": {3: 1.0}, "temperature": 1.0})
    ).SerializeToString(),
]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "stop": ["ab"], "logit_bias": {5: 1.0}, "max_new_tokens": 3, "seed": 1}
GENERATES = [
    generation_pb2.GenerateRequest(prompt="hello", sampling=SAMPLING, num_choices=2).SerializeToString(),
    generation_pb2.GenerateRequest(
        token_ids={"ids": [70, 71]}, output={"top_logprobs": 2, "prompt_logprobs": True, "echo": True}
    ).SerializeToString(),
    generation_pb2.GenerateRequest(
        chat={"messages": [{"role": "user", "content": "hi"}]}, client_request_id="me", model="tiny"
    ).SerializeToString(),
    generation_pb2.GenerateRequest(prompt="x", priority=1, ttft_target={"nanos": 5}).SerializeToString(),
    generation_pb2.GenerateRequest(
        prompt="x", cache_hints={"session_id": "s", "keep_priority": 3, "time_to_live": {"seconds": 9}}
    ).SerializeToString(),
]
ATTACHES = [
    decode_pb2.AttachRequest(start={"sequence": SPEC, "transfer_id": "t"}).SerializeToString(),
    decode_pb2.AttachRequest(abort={"request_id": "r", "attempt": 1}).SerializeToString(),
]
REGISTERS = [
    worker_pb2.RegisterRequest(record=wire.worker_to_proto(decode().info)).SerializeToString(),
    worker_pb2.RegisterRequest(heartbeat={"load": {"free_blocks": 3}, "state": 1}).SerializeToString(),
]


@fuzzed
@given(near(SEQUENCES))
def test_sequences(raw: bytes) -> None:
    try:
        spec = wire.spec_from_proto(sequence_pb2.SequenceSpec.FromString(raw))
    except (DecodeError, MeshError):
        return
    assert 1 <= spec.num_prompt_tokens <= len(spec.token_ids) < spec.max_total_tokens
    wire.spec_to_proto(spec)


@fuzzed
@given(near([*ATTACHES, *REGISTERS]))
def test_commands_and_registrations(raw: bytes) -> None:
    with contextlib.suppress(DecodeError, MeshError):
        wire.spec_from_proto(decode_pb2.AttachRequest.FromString(raw).start.sequence)
    with contextlib.suppress(DecodeError, MeshError):
        wire.spec_from_proto(prefill_pb2.PrefillRequest.FromString(raw).sequence)
    with contextlib.suppress(DecodeError, MeshError):
        message = worker_pb2.RegisterRequest.FromString(raw)
        wire.load_from_proto(message.heartbeat.load)
        wire.state_from_proto(message.heartbeat.state)
        wire.worker_from_proto(message.record)


class OneTokenEach:
    """In place of the mesh: every choice is one token and then the end of its budget."""

    async def run(self, choice: Any, timeline: Any, deadline_s: float | None) -> None:
        spec = choice.next_spec(0, eos_token_ids=frozenset(), namespace="tiny")
        for index in range(min(3, spec.sampling.max_new_tokens)):
            choice.accept(SequenceOutput(spec.request_id, 0, index, (SampledToken(70, -1.0),), None))
            if choice.finish_reason is not None:
                return
        raise MeshError("enough")


class Context:
    """A caller without credentials or deadline."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    def add_done_callback(self, callback: Any) -> None:
        """Nobody leaves early."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InputProcessor]:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    processor = InputProcessor(ServedModel.load("tiny", folder), folder)
    yield processor
    processor.close()


def servicer_of(inputs: InputProcessor, limiter: LocalLimiter) -> GenerationServicer:
    journal = Journal(time.monotonic)
    service = GenerationService(
        inputs,
        RouterSettings(model="tiny"),
        limiter=limiter,
        forecast=Forecast(time.monotonic),
        mesh=SimpleNamespace(  # type: ignore[arg-type]
            decode_capacities=(), has_path=True, knows_adapters=True, adapters=dict, adapter_digest=str.lower
        ),
        dispatcher=OneTokenEach(),  # type: ignore[arg-type]
        journal=journal,
    )
    return GenerationServicer(ServiceDirectory([service], journal, no_traffic()), NoKeys())


def test_generate(inputs: InputProcessor) -> None:
    async def call(servicer: GenerationServicer, request: generation_pb2.GenerateRequest) -> None:
        async for _ in servicer.Generate(request, Context()):  # type: ignore[arg-type]
            pass

    @fuzzed
    @given(near(GENERATES))
    def check(raw: bytes) -> None:
        with contextlib.suppress(DecodeError, MeshError):
            request = generation_pb2.GenerateRequest.FromString(raw)
            runner.run(call(servicer_of(inputs, limiter), request))
        assert limiter.num_held == 0

    limiter = LocalLimiter(8)
    with asyncio.Runner() as runner:
        check()


def test_tokenize(inputs: InputProcessor) -> None:
    @fuzzed
    @given(near(GENERATES))
    def check(raw: bytes) -> None:
        with contextlib.suppress(DecodeError, MeshError):
            request = generation_pb2.TokenizeRequest.FromString(raw)
            runner.run(servicer_of(inputs, LocalLimiter(8)).Tokenize(request, Context()))  # type: ignore[arg-type]

    with asyncio.Runner() as runner:
        check()
