"""Operations of sampling on whole rows, in compiled loops and in torch: the largest logits, and copies with masks."""

import math

import numpy as np
import pytest
import torch

from engine.device_copies import NoCopies
from engine.models.loop_threads import LoopThreads
from engine.models.rank_group import Alone
from engine.sampling.host_rows import HostRows
from engine.sampling.row_math import DeviceRows
from tests.component.sampling.test_sampler import logits_for


@pytest.mark.parametrize("vocab_size", [1, 20, 300, 5003])
def test_the_largest_logits_of_a_row_in_order(vocab_size: int) -> None:
    logits, rows = logits_for(9, seed=1, vocab_size=vocab_size), torch.tensor([7, 0, 4])
    logits[4, vocab_size // 2 :] = -math.inf
    logits[0] = logits[0].round()  # with ties, of which the first come first
    for count in {1, min(20, vocab_size), vocab_size}:
        values, columns = HostRows(LoopThreads(2, Alone())).top(logits, rows, count)
        for row, own_values, own_columns in zip(rows, values, columns, strict=True):
            wanted = logits[row].sort(descending=True, stable=True)
            assert torch.equal(own_values, wanted.values[:count])
            assert torch.equal(own_columns, wanted.indices[:count])
        assert torch.equal(DeviceRows().top(logits, rows, count)[0], values)


def test_the_largest_logits_of_a_row_that_is_not_a_number_are_some_tokens() -> None:
    logits = torch.full((1, 900), math.nan)
    logits[0, 700] = 1.0
    columns = HostRows().top(logits, torch.tensor([0]), 20)[1][0].tolist()
    assert len({*columns}) == 20
    assert all(0 <= column < 900 for column in columns)


@pytest.mark.parametrize("vocab_size", [1, 8, 17, 300, 5003])
def test_copies_of_rows_have_what_masks_allow(vocab_size: int) -> None:
    logits, masked = logits_for(5, seed=2, vocab_size=vocab_size), [3, 0, 4]
    allowed = np.random.default_rng(0).random((len(masked), vocab_size)) < 0.5
    bits = np.packbits(allowed, axis=1, bitorder="little")
    masks = NoCopies().to_device({"masked": np.array(masked), "mask_bits": bits})
    wanted, before = logits.clone(), logits.clone()
    for row, own in zip(masked, allowed, strict=True):
        wanted[row, torch.from_numpy(~own)] = -math.inf
    for math_of_rows in (HostRows(), HostRows(LoopThreads(2, Alone())), DeviceRows()):
        assert torch.equal(math_of_rows.copied(logits, masks), wanted)
        assert torch.equal(math_of_rows.copied(logits, {}), before)
    assert torch.equal(logits, before)
