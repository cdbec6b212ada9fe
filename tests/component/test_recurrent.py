"""Models with recurrent layers: what their states need beyond the parity of every family (test_model_parity.py)."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.compiled_code import compile_code
from engine.loading.load_runner import draft_block_bytes, load_model_runner
from engine.models.read_config import load_decoder_config
from engine.models.share import rank_share
from engine.sequence import SequenceState
from engine.settings import Speculation
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from mesh.domain.request import SequenceSpec
from tandem_cli.optimization.candidate_trial import Judged, compare_distributions, runner_settings
from tests.component.arms import load_arm, settings
from tests.component.driving import Driver
from tests.component.kv.test_forks import choices, new_scheduler, run
from tests.component.parity import (
    TOLERANCE,
    check_parity,
    expect_prompts,
    half_tolerance,
    prompts,
    require_prompt_logprobs,
    run_mixed,
)
from tests.component.test_model_parity import check_replay
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    ("family", "length"),
    [
        *(("qwen3.5", length) for length in (1, 33, 131)),
        *(("falcon-h1", 33), ("nemotron-h", 131), ("jamba", 131), ("mamba2", 131), ("falcon-mamba", 33)),
    ],
)
def test_forks_are_what_each_is_alone(checkpoint: Checkpoint, family: str, length: int) -> None:
    runner, request = load_model_runner(settings(checkpoint(family))), choices(length, seed=4)
    first = SequenceState(request)
    first.forks = [SequenceState(fork) for fork in request.forked()]
    together, _ = run(runner, [first], max_batch_tokens=256)  # the longest prompt: two chunks of the rule and a part
    for each in (replace(request, forks=()), *request.forked()):
        shared, own = together[each.request_id], run(runner, [SequenceState(each)])[0][each.request_id]
        assert [token.id for token in shared] == [token.id for token in own]
        assert [token.logprob for token in shared] == pytest.approx([token.logprob for token in own], abs=1e-4)


@pytest.mark.parametrize(
    ("family", "num_blocks", "cached"),
    [
        ("lfm2", 24, [0, 48, 0, 64, 0, 32]),
        ("qwen3.5", 96, [0, 48, 0, 64, 80, 80]),
        ("falcon-h1", 64, [0, 48, 0, 64, 80, 80]),
        ("jamba", 96, [0, 48, 0, 64, 80, 80]),
        ("mamba", 96, [0, 48, 0, 64, 80, 80]),
        ("mamba2", 96, [0, 48, 0, 64, 80, 80]),
    ],
)
def test_prompts_say_the_same_behind_a_snapshot(
    checkpoint: Checkpoint, family: str, num_blocks: int, cached: list[int]
) -> None:
    """Turns of a chat, a branch with forks, seen twice, and turns again. 24 blocks are too few for all of it."""
    runner = load_model_runner(settings(checkpoint(family), num_blocks=96))
    ids = [7 * i % 250 for i in range(120)]
    branch = replace(choices(0), token_ids=(*ids[:44], *ids[:30]), num_prompt_tokens=74)
    turns = [make_request("0", tokens, max_new_tokens=9) for tokens in (ids[:60], ids[:90], ids, ids[:90])]
    asked = [*turns[:2], branch, branch, *turns[2:]]
    scheduler = new_scheduler(runner, num_blocks, max_batch_tokens=48)
    computed = [run(runner, with_forks(request))[0] for request in asked]
    before, num_cached = 0, []
    for request, alone in zip(asked, computed, strict=True):
        tokens, total = run(runner, with_forks(request), scheduler=scheduler)
        num_cached.append(len(request.token_ids) - (total - before))
        before = total
        assert tokens.keys() == alone.keys()
        for name, expected in alone.items():
            assert [token.id for token in tokens[name]] == [token.id for token in expected]
            mine, own = ([token.logprob for token in each] for each in (tokens[name], expected))
            assert mine == pytest.approx(own, abs=3e-5)
    assert num_cached == cached


def with_forks(spec: SequenceSpec) -> list[SequenceState]:
    sequence = SequenceState(spec)
    sequence.forks = [SequenceState(fork) for fork in spec.forked()]
    return [sequence]


_WAYS: dict[str, dict[str, object]] = {"compiled": {}, "cpu": {"enforce_eager": True}, "torch": {"attention": "torch"}}
_OF_MAMBA = [("nemotron-h", "compiled"), ("nemotron-h", "cpu"), ("granite-4", "torch"), ("falcon-h1-norm", "torch")]
_OF_MAMBA += [("jamba", "cpu"), ("jamba-dense", "torch"), ("mamba", "cpu"), ("falcon-mamba", "torch")]
_OF_MAMBA += [("jamba", "compiled"), ("falcon-mamba", "compiled"), ("falcon-mamba", "cpu")]
_OF_MAMBA += [("mamba2", way) for way in ("compiled", "cpu", "torch")]


@pytest.mark.parametrize(
    ("family", "way"), [*((family, way) for family in ("lfm2", "qwen3.5") for way in _WAYS), *_OF_MAMBA]
)
def test_what_blocks_held_before_changes_nothing(checkpoint: Checkpoint, family: str, way: str) -> None:
    """States as KV, and KV as states, may be NaN. With torch's attention, torch computes the steps of states, too."""
    model_dir = checkpoint(family)
    runner = load_model_runner(settings(model_dir, **_WAYS[way]))
    runner.kv_cache.tensor.fill_(float("nan"))
    check_parity(model_dir, runner)
    check_replay(Driver(runner))


