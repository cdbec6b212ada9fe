"""Int8 through real processes: KV of one worker's int8 arithmetic is good for another's."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import tandem
from tests.e2e.mesh_process import mesh
from tests.e2e.reference import Reference

PROMPTS = [[(7 * i + 3 * j + j * j) % 256 for j in range(4 + 9 * i)] for i in range(12)]


async def answers(model: Path, log_dir: Path, *flags: str) -> list[tandem.Result]:
    async with mesh(model, log_dir, *flags) as running, tandem.AsyncClient(running.address) as client:
        return [
            await client.generate(token_ids=prompt, max_new_tokens=24, ignore_eos=True, top_logprobs=1)
            for prompt in PROMPTS
        ]


async def test_separated_equals_colocated(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = checkpoint("qwen2")
    separated, colocated = await asyncio.gather(
        answers(model, tmp_path_factory.mktemp("separated"), "--quantize", "int8"),
        answers(model, tmp_path_factory.mktemp("colocated"), "--quantize", "int8", "--colocated"),
    )
    same = [
        [token.id for token in ours.tokens] == [token.id for token in theirs.tokens]
        for ours, theirs in zip(separated, colocated, strict=True)
    ]
    assert sum(same) >= len(PROMPTS) - 1  # rounding may tip two tokens that are all but equal
    exact = [reference("qwen2").logprobs(prompt)[-1] for prompt in PROMPTS]
    drift = [
        abs(near.tokens[0].logprob - far[near.tokens[0].id].item()) for near, far in zip(separated, exact, strict=True)
    ]
    assert 0 < max(drift) < 0.5
