"""Separated == colocated == transformers, token for token and log-prob for log-prob, through real processes.

Four meshes: KV over shared memory, gRPC and gloo, and colocated. All must agree with transformers on 64 prompts of 64
tokens, separated over shared memory and colocated on the edge cases, too. Passes are small, so that most prompts are
computed in several chunks.
"""

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tandem
from tests.component.lora.adapters import merged_reference, write_adapter
from tests.e2e.mesh_process import MeshProcess, mesh, pools_are_whole
from tests.e2e.reference import TOLERANCE, Reference

FAMILIES = ["llama-tied", "llama-llama3", "mistral", "qwen2", "qwen3"]
MODES = {
    "shm": ("--set", "prefill.kv_transports=shm"),
    "grpc": ("--set", "prefill.kv_transports=grpc"),
    "gloo": ("--set", "prefill.kv_transports=gloo", "--set", "decode.kv_transports=gloo"),
    "colocated": ("--colocated",),
}
FLAGS = (
    *("--log-level", "debug"),
    *("--set", "prefill.max_batch_prefill_tokens=64"),
    *("--set", "decode.max_step_tokens=64"),
    "--prefill-overflow=0",
    *("--max-total-tokens", "400", "--max-input-length", "300"),
)
BLOCK = 16
NUM_PROMPTS = NUM_TOKENS = 64


def prompts() -> list[list[int]]:
    """Prompts of all lengths around block and pass boundaries, some with common beginnings."""
    rng = random.Random(7)
    lengths = [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 63, 64, 65, 128, 130]
    lengths += [rng.randint(1, 200) for _ in range(NUM_PROMPTS - len(lengths))]
    made = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    for i in range(20, 32):  # partial prefix hits
        made[i][: min(40, len(made[i]))] = made[19][: min(40, len(made[i]))]
    return made


def pairs() -> list[Any]:
    """Each transport with one family; the others in `make chaos`, and all families in `make parity`."""
    always = [("llama-tied", "shm"), ("qwen2", "grpc"), ("mistral", "gloo")]
    others = [(family, mode) for family in FAMILIES for mode in MODES if (family, mode) not in always]
    return [*always, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in others)]