@pytest.mark.parametrize("kv_dtype", ["int8", "float16"])
def test_blocks_of_any_type_hold_states(checkpoint: Checkpoint, kv_dtype: str) -> None:
    model_dir = checkpoint("lfm2")
    runner = load_arm(model_dir, "cpu", kv_dtype=kv_dtype)
    for computed, expected in zip(run_mixed(runner), expect_prompts(model_dir), strict=True):
        require_prompt_logprobs(computed, expected, half_tolerance("lfm2", "float16"))


def test_steps_of_mamba_have_limits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers limits them in prompts only; here a decode step computes what a prompt does."""
    model_dir = Path(shutil.copytree(checkpoint("granite-4-dense"), tmp_path / "limited"))
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(raw | {"time_step_limit": [0.6, 0.7]}))
    for attention in ("auto", "torch"):
        runner = load_model_runner(settings(model_dir, attention=attention))
        for computed, expected in zip(run_mixed(runner), expect_prompts(model_dir), strict=True):
            require_prompt_logprobs(computed, expected, TOLERANCE)
        check_replay(Driver(runner))


@pytest.mark.parametrize(
    ("family", "layers"), [("nemotron-h", [(0, 1)]), ("falcon-h1", [(0, 2)]), ("mamba", [(0, 1)]), ("mamba2", [(0, 1)])]
)
def test_layers_of_kv_are_announced_once(checkpoint: Checkpoint, family: str, layers: list[tuple[int, int]]) -> None:
    driver = Driver(load_model_runner(settings(checkpoint(family))))
    driver.step((driver.add(make_request("r", [1, 2, 3])), 3))
    assert driver.announced == layers


def test_the_last_layer_of_kv_is_announced_with_the_states(checkpoint: Checkpoint) -> None:
    driver = Driver(load_model_runner(settings(checkpoint("lfm2"))))  # two of five layers, the second and the fourth
    driver.step((driver.add(make_request("r", [1, 2, 3])), 3))
    assert driver.announced == [(0, 1), (1, 1)]


def test_commands_that_compute_without_a_scheduler_have_room_for_states(checkpoint: Checkpoint) -> None:
    """`tandem compile` and `tandem optimize`. States take more blocks of int8 than of fp32."""
    model_dir = checkpoint("qwen3.5")
    compile_code(settings(model_dir), load_model_runner)
    judged = [Judged(tuple(prompt), len(prompt) - 4) for prompt in prompts()]
    other = runner_settings(model_dir, {"quantize": "int8"})
    quality = compare_distributions(runner_settings(model_dir, {}), replace(other, kv_dtype="int8"), judged)
    assert 0 < quality.mean_kl < 0.05


def test_what_needs_to_divide_or_to_undo_is_refused(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("lfm2")
    with pytest.raises(ConfigurationError, match="2x1 ranks do not fit Lfm2ForCausalLM: ranks cannot divide recurrent"):
        rank_share(load_decoder_config(model_dir), 0, Degrees(2))
    with pytest.raises(ConfigurationError, match="cannot draft: its recurrent states cannot go back behind a wrong"):
        draft_block_bytes(Speculation("draft", 4, model_dir), settings(checkpoint("llama")))


def test_blocks_of_later_steps_may_have_held_states(checkpoint: Checkpoint) -> None:
    """A prompt is computed token by token beside a longer sequence. All of its blocks but those of the state are full
    of numbers that are NaN as KV, and decodes in one padded batch read as many blocks of each.
    """
    runner = load_arm(checkpoint("lfm2"), "torch", kv_dtype="float16")
    driver, (short, _, long) = Driver(runner), prompts()
    first, second = driver.add(make_request("long", long)), driver.add(make_request("short", short * 3))
    driver.step((first, len(long)))
    driver.reserve(second.sequence, second.sequence.num_tokens)
    runner.kv_cache.tensor[:, :, second.sequence.block_table[runner.kv_cache.layout.state_blocks :]] = float("nan")
    driver.step((second, 1), (first, 1))
    driver.finish(second, first)
    alone = driver.add(make_request("alone", short * 3))
    driver.finish(alone)
    assert second.token_ids == alone.token_ids
