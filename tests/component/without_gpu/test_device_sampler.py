"""The sampler as GPUs run it, with torch on packed copies, against the CPU's; and that it reads nothing back."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device_copies import PackedCopies
from engine.sampling.row_math import DeviceRows, Logits, Summary
from engine.sampling.sampler import Sampler
from engine.sequence import SequenceState
from mesh.domain.tokens import SampledToken
from tests.component.sampling.plain_sampling import sample
from tests.component.sampling.test_sampler import CASES, VOCAB_SIZE, logits_for, sequence
from tests.fakes.device import DEVICE, FakeCopies, MixesDevices, no_waiting

BATCH = 250
CPU = torch.device("cpu")


def on_device() -> Sampler:
    return Sampler(copies=PackedCopies(CPU), rows=DeviceRows())


def batch_of(number: int, size: int) -> list[SequenceState]:
    """Sequences with random mixtures of all parameters."""
    rng = random.Random(number)
    sequences = []
    for row in range(size):
        case = rng.choice(CASES) | rng.choice(CASES) | {"temperature": rng.choice([0.0, 0.3, 1.0, 1.8])}
        made = sequence(f"{number}-{row}", seed=rng.getrandbits(64), generated=rng.randrange(6), **case)
        object.__setattr__(made.spec, "top_logprobs", rng.choice([0, 0, 1, 5, 20]))
        sequences.append(made)
    return sequences


@pytest.mark.parametrize("num_draws", [4_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_the_same_tokens_and_log_probs_as_on_cpu(num_draws: int) -> None:
    host, device = Sampler(), on_device()
    for number in range(num_draws // BATCH):
        sequences, logits = batch_of(number, BATCH), logits_for(BATCH, seed=number)
        ours, theirs = sample(device, logits, sequences), sample(host, logits, sequences)
        assert [token.id for token in ours] == [token.id for token in theirs]
        assert [top.id for token in ours for top in token.top] == [top.id for token in theirs for top in token.top]
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), rtol=1e-6, atol=1e-6)


def logprobs(tokens: list[SampledToken]) -> list[float | None]:
    return [token.logprob for token in tokens] + [top.logprob for token in tokens for top in token.top]


@pytest.mark.parametrize("case", [*range(len(CASES)), None], ids=str)
def test_nothing_is_read_back_while_tokens_are_drawn(case: int | None) -> None:
    copies = FakeCopies()
    sequences = batch_of(1, 40) if case is None else [sequence(str(i), **CASES[case]) for i in range(3)]
    logits = torch.empty((len(sequences), VOCAB_SIZE), device=DEVICE)
    with no_waiting():
        drawn = Sampler(copies=copies, rows=DeviceRows()).draw(Logits(logits), sequences)
    assert {tensor.device for tensor in drawn.tensors} == {DEVICE}
    assert drawn.tensors[0].shape == (len(sequences),)
    assert (copies.num_sent, copies.read) == (1, [])


def test_nothing_is_read_back_while_masks_are_applied() -> None:
    bits = np.zeros((2, VOCAB_SIZE // 8), np.uint8)
    masks = FakeCopies().to_device({"masked": np.array([2, 0]), "mask_bits": bits})
    logits = torch.empty((3, VOCAB_SIZE), device=DEVICE)
    with no_waiting():
        assert DeviceRows().copied(logits, masks).shape == logits.shape


class ReadsOnTheWay(DeviceRows):
    def summarise(self, values: Tensor) -> Summary:
        summary = super().summarise(values)
        return summary._replace(largest=summary.largest + 0 * int(summary.largest[0]))


class BringsNumbers(DeviceRows):
    def summarise(self, values: Tensor) -> Summary:
        summary = super().summarise(values)
        return summary._replace(largest=summary.largest + torch.tensor([1, 2], device=values.device))


@pytest.mark.parametrize(("wrong", "error"), [(ReadsOnTheWay(), RuntimeError), (BringsNumbers(), MixesDevices)])
def test_what_makes_the_host_wait_would_be_found_out(wrong: DeviceRows, error: type[Exception]) -> None:
    with no_waiting(), pytest.raises(error):
        Sampler(copies=FakeCopies(), rows=wrong).draw(Logits(torch.empty((2, 30), device=DEVICE)), [sequence("a")] * 2)
