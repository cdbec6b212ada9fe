"""Rotary positions set when serving: what transformers computes with the same config.json, and longer sequences."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.model_facts import read_model_facts
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout
from engine.models.model_config import RopeConfig
from engine.models.read_config import load_config
from engine.models.rope import RotaryEmbedding
from mesh.domain.errors import ConfigurationError, LayoutMismatch
from mesh.domain.worker import WorkerRole
from tests.component.arms import ARMS, load_arm, settings
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.parity import check_parity, expect_prompts
from tests.defects import Repaired
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

Checkpoint = Callable[[str], Path]

OVERRIDES: dict[str, tuple[dict[str, Any], float]] = {
    "linear": ({"type": "linear", "factor": 4.0}, 0.0),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 0.0),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 0.0),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        0.0,
    ),
    "theta": ({}, 500_000.0),
    "both": ({"rope_type": "linear", "factor": 2.0}, 50_000.0),
}


def override(name: str) -> RopeOverride:
    scaling, theta = OVERRIDES[name]
    return RopeOverride(json.dumps(scaling) if scaling else "", theta)


def with_config(model_dir: Path, folder: Path, name: str) -> Path:
    """The same weights, with the override written into config.json."""
    copy = Path(shutil.copytree(model_dir, folder))
    raw = json.loads((copy / "config.json").read_text())
    scaling, theta = OVERRIDES[name]
    stored = raw["rope_parameters"]
    nested = "full_attention" in stored
    own = stored["full_attention"] if nested else stored
    kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    changed = (kept | scaling if scaling else own) | ({"rope_theta": theta} if theta else {})
    changed.setdefault("rope_type", changed.pop("type", "default"))
    raw["rope_parameters"] = {**stored, "full_attention": changed} if nested else changed
    (copy / "config.json").write_text(json.dumps(raw))
    return copy


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", OVERRIDES)
def test_the_same_as_transformers_with_the_same_config(
    checkpoint: Checkpoint, tmp_path: Path, name: str, arm: str, repaired: Repaired
) -> None:
    model_dir = checkpoint("llama-dynamic" if name == "dynamic" else "llama")  # only a short context is stretched
    reference = with_config(model_dir, tmp_path / "reference", name)
    plain = [expected.logprobs for expected in expect_prompts(model_dir)]
    changed = [expected.logprobs for expected in expect_prompts(reference)]
    assert any(not ours.allclose(theirs, atol=1e-2) for ours, theirs in zip(plain, changed, strict=True))
    check_parity(reference, load_arm(model_dir, arm, rope=override(name)))
    repaired("M5", "rope_scaling and rope_theta set when serving: log-probs as transformers' with the same config")


@pytest.mark.parametrize("beside", [{}, {"rope_theta": 50_000.0}], ids=["", "theta"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["yarn", "linear"])
def test_the_same_as_transformers_with_rope_scaling_beside_rope_parameters(
    checkpoint: Checkpoint, tmp_path: Path, family: str, name: str, beside: dict[str, float]
) -> None:
    copy = Path(shutil.copytree(checkpoint(family), tmp_path / "copy"))
    raw = json.loads((copy / "config.json").read_text())
    scaling, _ = OVERRIDES[name]
    scaling = {"rope_type": scaling.get("type"), **scaling}
    (copy / "config.json").write_text(json.dumps(raw | {"rope_scaling": scaling} | beside))
    check_parity(copy, load_model_runner(settings(copy)))


@pytest.mark.parametrize("family", ["gemma3", "phi", "gpt-neox", "glm", "llama-llama3"])
@pytest.mark.parametrize("name", ["linear", "theta"])
def test_other_families(checkpoint: Checkpoint, tmp_path: Path, family: str, name: str) -> None:
    reference = with_config(checkpoint(family), tmp_path / "reference", name)
    check_parity(reference, load_model_runner(settings(checkpoint(family), rope=override(name))))


def test_workers_with_other_positions_are_another_model(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("llama")
    ropes = [NO_ROPE_OVERRIDE, *map(override, OVERRIDES)]
    layouts = [kv_layout(load_config(model_dir, rope), settings(model_dir, rope=rope)) for rope in ropes]
    assert len({layout.model_fingerprint for layout in layouts}) == len(ropes)
    with pytest.raises(LayoutMismatch):
        layouts[0].require_same(layouts[1])


def test_a_model_without_rotary_positions_refuses(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for model_dir in (checkpoint("gpt2"), checkpoint("bloom"), build_encoder_decoder("t5", tmp_path / "t5")):
        with pytest.raises(ConfigurationError, match="has no rotary positions"):
            load_config(model_dir, override("linear"))
        with pytest.raises(ConfigurationError, match="has no rotary positions"):
            load_config(model_dir, override("theta"))


@pytest.mark.parametrize(
    ("rope", "limit", "longest"),
    [
        ({}, 0, 512),
        ({"rope_scaling": '{"type": "linear", "factor": 4}'}, 0, 2048),
        ({"rope_scaling": '{"type": "linear", "factor": 4}'}, 1500, 1500),
        ({"rope_theta": 1e6}, 0, 512),
        ({"rope_theta": 1e6}, 4096, 4096),
    ],
)
def test_router_and_workers_agree_on_the_longest_sequence(
    checkpoint: Checkpoint, rope: dict[str, Any], limit: int, longest: int
) -> None:
    settings = worker_settings(checkpoint("llama"), max_model_len=limit, **rope)
    limits = EngineLimits(64, 4)
    loaded = load_engine(settings, limits)
    assert loaded.worker_info(WorkerRole.DECODE, limits).max_model_len == longest
    facts = read_model_facts(checkpoint("llama"), settings.rope_override())
    assert facts.max_positions is None or facts.max_positions >= longest


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": '{"type": "linear", "factor": 2}'}])
def test_a_length_beyond_the_scaling_is_refused(checkpoint: Checkpoint, rope: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"max_model_len 4096 is over .* rope_scaling or rope_theta"):
        load_engine(worker_settings(checkpoint("llama"), max_model_len=4096, **rope), EngineLimits(64, 4))


def worker_settings(model_dir: Path, **changes: Any) -> DecodeSettings:
    return DecodeSettings(
        model=str(model_dir), registry_address="none", kv_cache_bytes=1 << 22, device="cpu", **changes
    )


def test_a_token_is_rotated_the_same_in_steps_of_any_length(repaired: Repaired) -> None:
    rope = RotaryEmbedding(RopeConfig("dynamic", 10_000.0, 64, 64, factor=2.0), 64, torch.device("cpu"), torch.float32)
    positions = torch.arange(500)
    whole = rope.cos_sin(positions, positions + 1)
    for count in (1, 7, 31, 33):
        for some in positions.split(count):
            for part, expected in zip(rope.cos_sin(some, some + 1), whole, strict=True):
                assert torch.equal(part, expected[some])
    repaired("M15", "dynamic NTK behind the trained length: steps of 1 to 500 tokens rotate equally, to the bit")
