"""A sequence whose structure cannot be followed ends, with the reason, on whichever worker sees it first."""

import grpc
import pytest

from mesh.domain.request import mint_id
from mesh.domain.tokens import SequenceFailure
from mesh.v1 import decode_pb2
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation
from tests.service.fake_router import fake_router
from tests.service.worker_rig import worker_rig

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("reason", ["early", "too much work", "not finite"])
async def test_on_the_decode_worker(reason: str) -> None:
    """Before it is begun, or in the middle; its neighbours go on."""
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.decode.runner.refused["bad"] = reason
        for name in ("bad", "good"):
            await router.start(make_request(name, PROMPT, max_new_tokens=6))
        failed = (await router.box("bad").get()).failed
        refused, broken = decode_pb2.SEQUENCE_FAILURE_REFUSED, decode_pb2.SEQUENCE_FAILURE_MODEL_FAILED
        assert (failed.reason, failed.detail) == (broken if reason == "not finite" else refused, reason)
        assert await router.collect(make_request("good", PROMPT)) == fake_continuation(PROMPT, 6)
        await rig.wait_whole()


@pytest.mark.parametrize("reason", ["early", "too much work", "not finite"])
async def test_on_the_prefill_worker(reason: str) -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.prefill.runner.refused["bad"] = reason
        request, transfer_id = make_request("bad", PROMPT), mint_id()
        await router.start(request, transfer_id)
        reserved = (await router.box("bad").get()).reserved
        call = router.prefill(request, transfer_id, reserved.ready_tokens)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in call]
        status = grpc.StatusCode.INTERNAL if reason == "not finite" else grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.code() is status
        assert caught.value.details() == reason
        value = rig.prefill_metrics.registry.get_sample_value
        expected = SequenceFailure.MODEL_FAILED if reason == "not finite" else SequenceFailure.REFUSED
        for failure in SequenceFailure:
            labels = {"role": "prefill", "reason": failure.value}
            assert value("tandem_engine_sequence_failures_total", labels) == (failure is expected)
        await router.abort(request)
        await rig.wait_whole()
        cleared = (rig.decode.runner.store.data == 0).all(axis=(0, 1, 3, 4, 5))
        assert cleared.sum() == 2, "KV that was on its way is cleared before others get its blocks"
