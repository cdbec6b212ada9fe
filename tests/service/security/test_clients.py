"""What a client can say, and what it cannot: no addresses, no transfers, no ids that mean anything, nothing too big."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from mesh.domain import request as limits
from mesh.rpc.channel import open_channel
from mesh.v1 import sequence_pb2
from tandem.v1 import generation_pb2, mesh_pb2
from tests.evidence import Evidence
from tests.service.conftest import make_request
from tests.service.security.keys import MESH_KEY

PROMPT = [65, 66, 67, 68, 69, 70]
# Words that would let a client choose peers, transfers, memory or whose cache it reads.
INTERNAL_WORDS = (
    *("address", "host", "port", "url", "uri", "peer", "endpoint", "worker", "destination", "incarnation"),
    *("transfer", "arena", "nonce", "block", "layout", "kv", "tensor", "cache", "namespace", "tenant", "attempt"),
    *("path", "file", "template"),
)


def public_requests() -> Iterator[Descriptor]:
    """Messages that clients may send."""
    for file, name in ((generation_pb2, "Generation"), (mesh_pb2, "Mesh")):
        for method in file.DESCRIPTOR.services_by_name[name].methods:
            yield method.input_type


def fields_of(message: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """All fields, at any depth."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def test_no_field_names_an_address_or_a_transfer() -> None:
    fields = [field for message in public_requests() for field in fields_of(message, set())]
    assert len(fields) > 20
    named = [f.full_name for f in fields if set(f.name.split("_")) & set(INTERNAL_WORDS)]
    # Values for the operator's template, which a client cannot name; hints about the client's own share of the cache;
    # and workers that an operator names.
    of_operators = {f"tandem.v1.{name}Request.worker_id" for name in ("SetDraining", "SwitchRole")}
    of_clients = {"tandem.v1.Chat.template_kwargs_json", "tandem.v1.GenerateRequest.cache_hints"}
    assert set(named) == of_clients | of_operators
    assert [f.full_name for f in fields if f.type == FieldDescriptor.TYPE_BYTES] == []
    messages = {f.message_type.full_name for f in fields if f.message_type is not None}
    assert not any(name.startswith(("mesh.v1.", "google.protobuf.Any")) for name in messages)


async def test_equal_client_ids_never_meet(make_mesh: Any, evidence: Evidence) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    request = make_request(token_ids=PROMPT, max_new_tokens=2)
    request.client_request_id = "mine"
    ids = []
    for _ in range(3):
        messages = [message async for message in mesh.stub.Generate(request, timeout=10)]
        ids.append(messages[0].prompt.request_id)
    started = [start.sequence.request_id for start in decode.started.items]
    assert started == ids
    assert len(set(ids)) == 3
    assert not any("mine" in start.SerializeToString().decode("latin-1") for start in decode.started.items)
    evidence("R18", "client ids that met or reached a worker", "0 of 3", target="0", ok=True)


async def test_smuggled_internal_fields_are_ignored(make_mesh: Any, evidence: Evidence) -> None:
    """A worker's message, sent as unknown fields behind a public one."""
    mesh = await make_mesh()
    decode = await mesh.decode()
    smuggled = sequence_pb2.SequenceSpec(request_id="evil", cache_namespace="evil", attempt=9).SerializeToString()
    raw = make_request(token_ids=PROMPT, max_new_tokens=2).SerializeToString()
    # Field 999, length-delimited, holds the whole message: generation.proto has no such field.
    raw += b"\xba\x3e" + bytes([len(smuggled)]) + smuggled
    call = mesh.channel.unary_stream(
        "/tandem.v1.Generation/Generate", response_deserializer=generation_pb2.GenerateResponse.FromString
    )
    messages = [message async for message in call(raw, timeout=10)]
    assert messages[-1].finish_reason
    (start,) = decode.started.items
    assert b"evil" not in start.SerializeToString()
    evidence("R18", "smuggled worker fields that had an effect", 0, target="0", ok=True)


async def test_a_forged_worker_never_joins(make_mesh: Any, evidence: Evidence) -> None:
    mesh = await make_mesh(mesh_key=MESH_KEY)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.prefill("forged", mesh_key="another-key-altogether")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not list(mesh.router.membership.views())
    async with open_channel(mesh.router.public.address) as channel:
        register = channel.stream_stream("/mesh.v1.Registry/Register")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await register(timeout=30).read()  # sends nothing: that could fail first, as INTERNAL
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    evidence("R18", "forged workers that joined", "0 of 2 ways", target="0", ok=True)


TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("num_choices", {"num_choices": limits.MAX_NUM_CHOICES + 1}),
    ("num_choices", {"num_choices": 2**32 - 1}),
    ("top_logprobs", {"output": {"top_logprobs": limits.MAX_TOP_LOGPROBS + 1}}),
    ("stop has", {"stop": ["x"] * (limits.MAX_STOP_STRINGS + 1)}),
    ("stop string", {"stop": ["x" * (limits.MAX_STOP_CHARS + 1)]}),
    ("stop string", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [1] * (limits.MAX_STOP_TOKEN_IDS + 1)}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 1.0)}),
    ("logit_bias", {"logit_bias": {1: float("inf")}}),
    ("temperature", {"temperature": float("nan")}),
    ("max_new_tokens", {"max_new_tokens": 2**31 - 1}),
    ("prompt has", {"token_ids": [1] * 30_000}),
    ("vocabulary", {"token_ids": [2**32 - 1]}),
]


@pytest.mark.parametrize(
    ("complaint", "request_fields"), TOO_MUCH, ids=[f"{n}-{c}" for n, (c, _) in enumerate(TOO_MUCH)]
)
async def test_too_much_is_refused_at_once(
    make_mesh: Any, evidence: Evidence, complaint: str, request_fields: dict[str, Any]
) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    request = make_request(**{"token_ids": PROMPT, "max_new_tokens": 2} | request_fields)
    times_s = []
    for _ in range(9):
        started_s = time.perf_counter()
        with pytest.raises(grpc.aio.AioRpcError, match=complaint) as refused:
            await mesh.stub.Generate(request, timeout=10).read()
        times_s.append(time.perf_counter() - started_s)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    is_fast = min(times_s) < 0.01  # the best of several: tests share their cores
    evidence("R19", "requests over a limit, refused", "in < 10 ms", target="< 10 ms", ok=is_fast, is_reported_only=True)
    assert not prefill.calls.items
    assert not decode.started.items
    mesh.assert_at_rest()


async def test_the_largest_of_everything_is_served(make_mesh: Any) -> None:
    """The same table, from the other side."""
    mesh = await make_mesh()
    await mesh.decode()
    result = await mesh.generate(
        token_ids=PROMPT,
        max_new_tokens=2,
        num_choices=limits.MAX_NUM_CHOICES,
        output={"top_logprobs": limits.MAX_TOP_LOGPROBS},
        stop=["x" * limits.MAX_STOP_CHARS] * limits.MAX_STOP_STRINGS,
        stop_token_ids=[1] * limits.MAX_STOP_TOKEN_IDS,
        seed=limits.MAX_SEED,
    )
    assert {message.index for message in result.messages} == set(range(limits.MAX_NUM_CHOICES))


async def test_bodies_above_4_mib_are_refused(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.generate(prompt="x" * (4 << 20))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    mesh.assert_at_rest()
