"""Tokens that the sampler draws against the exact distribution of each set of parameters."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.sampler import Sampler
from engine.sequence import SequenceState
from tests.component.sampling.plain_sampling import distribution, sample
from tests.fakes.requests import make_request
from tests.goodness import UNLIKELY, fit, independence

VOCAB_SIZE = 40
NUM_DRAWS = 4000
EOS = 7
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 6},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 1.3, "top_k": 30, "typical_p": 0.9},
    {"temperature": 1.0, "bad_word_ids": ((6,), (3, 9, 20))},
    {"temperature": 1.0, **PENALTIES},
    {"temperature": 0.9, **PENALTIES, "top_p": 0.9},
    {"temperature": 1.0, "logit_bias": {3: 2.0, 5: -100.0}, "min_new_tokens": 10},
]


def sequences(num: int, first_seed: int, **sampling: Any) -> list[SequenceState]:
    """The same prompt and output under different seeds, as the choices of one request have them."""
    made = []
    for seed in range(first_seed, first_seed + num):
        request = make_request("s", [1, 2, 2, 3], max_new_tokens=50, eos_token_ids=frozenset({EOS}))
        params = type(request.sampling)(**{"max_new_tokens": 50, "seed": seed} | sampling)
        object.__setattr__(request, "sampling", params)
        sequence = SequenceState(request)
        sequence.token_ids += [5, 5, 3, 9]
        made.append(sequence)
    return made


def one_row() -> Tensor:
    return 1.5 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


def draw(rows: list[SequenceState]) -> list[int]:
    sampler, logits = Sampler(), one_row()
    for sequence in rows:  # requests of one name would share their token counts
        sampler.forget(sequence)
    return [token.id for token in sample(sampler, logits.expand(len(rows), -1).contiguous(), rows)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_draws_fit_the_exact_distribution(case: int) -> None:
    rows = sequences(NUM_DRAWS, first_seed=1000 * case, **CASES[case])
    counts = np.bincount(draw(rows), minlength=VOCAB_SIZE)
    assert fit(counts, distribution(one_row()[0], rows[0])) > UNLIKELY


@pytest.mark.parametrize(
    "wrong", [{"temperature": 1.2}, {"temperature": 1.0, "top_k": 30}, {"temperature": 1.0, "top_p": 0.97}]
)
def test_a_distribution_that_is_nearly_right_is_found_out(wrong: dict[str, Any]) -> None:
    counts = np.bincount(draw(sequences(NUM_DRAWS, 0, temperature=1.0)), minlength=VOCAB_SIZE)
    assert fit(counts, distribution(one_row()[0], sequences(1, 0, **wrong)[0])) < UNLIKELY


def test_choices_of_one_request_are_independent() -> None:
    """Choice i draws with seed + i: neighbours must not know of each other."""
    rows = sequences(NUM_DRAWS, 77, temperature=1.0, top_k=6)
    tokens = draw(rows)
    first, second = tokens[0::2], tokens[1::2]
    assert independence(first, second) > UNLIKELY
    often_the_same = [
        one if place % 5 == 0 else two for place, (one, two) in enumerate(zip(first, second, strict=True))
    ]
    assert independence(first, often_the_same) < UNLIKELY
