"""Weights and KV of fewer bits through real processes: int8 and quantised checkpoints, KV in fp8."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tandem
from engine.loading.load_runner import load_model_runner
from tests.component.arms import settings
from tests.component.driving import Driver
from tests.component.weights.quantized import quantize_checkpoint, twin_of
from tests.e2e.in_middle import stream_and_hit
from tests.e2e.mesh_process import mesh, pools_are_whole
from tests.e2e.reference import Reference
from tests.fakes.requests import make_request

INT8_PROMPTS = [[(7 * i + 3 * j + j * j) % 256 for j in range(4 + 9 * i)] for i in range(12)]
NUM_TOKENS = 100
FP8_PROMPTS = [[(7 * i + 3 * j + j * j) % 256 for j in range(4 + 9 * i)] for i in range(8)]


async def answers(model: Path, log_dir: Path, *flags: str) -> list[tandem.Result]:
    async with mesh(model, log_dir, *flags) as running, tandem.AsyncClient(running.address) as client:
        return [
            await client.generate(token_ids=prompt, max_new_tokens=24, ignore_eos=True, top_logprobs=1)
            for prompt in INT8_PROMPTS
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
    assert sum(same) >= len(INT8_PROMPTS) - 1  # rounding may tip two tokens that are all but equal
    exact = [reference("qwen2").logprobs(prompt)[-1] for prompt in INT8_PROMPTS]
    drift = [
        abs(near.tokens[0].logprob - far[near.tokens[0].id].item()) for near, far in zip(separated, exact, strict=True)
    ]
    assert 0 < max(drift) < 0.5


def said_by_one_process(model_dir: Path) -> list[list[int]]:
    """The tokens that follow each prompt, where nothing is sent."""
    driver = Driver(load_model_runner(settings(model_dir, kv_dtype="fp8", num_blocks=160)))
    runs = [driver.add(make_request(f"r{i}", p, max_new_tokens=NUM_TOKENS)) for i, p in enumerate(FP8_PROMPTS)]
    for run in runs:
        driver.finish(run)
    return [run.token_ids for run in runs]


async def test_tokens_are_those_of_one_process(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Also when one of two decode workers is killed in the middle."""
    model_dir = checkpoint("llama-tied")
    expected = said_by_one_process(model_dir)
    requests = [{"token_ids": prompt, "max_new_tokens": NUM_TOKENS, "ignore_eos": True} for prompt in FP8_PROMPTS]
    started = mesh(model_dir, tmp_path, "--kv-dtype", "fp8", "--decode", "2")
    async with started as running, tandem.AsyncClient(running.address) as client:
        results = [await client.generate(**request) for request in requests]
        assert [[token.id for token in result.tokens] for result in results] == expected
        sent = sum(worker.transferred_bytes for worker in await client.workers() if worker.role == "prefill")
        assert sent
        hit, _ = await stream_and_hit(client, requests, lambda: running.signal("decode_worker", signal.SIGKILL))
        same = [[event.token.id for event in events] == tokens for events, tokens in zip(hit, expected, strict=True)]
        assert sum(same) >= len(FP8_PROMPTS) - 1  # rounding may tip two tokens that are all but equal
        await pools_are_whole(client)


async def test_awq(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = quantize_checkpoint(checkpoint("qwen3"), tmp_path / "awq", "awq")
    prompt = [(7 * i) % 256 for i in range(45)]
    async with mesh(model, tmp_path) as running, tandem.AsyncClient(running.address) as client:
        result = await client.generate(token_ids=prompt, max_new_tokens=16, ignore_eos=True)
    Reference.load(twin_of(model)).check_greedy(prompt, result.tokens)
