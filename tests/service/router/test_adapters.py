"""LoRA adapters behind a router: requests name them, and only workers that have them get such requests."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.domain.tokens import SequenceFailure
from mesh.domain.worker import Adapter
from tandem.v1 import generation_pb2
from tests.fakes.router_workers import DecodeScript, FakeDecodeWorker, expected_tokens
from tests.service.conftest import Mesh

PROMPT = [65, 66, 67, 68]
MINE, OTHER = Adapter("mine", "digest-of-mine"), Adapter("other", "digest-of-other")


async def test_a_request_names_its_adapter(make_mesh: Any) -> None:
    """By the field, or in place of the model: both workers are told the digest."""
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(adapters=(MINE, OTHER)), await mesh.decode(adapters=(MINE, OTHER))
    for request in ({"adapter": "mine"}, {"model": "mine"}, {"model": "tiny", "adapter": "mine"}, {}):
        assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=3, **request)).ids() == expected_tokens(PROMPT, 3)
    digests = [MINE.digest] * 3 + [""]
    assert [call.sequence.adapter for call in prefill.calls.items] == digests
    assert [start.sequence.adapter for start in decode.started.items] == digests
    (listed,) = (await mesh.stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert list(listed.adapters) == ["mine", "other"]
    found = await mesh.stub.GetModel(generation_pb2.GetModelRequest(model="other"))
    assert found.model.name == "tiny"


@pytest.mark.parametrize(
    ("request_fields", "code", "said"),
    [
        ({"adapter": "none"}, grpc.StatusCode.NOT_FOUND, "model 'tiny' has no adapter 'none'; it has: mine"),
        ({"model": "none"}, grpc.StatusCode.NOT_FOUND, "model 'none' is not served here; served: tiny, mine"),
        ({"model": "mine", "adapter": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "give one of them"),
    ],
)
async def test_unknown_adapters_are_refused_with_those_there_are(
    make_mesh: Any, request_fields: dict[str, str], code: grpc.StatusCode, said: str
) -> None:
    mesh = await make_mesh()
    await mesh.decode(adapters=(MINE,))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(token_ids=PROMPT, **request_fields)
    assert caught.value.code() is code
    assert said in (caught.value.details() or "")
    mesh.assert_at_rest()


@pytest.mark.parametrize("request_fields", [{"adapter": "none"}, {"model": "none"}])
async def test_of_many_adapters_a_refusal_names_some(make_mesh: Any, request_fields: dict[str, str]) -> None:
    mesh = await make_mesh()
    await mesh.decode(adapters=tuple(Adapter(f"adapter-{number:04}", f"digest-{number}") for number in range(1000)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(token_ids=PROMPT, **request_fields)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    details = caught.value.details() or ""
    assert "adapter-0000, adapter-0001, " in details
    num_more = 980 + ("model" in request_fields)  # the model itself is one of the names
    assert details.endswith(f"and {num_more} more")


async def test_only_workers_that_have_it_get_it(make_mesh: Any) -> None:
    mesh = await make_mesh()
    without, with_it = await mesh.decode("decode-0"), await mesh.decode("decode-1", adapters=(MINE,))
    for _ in range(3):
        await mesh.generate(token_ids=PROMPT, max_new_tokens=2, adapter="mine")
    assert (len(without.started.items), len(with_it.started.items)) == (0, 3)


async def test_a_replay_keeps_the_adapter(make_mesh: Any) -> None:
    mesh: Mesh = await make_mesh()
    first, second = await mesh.decode("decode-0", adapters=(MINE,)), await mesh.decode("decode-1", adapters=(MINE,))
    for worker in (first, second):
        worker.scripts.append(DecodeScript(fail_after=(2, SequenceFailure.PREEMPTED)))
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=6, adapter="mine")
    assert result.ids() == expected_tokens(PROMPT, 6)
    sequences = [start.sequence for worker in (first, second) for start in worker.started.items]
    assert len(sequences) > 1
    assert {sequence.adapter for sequence in sequences} == {MINE.digest}


async def test_when_those_that_have_it_are_gone_it_is_unavailable(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode("decode-0")
    with_it = await mesh.decode("decode-1", adapters=(MINE,))
    await with_it.kill()
    await mesh.until(lambda: len(mesh.model.mesh.usable()) == 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(token_ids=PROMPT, adapter="mine")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "decode workers that have the request's adapter are away" in (caught.value.details() or "")
    await mesh.generate(token_ids=PROMPT, max_new_tokens=1)


async def test_a_stream_waits_for_the_only_worker_that_has_its_adapter(make_mesh: Any) -> None:
    mesh: Mesh = await make_mesh()
    await mesh.decode("decode-0")
    with_it = await mesh.decode("decode-1", adapters=(MINE,))
    with_it.gate.close()
    stream = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=6, adapter="mine"))
    await with_it.started.wait_len(1)
    with_it.gate.allow(2)
    await with_it.sent.wait_len(2)
    await with_it.kill()
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    await mesh.generate(token_ids=PROMPT, max_new_tokens=1)
    await mesh.decode("decode-1", adapters=(MINE,), incarnation="decode-1-2")
    assert (await stream).ids() == expected_tokens(PROMPT, 6)
    assert mesh.router.journal.num_replays == 1


@pytest.mark.parametrize(("lost", "here"), [("digest-1", "digest-2"), ("digest-2", "digest-1")])
async def test_of_two_adapters_of_one_name_that_of_a_worker_that_is_here_counts(
    make_mesh: Any, lost: str, here: str
) -> None:
    mesh: Mesh = await make_mesh()
    former = await mesh.decode("decode-0", adapters=(Adapter("mine", lost),))
    await former.kill()
    await mesh.until(lambda: not mesh.model.mesh.usable())
    decode = await mesh.decode("decode-1", adapters=(Adapter("mine", here),))
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=2, adapter="mine")
    assert result.ids() == expected_tokens(PROMPT, 2)
    assert decode.started.items[0].sequence.adapter == here


async def test_an_adapter_of_two_models_needs_the_models_name(model_dir: Path) -> None:
    mesh = Mesh(model_dir, models=f"a={model_dir},b={model_dir}")
    await mesh.start()
    try:
        for model in ("a", "b"):
            await mesh.add(FakeDecodeWorker, f"{model}-decode", model=model, adapters=(MINE,))
        await mesh.until(lambda: all(router.mesh.has_path for router in mesh.router.model_routers))
        with pytest.raises(
            grpc.aio.AioRpcError, match="a, b have an adapter 'mine': name one of them, and the adapter"
        ):
            await mesh.generate(token_ids=PROMPT, model="mine")
        await mesh.generate(token_ids=PROMPT, max_new_tokens=1, model="b", adapter="mine")
    finally:
        await mesh.stop()
