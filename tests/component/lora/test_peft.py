"""Adapters that the peft package itself has written, and its own answers: four at once, and rows without one."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.component.arms import load_arm
from tests.component.lora.adapters import read_adapters, run_together
from tests.component.parity import TOLERANCE, expect, prompts, require_same
from tests.component.remote_families import load_reference

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "scaled": {"r": 3, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True},
    "ranks": {"r": 4, "target_modules": "all-linear", "rank_pattern": {r".*layers\.1\..*": 9}},
    "attention": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
}


@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.parametrize("arm", ["compiled", "torch"])
@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "starcoder2"])
def test_four_adapters_and_none_are_those_of_peft(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str, arm: str
) -> None:
    model_dir = checkpoint(family)
    theirs = _model_with_adapters(model_dir)
    theirs.save_pretrained(tmp_path)
    adapters = read_adapters(*(tmp_path / name for name in ADAPTERS))
    digests = {number: adapter.digest for number, adapter in enumerate(adapters)} | {len(adapters): ""}
    runs = run_together(load_arm(model_dir, arm, adapters=adapters), digests)
    for number, (run, name) in enumerate(zip(runs, (*ADAPTERS, None), strict=True)):
        if name is not None:
            theirs.set_adapter(name)
        with nullcontext() if name is not None else theirs.disable_adapter():
            require_same(run, expect(theirs, prompts()[number % 3]), 10 * TOLERANCE)
    assert len({tuple(run.token_ids) for run in (runs[0], runs[3])}) == 2, "adapters change nothing"


@torch.no_grad()
def _model_with_adapters(model_dir: Path) -> Any:
    """peft's model with all adapters, whose numbers are large enough to change answers."""
    torch.manual_seed(7)
    first, *others = ADAPTERS
    model: Any = get_peft_model(load_reference(model_dir), LoraConfig(**ADAPTERS[first]), adapter_name=first)
    for name in others:
        model.add_adapter(name, LoraConfig(**ADAPTERS[name]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0.0, 0.2)
    return model.eval()
