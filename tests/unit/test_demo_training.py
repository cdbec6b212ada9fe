"""The training text of the bundled models, as batches."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from demo_model.encoding import IGNORED, PART_TOKENS, STEP_PARTS, Batch, random_copy, steps
from demo_model.train import PLANS, backward, build

BUNDLED = Path(__file__).resolve().parents[2] / "demo_model" / "tandem-draft"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(BUNDLED)


def test_a_random_copy_asks_for_the_tokens_of_its_question(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, targets = random_copy(tokenizer, random.Random(1))
    answer = [target for target in targets if target != IGNORED]
    assert len(ids) == len(targets)
    assert answer[-1] == tokenizer.eos_token_id
    start = ids.index(answer[0])
    assert ids[start : start + len(answer)] == answer
    assert [ids[place + 1] for place, target in enumerate(targets) if target != IGNORED] == answer


def test_targets_are_the_next_tokens_and_parts_are_bounded(tokenizer: PreTrainedTokenizerFast) -> None:
    for parts in islice(steps(tokenizer, 1, "copying", 0.5), 3):
        assert len(parts) == STEP_PARTS
        for part in parts:
            assert part.ids.numel() <= PART_TOKENS
            is_target = part.targets[:, :-1] != IGNORED
            assert is_target.any(1).all()
            assert (part.ids[:, 1:][is_target] == part.targets[:, :-1][is_target]).all()


def test_padding_and_parts_change_neither_loss_nor_gradient(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(1)
    model = build(PLANS["tandem-draft"], tokenizer)
    parts = next(steps(tokenizer, 2, "late", 0.0))
    alone = [
        Batch(ids[None, :length], targets[None, :length])
        for part in parts
        for ids, targets in zip(part.ids, part.targets, strict=True)
        for length in [int((ids != tokenizer.pad_token_id).sum())]
    ]
    loss, gradient = _gradient(model, parts)
    loss_alone, gradient_alone = _gradient(model, alone)
    assert loss_alone == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(gradient_alone, gradient, rtol=1e-3, atol=1e-6)


def _gradient(model: torch.nn.Module, parts: list[Batch]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = backward(model, parts, False)
    return loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
