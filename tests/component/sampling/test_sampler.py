"""The vectorised sampler against a plain one, its random numbers, and its independence of the batch."""

import math
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device_copies import Arrays, NoCopies
from engine.models.loop_threads import LoopThreads
from engine.models.rank_group import Alone
from engine.sampling.host_rows import HostRows, RowThreads
from engine.sampling.penalties import Penalties
from engine.sampling.row_math import DeviceRows, RandomRows, RowMath, inverse_cdf
from engine.sampling.sampler import Sampler, uniform
from engine.sampling.truncation import Truncation
from engine.sequence import SequenceState
from tests.component.sampling.plain_sampling import adjusted, distribution, sample
from tests.fakes.requests import make_request

VOCAB_SIZE = 600
EOS = 7
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.999999},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 1.0, "top_k": VOCAB_SIZE + 5, "top_p": 1e-9},
    PENALTIES,
    {"temperature": 1.0, **PENALTIES, "top_k": 20},
    {"logit_bias": {3: 100.0}},
    {"temperature": 1.0, "logit_bias": {3: -100.0, 5: 2.0}, "min_new_tokens": 10},
    {"temperature": 1.0, "typical_p": 0.3},
    {"temperature": 1.4, "top_k": 50, "typical_p": 0.9},
    {"temperature": 1e-6},
    {"logit_bias": {4: 50.0, 6: 40.0}, "bad_word_ids": ((4,),)},
    {"logit_bias": {4: 50.0, 6: 40.0}, "bad_word_ids": ((3, 9, 4), (9, 6), (6,))},
    {"temperature": 1.0, "typical_p": 0.8, "bad_word_ids": ((3, 9, 4), (5, 4), (2, 3, 5, 5, 3, 9, 2))},
]


def sequence(name: str, *, seed: int = 1, generated: int = 4, **sampling: Any) -> SequenceState:
    made = SequenceState(make_request(name, [1, 2, 2, 3], max_new_tokens=50, eos_token_ids=frozenset({EOS})))
    spec = made.spec
    params = type(spec.sampling)(**{"max_new_tokens": 50, "seed": seed} | sampling)
    made = SequenceState(type(spec)(**{f: getattr(spec, f) for f in spec.__slots__} | {"sampling": params}))
    made.token_ids += [5, 5, 3, 9, 11, 5][:generated]
    return made


