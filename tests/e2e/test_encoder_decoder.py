"""T5 through real processes: separated == colocated == transformers, and a killed worker that nobody notices."""

import asyncio
import signal
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

import tandem
from tests.component.encoder_decoders import EncoderDecoderReference, build_encoder_decoder
from tests.e2e.in_middle import stream_and_hit
from tests.e2e.mesh_process import MeshProcess, mesh, pools_are_whole
from tests.made_once import made_once

TOLERANCE = 1e-4
NUM_NEW = 36
# Around blocks of 16 tokens, and longer than the 64 tokens of a pass.
LENGTHS = (1, 15, 16, 17, 32, 64, 65, 90, 130, 200, 7, 40)
PROMPTS = [[(7 * i + 31 * j) % 230 + 3 for j in range(length)] for i, length in enumerate(LENGTHS)]
FLAGS = (
    "--prefill-overflow=0",
    *("--set", "prefill.max_batch_prefill_tokens=64"),
    *("--set", "decode.max_step_tokens=64"),
    *("--max-total-tokens", "400", "--max-input-length", "300"),
)
MODES = {
    "shm": ("--log-level", "debug", "--set", "prefill.kv_transports=shm"),
    "grpc": ("--log-level", "debug", "--set", "prefill.kv_transports=grpc"),
    "colocated": ("--colocated",),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "t5-1.1", partial(build_encoder_decoder, "t5-1.1"))


@lru_cache
def reference(model_dir: Path) -> EncoderDecoderReference:
    return EncoderDecoderReference.load(model_dir)


def check_greedy(theirs: EncoderDecoderReference, prompt: list[int], tokens: tuple[tandem.Token, ...]) -> None:
    """Every token is transformers' own greedy choice after those before it, with the same log-prob."""
    ids = [token.id for token in tokens]
    scores = theirs.logprobs(prompt, ids)
    assert scores.argmax(-1).tolist() == ids
    ours = torch.tensor([token.logprob for token in tokens])
    assert (ours - scores.gather(1, torch.tensor(ids)[:, None])[:, 0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "mode", ["shm", pytest.param("grpc", marks=pytest.mark.soak), pytest.param("colocated", marks=pytest.mark.soak)]
)
async def test_parity_and_a_killed_decode_worker(mode: str, model_dir: Path, tmp_path: Path) -> None:
    async with (
        mesh(model_dir, tmp_path, "--decode", "2", *FLAGS, *MODES[mode]) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        await check_many_prompts(client, model_dir)
        await check_choices(client)
        await check_text(client)
        await check_refusals(client)
        await pools_are_whole(client)
        if mode != "colocated":
            await check_kv_was_shipped(client, running, mode)
        await check_killed_decode_worker(client, running)


async def check_many_prompts(client: tandem.AsyncClient, model_dir: Path) -> None:
    """All at once, of different lengths, ending at different times; one as `generate` has it, to its end."""
    lengths = [NUM_NEW - 2 * i for i in range(len(PROMPTS))]
    results = await asyncio.gather(
        *(
            client.generate(token_ids=prompt, max_new_tokens=length, ignore_eos=True)
            for prompt, length in zip(PROMPTS, lengths, strict=True)
        )
    )
    for prompt, length, result in zip(PROMPTS, lengths, results, strict=True):
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(prompt), length)
        check_greedy(reference(model_dir), prompt, result.tokens)
    result = await client.generate(token_ids=PROMPTS[5], max_new_tokens=NUM_NEW)
    theirs = reference(model_dir).generate(PROMPTS[5], NUM_NEW, use_cache=False)
    assert [token.id for token in result.tokens] == theirs
    rest = await client.generate(token_ids=PROMPTS[9] + PROMPTS[7], ignore_eos=True)
    assert len(rest.tokens) == 400 - 290


async def check_choices(client: tandem.AsyncClient) -> None:
    """Seeded draws with penalties, alone and as one of two; equal prompts share KV, others do not."""
    options = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 16, "ignore_eos": True, "repetition_penalty": 1.2}
    alone = await client.generate(token_ids=PROMPTS[5], seed=5, **options)
    pair = await client.generate(token_ids=PROMPTS[5], seed=4, n=2, **options)
    assert [token.id for token in pair.choices[1].tokens] == [token.id for token in alone.tokens]
    assert pair.usage.cached_tokens >= 64
    other = await client.generate(token_ids=[*PROMPTS[5], 7], max_new_tokens=1)
    assert other.usage.cached_tokens == 0


async def check_text(client: tandem.AsyncClient) -> None:
    """Text in and out: the streamed pieces are the whole text."""
    request = {"prompt": "the quick brown fox, again.", "max_new_tokens": 20, "ignore_eos": True}
    whole = await client.generate(**request)
    pieces = [event.text async for event in client.stream(**request)]
    assert "".join(pieces) == whole.text
    tokens = await client.tokenize(prompt="the fox")
    assert tokens[-1].id == 1


async def check_refusals(client: tandem.AsyncClient) -> None:
    """Options that make no sense for such a model are refused with the reason."""
    for bad, message in (
        ({"prompt": "a", "echo": True}, "does not continue its prompt"),
        ({"prompt": "a", "prompt_logprobs": True}, "does not predict its prompt"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no chat template"),
        ({"token_ids": [5] * 301}, "300"),
        ({"token_ids": [5] * 300, "max_new_tokens": 101}, "400"),
    ):
        with pytest.raises(tandem.InvalidRequest, match=message):
            await client.generate(**bad)


async def check_kv_was_shipped(client: tandem.AsyncClient, running: MeshProcess, transport: str) -> None:
    for worker in await client.workers():
        if worker.role == "prefill":
            assert worker.load.computed_tokens > sum(map(len, PROMPTS))
        else:
            assert worker.load.computed_tokens <= 19  # of a canary: a block and three
    logs = "".join(path.read_text() for path in running.log_dir.glob("*.log"))
    assert f'"transport": "{transport}"' in logs
    for trouble in ("link broken", "prefill failed", '"event": "replay"'):
        assert trouble not in logs, trouble


async def check_killed_decode_worker(client: tandem.AsyncClient, running: MeshProcess) -> None:
    """No stream notices."""
    requests = [
        {
            "token_ids": PROMPTS[-1 - i],
            "max_new_tokens": 150,
            "ignore_eos": True,
            "temperature": 0.8 * (i % 2),
            "seed": i,
            "frequency_penalty": 0.3,
            "top_logprobs": 2,
        }
        for i in range(6)
    ]
    expected = await asyncio.gather(*(client.generate(**request) for request in requests))
    hit, _ = await stream_and_hit(client, requests, lambda: running.signal("decode_worker", signal.SIGKILL))
    for events, result in zip(hit, expected, strict=True):
        assert [event.token.id for event in events] == [token.id for token in result.tokens]
        for event, token in zip(events, result.tokens, strict=True):
            assert event.token.logprob == pytest.approx(token.logprob, abs=1e-4)
    await pools_are_whole(client)
