"""Log-probs of prompts, by which evaluators compare answers that they have."""

import json
from collections.abc import AsyncIterator

import openai
import pytest

from tests.fakes.sdk_router import STORY
from tests.service.gateway.http import RunningGateway, running_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


async def test_scoring_a_prompt_generates_no_tokens(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.completions.create(model="fake", prompt="One", max_tokens=0, echo=True, logprobs=1)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="fake", prompt="One", max_tokens=0, echo=True, stream=True)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("One", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["O", "n", "e"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


async def test_with_echo_the_end_of_sequence_token_has_a_log_prob(gateway: RunningGateway) -> None:
    """lm-evaluation-harness scores a prompt with one token more, whose entry it drops whatever that token is."""
    body = {"prompt": STORY, "max_tokens": 1, "echo": True, "logprobs": 1}
    whole = (await gateway.post("/v1/completions", body)).json()
    num_tokens = whole["usage"]["total_tokens"]
    assert num_tokens == len(STORY.encode()) + 1
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (STORY, "stop")
    assert {name: len(entries) for name, entries in choice["logprobs"].items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), num_tokens
    )
    assert choice["logprobs"]["token_logprobs"][-2:] == [-1.0, -0.5]
    lines = await gateway.lines("/v1/completions", body | {"stream": True})
    streamed = [json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"] for line in lines[:-1]]
    assert {name: [each for piece in streamed for each in piece[name]] for name in streamed[0]} == choice["logprobs"]
