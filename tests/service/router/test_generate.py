"""What a client gets when nothing goes wrong."""

import pytest

from tandem.v1 import sampling_pb2
from tests.fakes.router_workers import expected_tokens

PROMPT = [65, 66, 67, 68, 69, 70]


async def test_separated_stream_is_one_sequence(make_mesh) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=12)
    assert result.ids() == expected_tokens(PROMPT, 12)
    assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    usage = result.messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 12, 0)
    assert len(prefill.calls.items) == 1
    assert decode.started.items[0].transfer_id
    mesh.assert_at_rest()


@pytest.mark.parametrize("count", [1, 2, 30])
async def test_colocated_is_the_same(make_mesh, count: int) -> None:
    mesh = await make_mesh()
    await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=count)
    assert result.ids() == expected_tokens(PROMPT, count)
    assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
