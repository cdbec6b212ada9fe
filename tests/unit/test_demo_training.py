"""The training text of the bundled models, as batches."""

import random
from itertools import islice, pairwise
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


def test_a_random_copy_asks_for_what_its_question_has(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(1)
    num_repeated = num_recalled = 0
    for _ in range(40):
        ids, targets = random_copy(tokenizer, rng)
        places = [place for place, target in enumerate(targets) if target != IGNORED]
        assert len(ids) == len(targets)
        assert [ids[place + 1] for place in places] == [targets[place] for place in places]
        assert targets[places[-1]] == tokenizer.eos_token_id
        begin = ids.index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
        question, answer = ids[:begin], ids[begin + 1 : -1]
        if len(places) == len(answer) + 1:
            num_repeated += 1
            assert question[-1 - len(answer) : -1] == answer
        else:  # codes, each after its label
            num_recalled += 1
            pairs = set(pairwise(question))
            assert all((ids[place], ids[place + 1]) in pairs for place in places[:-1])
    assert min(num_repeated, num_recalled) > 10


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