def logits_for(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def expected_token(row: Tensor, seq: SequenceState) -> int:
    if seq.spec.sampling.is_greedy:
        return int(adjusted(row, seq).argmax())
    seed = np.array([seq.spec.sampling.seed], np.uint64)
    draw = uniform(seed, np.array([seq.num_generated], np.uint64))[0]
    return int((distribution(row, seq).cumsum(0) <= draw).sum())


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 264, 1000])
@pytest.mark.parametrize("offset", [0.0, -500.0, 3000.0])
def test_summaries_of_rows(vocab_size: int, offset: float) -> None:
    padded = 20 * logits_for(9, vocab_size + 5) + offset
    padded[1, 0] = padded[2, vocab_size // 2] = offset + 1000.0
    padded[3, vocab_size // 3] = padded[3, vocab_size - 1] = offset + 500.0  # of two largest the first
    logits = padded[:, :vocab_size]
    exact = logits.double().logsumexp(1).float()
    for given in (logits, logits.contiguous()):
        summary = HostRows().summarise(given)
        assert summary.largest.tolist() == logits.numpy().argmax(1).tolist()
        torch.testing.assert_close(summary.normaliser, exact, atol=2e-6, rtol=2e-6)
        assert torch.equal(summary.logprob, logits.amax(1) - summary.normaliser)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_same_as_the_plain_sampler(case: int) -> None:
    for seed in range(20):
        seq, logits = sequence("s", seed=seed, **CASES[case]), logits_for(1, seed=seed)
        assert sample(Sampler(), logits, [seq])[0].id == expected_token(logits[0], seq)


def test_a_batch_of_all_kinds_draws_what_each_draws_alone() -> None:
    sequences = [sequence(str(i), seed=i, **case) for i, case in enumerate(CASES * 3)]
    logits = logits_for(len(sequences))
    before = logits.clone()
    together = sample(Sampler(), logits, sequences)
    alone = [sample(Sampler(), logits[i : i + 1], [seq])[0] for i, seq in enumerate(sequences)]
    assert [token.id for token in together] == [token.id for token in alone]
    assert [token.logprob for token in together] == pytest.approx([token.logprob for token in alone], abs=1e-5)
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model() -> None:
    logits = logits_for(2)
    sequences = [sequence("a", temperature=0.1, logit_bias={3: 100.0}), sequence("b", **PENALTIES)]
    for row, token in zip(logits.log_softmax(1), sample(Sampler(), logits, sequences), strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-5)
        assert token.top == ()


def test_top_logprobs_only_for_those_who_ask() -> None:
    logits = logits_for(3)
    sequences = [sequence(str(i)) for i in range(3)]
    asked = (0, 2, 5)
    for i, wanted in enumerate(asked):
        object.__setattr__(sequences[i].spec, "top_logprobs", wanted)
    for row, token, wanted in zip(logits.log_softmax(1), sample(Sampler(), logits, sequences), asked, strict=True):
        assert [top.id for top in token.top] == row.topk(wanted).indices.tolist()
        assert [top.logprob for top in token.top] == pytest.approx(row.topk(wanted).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("make_rows", [HostRows, DeviceRows])
def test_tied_alternatives_are_in_the_order_of_their_ids_whatever_others_ask_for(
    make_rows: Callable[[], RowMath],
) -> None:
    """Logits that a model rounds to bf16 have many ties. The greedy token is the first alternative."""
    rows = make_rows()
    logits = logits_for(4).round()
    logits[2], logits[3] = 1.0, -math.inf
    logits[3, 40], logits[3, 30] = 2.0, 2.0
    counts = [1, 3, 20, 5]
    sequences = [sequence(str(count)) for count in counts]
    for made, count in zip(sequences, counts, strict=True):
        object.__setattr__(made.spec, "top_logprobs", count)
    together = sample(Sampler(rows=rows), logits, sequences)
    for row, token in enumerate(together):
        [alone] = sample(Sampler(rows=rows), logits[row : row + 1], sequences[row : row + 1])
        best = np.lexsort((np.arange(VOCAB_SIZE), -logits[row].numpy())).tolist()
        assert [top.id for top in token.top] == [top.id for top in alone.top] == best[: counts[row]]
        assert token.top[0] == (token.id, token.logprob)


def test_penalties_follow_the_tokens_step_by_step() -> None:
    sampler, seq = Sampler(), sequence("s", generated=0, **PENALTIES)
    for step in range(30):
        logits = logits_for(1, vocab_size=40, seed=step % 3)
        token = sample(sampler, logits, [seq])[0].id
        assert token == expected_token(logits[0], seq)
        seq.token_ids.append(token)
    sampler.forget(seq)
    sampler.forget(seq)
    logits = logits_for(1, vocab_size=40, seed=99)
    assert sample(sampler, logits, [seq])[0].id == expected_token(logits[0], seq)


def test_a_sequence_is_not_counted_again_for_each_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 100,000 tokens would take 7 ms each time."""
    seq, drafts = sequence("a", **PENALTIES), (9, 700, 5, 5, 4)
    rows = [seq, *(seq.with_draft(drafts[:length]) for length in range(1, len(drafts) + 1))]
    anew = [counted(Penalties().arrays([row], VOCAB_SIZE)) for row in rows]
    penalties = Penalties()
    penalties.arrays([seq], VOCAB_SIZE)
    monkeypatch.setattr("engine.sampling.penalties.TokenCounts", None)
    assert [counted(penalties.arrays([row], VOCAB_SIZE)) for row in rows] == anew
    assert counted(penalties.arrays([seq], VOCAB_SIZE)) == anew[0], "drafts leave nothing behind"


def test_many_biases_make_no_object_for_each() -> None:
    """64 requests with 1024 entries each: with a tuple for each, a step took 100 ms more."""
    bias = {token: token / 7 for token in range(1024)}
    sequences = [sequence(str(number), logit_bias=bias) for number in range(64)]
    tracemalloc.start()
    try:
        arrays = Penalties().arrays(sequences, 1024)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrays["bias_rows"].tolist() == [row for row in range(64) for _ in bias]
    assert arrays["bias_tokens"].tolist() == [*bias] * 64
    assert arrays["biases"].tolist() == np.array([*bias.values()] * 64, np.float32).tolist()
    assert peak_bytes < 2 * sum(array.nbytes for array in arrays.values())


def counted(arrays: Arrays) -> dict[int, float]:
    return dict(zip(arrays["counted_tokens"].tolist(), arrays["counts"].tolist(), strict=True))


def test_a_tiny_repetition_penalty_leaves_numbers() -> None:
    """Logits divided by it are infinity, and their differences no numbers: token 0 would be drawn."""
    seq = sequence("s", temperature=0.5, repetition_penalty=1e-38)
    assert sample(Sampler(), torch.full((1, VOCAB_SIZE), 20.0), [seq])[0].id in seq.token_ids


def test_many_distinct_tokens_are_counted() -> None:
    sampler, seq = Sampler(), sequence("s", generated=0, frequency_penalty=2.0)
    flat = torch.zeros(1, VOCAB_SIZE)
    for _ in range(VOCAB_SIZE):
        seq.token_ids.append(sample(sampler, flat, [seq])[0].id)
    assert sorted(seq.token_ids[seq.num_prompt_tokens :]) == list(range(VOCAB_SIZE))


@pytest.mark.parametrize(("generated", "allowed"), [(4, False), (5, True)])
def test_the_end_waits_for_min_new_tokens(generated: int, allowed: bool) -> None:
    seq = sequence("s", generated=generated, min_new_tokens=5, stop_token_ids=(8,))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS], logits[0, 8] = 5.0, 4.0
    assert (sample(Sampler(), logits, [seq])[0].id == EOS) is allowed
    assert sample(Sampler(), logits, [seq])[0].id != 8


def test_draws_fit_the_distribution() -> None:
    """Chi-square over 20000 draws of one distribution; the bound is its 99.9 % quantile for 29 degrees of freedom."""
    vocab_size, num_draws = 30, 20_000
    logits = logits_for(1, vocab_size=vocab_size)
    seq = sequence("s", temperature=1.2)
    probabilities = distribution(logits[0], seq)
    indices = np.arange(num_draws, dtype=np.uint64)
    draws = torch.from_numpy(uniform(np.full(num_draws, 42, np.uint64), indices))
    weights = (logits / 1.2).exp().expand(num_draws, -1)
    counts = torch.bincount(inverse_cdf(weights, draws), minlength=vocab_size)
    wanted = probabilities * num_draws
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 58.3


def test_draws_depend_on_seed_and_index_only() -> None:
    seeds = np.repeat(np.array([0, 1, 2**64 - 1], np.uint64), 1000)
    indices = np.tile(np.arange(1000, dtype=np.uint64), 3)
    draws = uniform(seeds, indices)
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(np.unique(draws)) == len(draws)
    assert uniform(seeds[1500:1501], indices[1500:1501])[0] == draws[1500]
    assert abs(np.corrcoef(draws[:1000], draws[1000:2000])[0, 1]) < 0.1
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.05


def test_the_last_draw_never_leaves_the_distribution() -> None:
    weights = torch.zeros(2, VOCAB_SIZE)
    weights[0, 3] = weights[0, 300] = 1e-30
    weights[1, 599] = 1.0
    almost_one = torch.full((2,), 1.0 - 2.0**-53, dtype=torch.float64)
    assert inverse_cdf(weights, almost_one).tolist() == [300, 599]
    assert inverse_cdf(weights, torch.zeros(2, dtype=torch.float64)).tolist() == [3, 599]


def drawn(logits: Tensor, uniforms: Sequence[float], threads: RowThreads | None = None, **limits: Any) -> list[int]:
    """One token per row by the compiled loops, at these random numbers."""
    params = [sequence("s", **{"temperature": 1.0} | limits).spec.sampling] * len(logits)
    wanted = RandomRows(range(len(logits)), params, np.array(uniforms))
    tokens: list[int] = HostRows(threads).drawing(wanted, logits.shape[1]).tokens(logits, {}).tolist()
    return tokens


ALMOST_ONE = 1.0 - 2.0**-53


@pytest.mark.parametrize("limits", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.5}, {"typical_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("vocab_size", [1, 17, 300])
def test_only_tokens_that_are_allowed_are_drawn(vocab_size: int, temperature: float, limits: dict[str, Any]) -> None:
    allowed = vocab_size - 1
    logits = torch.full((3, vocab_size), -math.inf)
    logits[:, allowed] = torch.tensor([-900.0, 0.0, 900.0])
    for uniforms in ([0.0] * 3, [ALMOST_ONE] * 3):
        assert drawn(logits, uniforms, temperature=temperature, **limits) == [allowed] * 3


def test_rows_that_are_not_finite_give_some_token() -> None:
    """Their log-probs tell, so that the request fails."""
    logits = torch.zeros(4, 50)
    logits[0], logits[1], logits[2, 7], logits[3, 7] = math.nan, -math.inf, math.inf, math.nan
    for limits in ({}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"typical_p": 0.5}):
        assert all(0 <= token < 50 for token in drawn(logits, [0.5] * 4, **limits))


def test_tokens_that_are_tied_with_the_last_one_are_kept() -> None:
    logits = torch.zeros(1, 40)
    logits[0, :30] = 1.0
    for limits in ({"top_k": 3}, {"top_p": 0.01}):
        assert drawn(logits, [0.0], **limits) == [0]
        assert drawn(logits, [ALMOST_ONE], **limits) == [29]


@pytest.mark.parametrize("vocab_size", [999, 1000, 1007, 1008])
def test_tokens_stay_tied_at_any_temperature_wherever_they_are(vocab_size: int) -> None:
    """The end of a row, behind the last whole vector, is divided by the temperature apart."""
    logits = torch.zeros(1, vocab_size)
    first, last = 3, vocab_size - 1
    for number in range(40):
        logits[0, first] = logits[0, last] = 20.0 + 0.7 * number
        for limits in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"typical_p": 0.01}):
            temperature = 0.1 + 0.0437 * number
            assert drawn(logits, [0.25], temperature=temperature, **limits) == [first]
            assert drawn(logits, [0.75], temperature=temperature, **limits) == [last]


@pytest.mark.parametrize("limits", [{"top_k": 400}, {"top_p": 1 - 1e-12}, {"top_k": 450, "top_p": 0.9999}], ids=str)
def test_limits_in_the_far_tail(limits: dict[str, Any]) -> None:
    """Values go 500 below the highest one, further than is looked at first."""
    logits = torch.linspace(-500.0, 0.0, 501).repeat(2, 1)
    logits[1] *= 1e-3  # nearly even
    kept = [int((distribution(row, sequence("s", temperature=1.0, **limits)) > 0).sum()) for row in logits]
    assert drawn(logits, [0.0, 0.0], **limits) == [501 - count for count in kept]
    assert drawn(logits, [ALMOST_ONE, ALMOST_ONE], **limits) == [500, 500]


def test_threads_share_out_the_rows() -> None:
    logits, uniforms = logits_for(7, vocab_size=1003), np.linspace(0.0, 0.999, 7).tolist()
    limits = {"top_k": 50, "top_p": 0.9}
    for count in (2, 3):
        assert drawn(logits, uniforms, LoopThreads(count, Alone()), **limits) == drawn(logits, uniforms, **limits)


def test_top_p_looks_beyond_the_first_candidates() -> None:
    logits = 0.01 * logits_for(2, vocab_size=5000)
    params = [sequence("s", temperature=1.0, top_p=p).spec.sampling for p in (0.9, 0.01)]
    truncation = Truncation(params, 5000)
    low = truncation.thresholds(logits, NoCopies().to_device(truncation.arrays))
    assert low is not None
    kept = (logits >= low[:, None]).sum(1)
    mass = (logits.softmax(1) * (logits >= low[:, None])).sum(1)
    assert 4000 < int(kept[0]) < 4600
    assert mass.tolist() == pytest.approx([0.9, 0.01], abs=0.001)


@pytest.mark.parametrize(
    ("generated", "word", "is_ruled_out"),
    [
        ([8], (4,), True),
        ([8, 9], (8, 9, 4), True),
        ([8, 9], (9, 4), True),
        ([9, 8], (8, 9, 4), False),
        ([], (2, 3, 4), False),  # the prompt ends in 2, 3: what the client wrote begins no bad word
        ([3], (2, 3, 4), False),
    ],
)
def test_bad_words_look_at_the_output_only(generated: list[int], word: tuple[int, ...], is_ruled_out: bool) -> None:
    seq = sequence("s", generated=0, bad_word_ids=(word,))
    seq.token_ids[:] = [1, 2, 3, *generated]
    object.__setattr__(seq.spec, "num_prompt_tokens", 3)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 4] = 5.0
    assert (sample(Sampler(), logits, [seq])[0].id != 4) is is_ruled_out
