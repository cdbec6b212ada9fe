"""KV in fp8 through real processes: what a prefill worker sends is what one process would have kept."""

import signal
from collections.abc import Callable
from pathlib import Path

import tandem
from engine.load_runner import load_model_runner
from tests.component.arms import settings
from tests.component.driving import Driver
from tests.e2e.in_middle import stream_and_hit
from tests.e2e.mesh_process import mesh, pools_are_whole
from tests.fakes.requests import make_request

NUM_TOKENS = 100
PROMPTS = [[(7 * i + 3 * j + j * j) % 256 for j in range(4 + 9 * i)] for i in range(8)]


def said_by_one_process(model_dir: Path) -> list[list[int]]:
    """The tokens that follow each prompt, where nothing is sent."""
    driver = Driver(load_model_runner(settings(model_dir, kv_dtype="fp8", num_blocks=160)))
    runs = [driver.add(make_request(f"r{i}", p, max_new_tokens=NUM_TOKENS)) for i, p in enumerate(PROMPTS)]
    for run in runs:
        driver.finish(run)
    return [run.token_ids for run in runs]


async def test_tokens_are_those_of_one_process(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Also when one of two decode workers is killed in the middle."""
    model_dir = checkpoint("llama-tied")
    expected = said_by_one_process(model_dir)
    requests = [{"token_ids": prompt, "max_new_tokens": NUM_TOKENS, "ignore_eos": True} for prompt in PROMPTS]
    started = mesh(model_dir, tmp_path, "--kv-dtype", "fp8", "--decode", "2")
    async with started as running, tandem.AsyncClient(running.address) as client:
        results = [await client.generate(**request) for request in requests]
        assert [[token.id for token in result.tokens] for result in results] == expected
        sent = sum(worker.transferred_bytes for worker in await client.workers() if worker.role == "prefill")
        assert sent
        hit, _ = await stream_and_hit(client, requests, lambda: running.signal("decode_worker", signal.SIGKILL))
        same = [[event.token.id for event in events] == tokens for events, tokens in zip(hit, expected, strict=True)]
        assert sum(same) >= len(PROMPTS) - 1  # rounding may tip two tokens that are all but equal
        await pools_are_whole(client)
