"""Where a request's time went, as the last message of each choice says."""

from typing import Any

from mesh.domain.tokens import SequenceFailure
from tandem.v1 import generation_pb2
from tests.fakes.router_workers import DecodeScript, expected_tokens
from tests.service.conftest import Result, make_request
from tests.waiting import LIMIT_S

PHASES = ("queue_ms", "dispatch_ms", "prefill_ms", "transfer_ms", "wait_ms", "decode_ms", "backoff_ms")


def last_timing(result: Any, index: int = 0) -> generation_pb2.Timing:
    """The timing, which must be on the choice's last message and only there."""
    *others, last = result.of(index)
    assert not any(message.HasField("timing") for message in others)
    assert last.HasField("timing")
    return last.timing


def assert_adds_up(timing: generation_pb2.Timing) -> None:
    phases = [getattr(attempt, name) for attempt in timing.attempts for name in PHASES]
    assert min(phases) >= 0
    assert abs(timing.prepare_ms + sum(phases) - timing.total_ms) < 0.001 * (len(phases) + 2)
    assert 0 < timing.first_token_ms <= timing.total_ms


async def test_phases_add_up(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.pace_s = 0.02
    result = await mesh.generate(token_ids=list(range(65, 97)), max_new_tokens=8, num_choices=2)
    for index in (0, 1):
        timing = last_timing(result, index)
        assert_adds_up(timing)
        (attempt,) = timing.attempts
        assert attempt.decode_ms >= 6 * 20  # eight tokens: one of the prompt, one that decoding begins with
        assert (attempt.wait_ms > 0) is (index == 0)  # a fork has no KV to wait for once its prompt is computed
        assert attempt.HasField("kv_transfer_ms") is (index == 0)  # for a fork none is transferred


async def test_a_decode_worker_that_prefills_by_itself(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.pace_s = 0.02
    timing = last_timing(await mesh.generate(token_ids=[70] * 8, max_new_tokens=3))
    assert_adds_up(timing)
    (attempt,) = timing.attempts
    assert attempt.prefill_ms >= 20
    assert (attempt.transfer_ms, attempt.wait_ms) == (0, 0)


async def test_a_replayed_request_shows_its_attempts(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(fail_after=(3, SequenceFailure.PREEMPTED))]
    decode.gate.close()
    messages = aiter(mesh.stub.Generate(make_request(token_ids=[70] * 8, max_new_tokens=8), timeout=LIMIT_S))
    result = Result()
    result.messages.append(await anext(messages))  # the prefill worker's token, before the decode worker sends any
    decode.gate.open()
    await result.read(messages)
    assert result.ids() == expected_tokens([70] * 8, 8)
    timing = last_timing(result)
    assert_adds_up(timing)
    first, second = timing.attempts
    assert first.backoff_ms > 0
    assert second.backoff_ms == 0
    assert timing.first_token_ms < timing.prepare_ms + sum(getattr(first, name) for name in PHASES)
