"""Routers whose outputs are far from 0, where sigmoids and softmax round to 0 or 1."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.component.arms import load_arm
from tests.component.parity import check_parity
from tests.component.test_load import edit_weights

Checkpoint = Callable[[str], Path]


def _scaled(weight: Tensor) -> Tensor:
    return 200 * weight


def _sure_of_none(weight: Tensor) -> Tensor:
    """For a part of the tokens all outputs are about -12."""
    return 0.2 * weight + 2.0 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arm", ["compiled", "cpu", "torch"])
@pytest.mark.parametrize(
    ("family", "router", "change"),
    [
        ("dots1", "mlp.gate.weight", _scaled),
        ("llama4", "router.weight", _scaled),
        ("qwen2-moe", "shared_expert_gate.weight", _scaled),
        ("lfm2-moe", "feed_forward.gate.weight", _sure_of_none),
    ],
)
def test_outputs_far_from_0(
    checkpoint: Checkpoint, tmp_path: Path, family: str, router: str, change: Callable[[Tensor], Tensor], arm: str
) -> None:
    model_dir = Path(shutil.copytree(checkpoint(family), tmp_path / family))

    def edit(tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if name.endswith(router)]
        assert names
        tensors.update({name: change(tensors[name]) for name in names})

    edit_weights(model_dir, edit)
    check_parity(model_dir, load_arm(model_dir, arm))
