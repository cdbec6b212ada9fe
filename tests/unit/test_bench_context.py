"""bench.context: medians of rounds, and lengths that an arm did not reach."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from bench.context import Point, medians_of, request
from bench.peers.arms import Arm
from bench.shapes import write_shape
from engine.models.read_config import load_decoder_config

TANDEM, PEER = Arm("tandem"), Arm("vllm")


def test_medians_are_those_of_an_arm_by_length() -> None:
    points = {
        (TANDEM, 8192): [Point(8192, 4.0, 9.0, 5.0)],
        (TANDEM, 2048): [Point(2048, ttft_s, 7.0, 2.0) for ttft_s in (1.0, 3.0, 2.0)],
        (PEER, 2048): [Point(2048, 9.0, 9.0, 9.0)],
    }
    assert medians_of(points, TANDEM) == [Point(2048, 2.0, 7.0, 2.0), Point(8192, 4.0, 9.0, 5.0)]
    assert medians_of(points, PEER) == [Point(2048, 9.0, 9.0, 9.0)]


def test_a_request_counts_from_its_first_token_on() -> None:
    asked: list[tuple[int, int]] = []

    async def stream(prompt: Sequence[int], num_output: int) -> AsyncIterator[Sequence[int]]:
        asked.append((len(prompt), num_output))
        await asyncio.sleep(0.05)
        yield (1,)
        await asyncio.sleep(0.2)  # the handoff, which is not counted
        for token in range(num_output - 1):
            yield (token,)

    ttft_s, token_ms = asyncio.run(request(stream, 300, 8, 0))
    assert asked == [(300, 8)]
    assert ttft_s >= 0.05
    assert token_ms < 100


def test_prompts_of_different_rounds_share_no_prefix() -> None:
    prompts: list[list[int]] = []

    async def stream(prompt: Sequence[int], _: int) -> AsyncIterator[Sequence[int]]:
        prompts.append(list(prompt))
        yield (1,)
        yield (2,)

    async def run() -> None:
        for num_tokens, repeat in ((64, 0), (64, 1), (128, 0)):
            await request(stream, num_tokens, 2, repeat)

    asyncio.run(run())
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 3


@pytest.mark.parametrize("name", ["135m", "0.5b"])
def test_long_shapes_have_room(name: str, tmp_path: Path) -> None:
    short, long = (load_decoder_config(write_shape(shape, tmp_path)) for shape in (name, f"{name}-long"))
    assert (short.max_position_embeddings, long.max_position_embeddings) == (2048, 2**18)
    assert (short.num_layers, short.num_heads) == (long.num_layers, long.num_heads)
