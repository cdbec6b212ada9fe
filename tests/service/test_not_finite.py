"""NaN in a mesh of real workers: one clear error, no replay, and all others get the very same answers."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from engine.loading.load_runner import load_model_runner
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.runner_settings import RunnerSettings
from tests.component.arms import embedding
from tests.component.checkpoints import build_checkpoint
from tests.defects import Repaired
from tests.made_once import made_once
from tests.mesh_in_process import mesh_in_process

BAD_TOKEN = 261
GOOD = [list(range(first, first + 40)) for first in (20, 70, 120)]
BAD = [*range(1, 30), BAD_TOKEN, *range(30, 50)]


def load_poisoned(settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
    """A model whose embedding of one token has become NaN since it was loaded; canaries do not use that token."""
    runner = load_model_runner(settings, on_progress)
    with torch.no_grad():
        embedding(runner)[BAD_TOKEN] = float("nan")
    return runner


async def answers(client: tandem.AsyncClient, *, with_bad: bool) -> list[Any]:
    prompts = [*GOOD, *([BAD] * 3 if with_bad else [])]
    asked = (client.generate(token_ids=ids, max_new_tokens=16, ignore_eos=True) for ids in prompts)
    return await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "llama", partial(build_checkpoint, "llama"))


@pytest.mark.parametrize(
    ("colocated", "changes"),
    [(True, {}), (False, {}), (False, {"quantize": "int8"}), (False, {"enforce_eager": True})],
    ids=["colocated", "separated", "int8", "eager"],
)
async def test_one_clear_error(model_dir: Path, colocated: bool, changes: dict[str, Any], repaired: Repaired) -> None:
    own = {"prefix_caching": False, **changes}
    mesh = mesh_in_process(model_dir, colocated=colocated, load=load_poisoned, router={}, prefill=own, decode=own)
    async with mesh as client:
        before = await answers(client, with_bad=False)
        mixed = await answers(client, with_bad=True)
        after = await answers(client, with_bad=False)
        replays = (await client.mesh()).replays
    for error in mixed[len(GOOD) :]:
        assert isinstance(error, tandem.InternalError)
        assert "NaN or infinity" in str(error)
    tokens = [[result.tokens for result in results[: len(GOOD)]] for results in (before, mixed, after)]
    if changes:
        tokens = [[[replace(token, logprob=None) for token in each] for each in results] for results in tokens]
    assert tokens[0] == tokens[1] == tokens[2]
    assert replays == 0
    repaired("M7", "in a mesh: INTERNAL with the reason, no replay; requests beside and after it get the same answers")