@pytest.mark.parametrize(("family", "mode"), pairs())
async def test_parity(
    family: str, mode: str, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    theirs = reference(family)
    folders = [write_adapter(checkpoint(family), tmp_path / name, lora_alpha=1, seed=len(name)) for name in ("a", "bb")]
    adapters = [f"--adapter={folder.name}={folder}" for folder in folders]
    async with (
        mesh(checkpoint(family), tmp_path, *FLAGS, *adapters, *MODES[mode]) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        await check_many_prompts(client, theirs)
        if mode in ("shm", "colocated"):
            await check_edges(client, theirs)
            await check_adapters(client, {"": theirs} | {f.name: merged(checkpoint(family), f) for f in folders})
        await check_cancel(client)
        await pools_are_whole(client)
        if mode != "colocated":
            await check_kv_was_shipped(client, running, mode)


async def check_edges(client: tandem.AsyncClient, theirs: Reference) -> None:
    await check_lengths(client, theirs)
    await check_prompt_logprobs(client, theirs)
    await check_stops(client)
    await check_stop_strings(client)
    await check_choices_and_seeds(client)
    await check_refusals(client)


async def check_kv_was_shipped(client: tandem.AsyncClient, running: MeshProcess, transport: str) -> None:
    """The tokens above came through the transport, and not by prefilling again where it failed."""
    workers = {worker.role: worker for worker in await client.workers()}
    assert workers["prefill"].load.computed_tokens > sum(map(len, prompts())) / 2
    assert workers["decode"].load.computed_tokens <= 18  # of a canary: a block and two
    logs = "".join(path.read_text() for path in running.log_dir.glob("*.log"))
    assert f'"transport": "{transport}"' in logs
    for trouble in ("link broken", "prefill failed", '"event": "replay"'):
        assert trouble not in logs, trouble


def merged(model_dir: Path, adapter: Path) -> Reference:
    return Reference(merged_reference(model_dir, adapter))


async def check_adapters(client: tandem.AsyncClient, theirs: dict[str, Reference]) -> None:
    """The same prompt under two adapters and none, twice, all at once: each has its own answer, and its own KV."""
    prompt = prompts()[-1][:1] + prompts()[15]
    for _ in range(2):
        results = await asyncio.gather(
            *(
                client.generate(token_ids=prompt, max_new_tokens=NUM_TOKENS, adapter=name, ignore_eos=True)
                for name in theirs
            )
        )
        for reference, result in zip(theirs.values(), results, strict=True):
            reference.check_greedy(prompt, result.tokens)
        assert len({result.text for result in results}) == len(theirs), "the adapters change nothing"


async def check_many_prompts(client: tandem.AsyncClient, theirs: Reference) -> None:
    """64 prompts x 64 tokens, all at once."""
    all_prompts = prompts()
    results = await asyncio.gather(
        *(client.generate(token_ids=p, max_new_tokens=NUM_TOKENS, ignore_eos=True) for p in all_prompts)
    )
    for prompt, result in zip(all_prompts, results, strict=True):
        assert len(result.tokens) == NUM_TOKENS
        assert result.finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(prompt), NUM_TOKENS)
        theirs.check_greedy(prompt, result.tokens)


async def check_lengths(client: tandem.AsyncClient, theirs: Reference) -> None:
    """One token, the longest prompt, all the room there is, and transformers' own generate."""
    prompt = prompts()[7]
    one = await client.generate(token_ids=prompt, max_new_tokens=1)
    theirs.check_greedy(prompt, one.tokens)
    assert len(one.tokens) == 1
    longest = (prompt * 10)[:300]
    rest = await client.generate(token_ids=longest, ignore_eos=True)
    assert len(rest.tokens) == 100
    theirs.check_greedy(longest, rest.tokens)
    until_end = await client.generate(token_ids=prompt, max_new_tokens=40)
    assert [token.id for token in until_end.tokens] == theirs.generate(prompt, 40)


async def check_prompt_logprobs(client: tandem.AsyncClient, theirs: Reference) -> None:
    """Prompt log-probs with alternatives, and echo."""
    prompt = [int(byte) for byte in b"the quick brown fox jumps over the lazy dog, again and again and again and again"]
    result = await client.generate(
        token_ids=prompt, max_new_tokens=3, ignore_eos=True, prompt_logprobs=True, top_logprobs=3, echo=True
    )
    scores = theirs.logprobs(prompt)
    assert result.prompt_tokens[0].logprob is None
    for position, token in enumerate(result.prompt_tokens[1:]):
        assert token.logprob == pytest.approx(scores[position, token.id].item(), abs=TOLERANCE)
        top = scores[position].topk(3)
        assert [entry.id for entry in token.top] == top.indices.tolist()
    assert [token.id for token in result.prompt_tokens] == prompt
    assert result.text == "".join(t.text for t in result.prompt_tokens) + "".join(t.text for t in result.tokens)
    for position, token in enumerate(result.tokens):
        assert token.logprob == pytest.approx(token.top[0].logprob, abs=TOLERANCE), position


async def check_stops(client: tandem.AsyncClient) -> None:
    """Stopping at the first token, in the middle, and not before min_new_tokens."""
    prompt = prompts()[8]
    free = await client.generate(token_ids=prompt, max_new_tokens=20, ignore_eos=True)
    ids = [token.id for token in free.tokens]
    at_once = await client.generate(token_ids=prompt, max_new_tokens=20, stop_token_ids=[ids[0]], ignore_eos=True)
    assert ([token.id for token in at_once.tokens], at_once.finish_reason) == (ids[:1], "stop_sequence")
    later = await client.generate(
        token_ids=prompt, max_new_tokens=20, min_new_tokens=5, stop_token_ids=[ids[0]], ignore_eos=True
    )
    assert len(later.tokens) >= 5
    assert all(token.id != ids[0] for token in later.tokens[:5])


async def check_stop_strings(client: tandem.AsyncClient) -> None:
    """A stop string that spans tokens (each token is a byte): the text ends right before it."""
    checked = 0
    for prompt in prompts()[6:26]:
        free = await client.generate(token_ids=prompt, max_new_tokens=24, ignore_eos=True)
        found = re.search(r"[!-~]{2,}", free.text[1:])
        if found is not None:
            stop = found.group()
            stopped = await client.generate(token_ids=prompt, max_new_tokens=24, stop=[stop], ignore_eos=True)
            assert stopped.text == free.text[: free.text.index(stop)]
            assert stopped.finish_reason == "stop_sequence"
            checked += 1
    assert checked > 0


async def check_choices_and_seeds(client: tandem.AsyncClient) -> None:
    """Seeded sampling repeats exactly, alone, in a batch, and as one of n choices."""
    prompt = prompts()[9]
    options = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    alone = await client.generate(token_ids=prompt, seed=11, **options, **penalties)
    batch = await asyncio.gather(
        *(client.generate(token_ids=prompt, seed=seed, **options, **penalties) for seed in range(8, 16))
    )
    assert [t.id for t in batch[3].tokens] == [t.id for t in alone.tokens]
    assert len({tuple(t.id for t in result.tokens) for result in batch}) > 1
    pair = await client.generate(token_ids=prompt, seed=10, n=2, **options, **penalties)
    assert [t.id for t in pair.choices[1].tokens] == [t.id for t in alone.tokens]
    await check_shared_prompts(client, options | penalties)


async def check_shared_prompts(client: tandem.AsyncClient, options: dict[str, Any]) -> None:
    """Choices of a prompt nobody has seen, which share its KV, are those of as many requests; best_of picks of them."""
    rng = random.Random(17)
    for length in (1, BLOCK, 2 * BLOCK + 5):
        prompt = [rng.randrange(256) for _ in range(length)]
        together = await client.generate(token_ids=prompt, seed=3, n=4, **options)
        alone = await asyncio.gather(*(client.generate(token_ids=prompt, seed=seed, **options) for seed in range(3, 7)))
        for choice, result in zip(together.choices, alone, strict=True):
            assert [t.id for t in choice.tokens] == [t.id for t in result.tokens]
            assert [t.logprob for t in choice.tokens] == pytest.approx(
                [t.logprob for t in result.tokens], abs=TOLERANCE
            )
        best = await client.generate(token_ids=prompt, seed=3, n=2, best_of=4, **options)
        ranked = sorted(together.choices, key=lambda choice: -(choice.confidence or 0.0))
        assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]


