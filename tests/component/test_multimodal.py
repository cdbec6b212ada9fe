"""Multimodal checkpoints are served as their text part, whatever their tensors are called."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from transformers import AutoConfig

from checkpoint.text_part import TEXT_MODELS
from engine.load_runner import load_model_runner
from engine.models.read_config import load_config
from tests.component.arms import settings
from tests.component.multimodal import CASES, build_multimodal, multimodal
from tests.component.parity import expect, prompts, require_same, run_mixed


@pytest.mark.parametrize("model_type", CASES)
def test_text_part_says_what_transformers_says(tmp_path: Path, model_type: str) -> None:
    """transformers' whole model, without images: all axes of Qwen's positions are equal."""
    model_dir = build_multimodal(model_type, tmp_path)
    with capture_logs() as logs:
        runner = load_model_runner(settings(model_dir))
    for run, prompt in zip(run_mixed(runner), prompts(), strict=True):
        require_same(run, expect(multimodal(model_type), prompt))
    not_read = next(line["tensors_not_read"] for line in logs if "tensors_not_read" in line)
    assert not_read.keys() & {"vision_tower", "visual", "vision_model"}
    assert not [line for line in logs if "does not use" in line["event"]]


@pytest.mark.parametrize("kind", [kind for kind, model in TEXT_MODELS.items() if model.defaults])
def test_what_text_config_leaves_out_is_transformers_default(tmp_path: Path, kind: str) -> None:
    configs = []
    for text_config in ({"model_type": kind}, AutoConfig.for_model(kind).to_dict()):
        raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text_config}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        configs.append(load_config(tmp_path))
    assert configs[0] == configs[1]
