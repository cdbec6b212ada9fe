"""The bundled models. What is held out of their questions can be known from what was trained on, and the answers are
right. Training texts become batches.
"""

import random
import re
from collections import defaultdict
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from demo_model.encoding import IGNORED, PART_TOKENS, STEP_PARTS, Batch, random_copy, steps
from demo_model.questions import draw
from demo_model.train import PLANS, backward, build

BUNDLED = Path(__file__).resolve().parents[2] / "demo_model" / "tandem-draft"
FACTS = ("small_talk", "capital", "opposite", "plural", "nature", "explanation", "listing", "table")
DRAWS = 4000
FEWEST_WORDINGS = 3


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


@pytest.mark.parametrize("kind", FACTS)
def test_a_held_out_fact_is_trained_in_several_other_wordings(kind: str) -> None:
    rng = random.Random(1)
    wordings: defaultdict[str, set[str]] = defaultdict(set)
    for _ in range(DRAWS * 3):
        [(question, answer)] = draw(kind, rng, held_out=False).turns
        wordings[answer].add(question)
    held_out = dict(draw(kind, rng, held_out=True).turns[0] for _ in range(DRAWS // 10))
    assert not set(held_out) & set().union(*wordings.values())
    rare = {question: answer for question, answer in held_out.items() if len(wordings[answer]) < FEWEST_WORDINGS}
    assert not rare


def _drawn(kind: str) -> list[tuple[str, str]]:
    rng = random.Random(2)
    return [draw(kind, rng, held_out=False).turns[-1] for _ in range(300)]


def test_an_entry_is_repeated_before_its_code_is_said() -> None:
    for question, answer in _drawn("lookup"):
        match = re.fullmatch(r"The list says (\w+) (\d+), so the code for (\w+) is (\d+)\.", answer)
        assert match is not None
        assert match.group(1, 2) == match.group(3, 4)
        assert f" {match[1]} {match[2]}" in question


def test_an_end_letter_is_said_after_the_word_is_spelled() -> None:
    for question, answer in _drawn("end_letter"):
        match = re.fullmatch(r"([a-z-]+): the (first|last) letter is ([a-z])\.", answer)
        assert match is not None
        letters = match[1].split("-")
        assert "".join(letters) in question
        assert match[3] == letters[0 if match[2] == "first" else -1]


def test_a_word_problem_says_what_is_left() -> None:
    for question, answer in _drawn("word_problem"):
        start, change = map(int, re.findall(r"\d+", question))
        is_loss = any(verb in question for verb in ("gives away", "loses", "sells"))
        match = re.search(r"= (\d+) \w+ now\.$", answer)
        assert match is not None
        assert int(match[1]) == (start - change if is_loss else start + change)