async def check_refusals(client: tandem.AsyncClient) -> None:
    """Each bad request gets a named error; the mesh goes on."""
    for bad, message in (
        ({"token_ids": [1] * 301}, "300"),
        ({"token_ids": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"token_ids": [1], "max_new_tokens": 401}, "400"),
        ({"token_ids": [1], "max_new_tokens": 0}, "max_new_tokens"),
        ({"token_ids": [9999]}, "vocabulary"),
        ({"token_ids": [1], "temperature": -1}, "temperature"),
        ({"token_ids": [1], "top_p": 0.0}, "top_p"),
        ({"token_ids": [1], "top_logprobs": 21}, "top_logprobs"),
        ({"token_ids": [1], "stop": ["x"] * 17}, "stop"),
        ({"token_ids": [1], "n": 9}, "num_choices|n must"),
    ):
        with pytest.raises(tandem.InvalidRequest, match=message):
            await client.generate(**bad)
    with pytest.raises(tandem.ModelNotFound, match="nobody"):
        await client.generate(prompt="hi", model="nobody")


async def check_cancel(client: tandem.AsyncClient) -> None:
    """A client that leaves after two tokens; the pools are checked by the caller."""
    stream = client.stream(token_ids=prompts()[10], ignore_eos=True)
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 2:
            break
    await stream.aclose()


def parity(*families: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.parity", *families]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rows() -> None:
    done = parity("--tensor-parallel", "2", "mixtral", "falcon-7b", "t5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[1].startswith("mixtral MixtralForCausalLM no: ")
    assert " 30 tokens, all equal" in lines[1]
    assert "not possible: tensor_parallel 2 does not fit 1 KV heads: use 1 or fewer" in lines[2]
    assert lines[3].endswith("does not fit an encoder-decoder model: ranks cannot divide its encoder yet; use 1")
    assert lines[4] == "1 of 1: tokens equal, log-probs within 0.0001; 2 not possible"
