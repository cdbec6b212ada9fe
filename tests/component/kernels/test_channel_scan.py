"""The kernel of Mamba 1: its numbers beside torch's, in fp64 and in the eager decoder, however tokens are batched."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.machine import LANES
from engine.kernels.cpu.recurrent.channel_vectors import soften_row
from engine.kernels.cpu.recurrent.recurrence import mix, multiply_address
from engine.kernels.cpu.recurrent.recurrent_arguments import (
    CHANNELS,
    STAGES,
    MixPart,
    StatePlaces,
    StateSteps,
    StepRows,
)
from engine.kernels.cpu.vectors import address
from engine.models.recurrent.channel_scan import ChannelScan
from engine.models.recurrent.config import ChannelScanConfig, RecurrentConfig
from engine.models.recurrent.for_kernels import recurrent_layers

_CHANNELS, _RANK, _ROW = 400, 7, 48
"""A unit of 256 channels and a part; a state in rows that end within them."""


class Taken:
    """Parameters of a layer, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str) -> Tensor:
        return self._tensors[name]

    def take_optional(self, name: str) -> Tensor | None:
        return self._tensors.get(name)


class Layer:
    """A layer with the states of some sequences."""

    def __init__(self, key_dim: int, norm: str, num_seqs: int = 1) -> None:
        torch.manual_seed(key_dim)
        self.facts = RecurrentConfig(
            kind="channels",
            layers=(True,),
            kernel=4,
            channels=_CHANNELS,
            num_heads=1,
            num_key_heads=1,
            key_dim=key_dim,
            value_dim=_CHANNELS,
            channel_scan=ChannelScanConfig(_RANK, norm, 1e-5),
        )
        tensors = {
            "conv": torch.randn(_CHANNELS, 1, 4) / 2,
            "conv_bias": torch.randn(_CHANNELS),
            "decay_log": torch.randn(_CHANNELS, key_dim),
            "decay_bias": torch.randn(_CHANNELS) - 3,
            "skip": torch.randn(_CHANNELS),
            "inner": torch.randn(_RANK + 2 * key_dim, _CHANNELS) / 20,
            "steps": torch.randn(_CHANNELS, _RANK) / 3,
        }
        if norm:
            sizes = {"step_norm": _RANK, "key_norm": key_dim, "query_norm": key_dim}
            tensors |= {name: torch.rand(size) + 0.5 for name, size in sizes.items()}
        taken: Any = Taken(tensors)
        self.recurrence = ChannelScan(taken, "", self.facts)
        rows = -(-self.facts.state_numbers // _ROW)
        self.states = torch.randn(num_seqs * rows, _ROW)
        places = StatePlaces(self.states.numpy(), np.zeros(rows, np.int64), np.arange(rows), rows, rows)
        multiply = multiply_address(CHANNELS)
        self._layer = recurrent_layers(self.recurrence.for_kernels(), self.facts, 1e-5, places, multiply)

    def state(self, seq: int = 0) -> Tensor:
        return self.states.view(-1, self._layer.places.of_layer * _ROW)[seq, : self.facts.state_numbers]

    def mix(
        self, rows: Tensor, lengths: Sequence[int], *, is_first: bool, num_repeated: int = 0, num_parts: int = 1
    ) -> Tensor:
        """Results of sequences of these lengths, one behind the other."""
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        context_lens = np.array(lengths, np.int32) + (0 if is_first else 3)
        tables = np.arange(len(lengths), dtype=np.int64)[:, None]
        steps = StateSteps(tables, np.full(len(lengths), num_repeated, np.int32), starts, context_lens)
        inner_width = -(-self.facts.inner_width // LANES) * LANES
        empty = (np.empty((len(rows), width), np.float32) for width in (inner_width, _CHANNELS))
        step_rows = StepRows(rows.clone().numpy(), *empty)
        for stage in STAGES[CHANNELS]:
            for number in range(num_parts):
                mix(self._layer, 0, steps, step_rows, MixPart(stage, number, num_parts))
        return torch.from_numpy(step_rows.out)


def rows_of(count: int) -> Tensor:
    return torch.randn((count, 2 * _CHANNELS), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("key_dim", "norm"), [(16, "weighted"), (16, ""), (5, "plain"), (40, "")])
@pytest.mark.parametrize("is_first", [True, False])
def test_it_computes_what_torch_does(key_dim: int, norm: str, is_first: bool) -> None:
    layer, rows = Layer(key_dim, norm), rows_of(37)
    state = torch.zeros(layer.facts.state_numbers) if is_first else layer.state().clone()
    expected = layer.recurrence.scan(rows, state)
    computed = layer.mix(rows, [37], is_first=is_first)
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(layer.state(), state, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("num_parts", [1, 3, 40])
def test_neither_chunks_nor_batches_nor_threads_change_a_bit(num_parts: int) -> None:
    whole, rows = Layer(16, "weighted"), rows_of(37)
    start = whole.state().clone()
    expected = whole.mix(rows, [37], is_first=False)
    chunked = Layer(16, "weighted", num_seqs=3)
    for seq in range(3):
        chunked.state(seq).copy_(start)
    first = 0
    for count in (1, 5, 24, 1, 6):
        own = rows[first : first + count]
        results = chunked.mix(own.repeat(3, 1), [count] * 3, is_first=False, num_parts=num_parts)
        assert all(torch.equal(each, expected[first : first + count]) for each in torch.split(results, count))
        first += count
    assert all(torch.equal(chunked.state(seq), whole.state()) for seq in range(3))


@pytest.mark.parametrize(("length", "num_repeated"), [(1, 1), (9, 1), (9, 4)])
def test_tokens_that_will_be_repeated_leave_the_state_before_them(length: int, num_repeated: int) -> None:
    layer, other, rows = Layer(16, ""), Layer(16, ""), rows_of(9)[:length]
    expected = layer.mix(rows, [length], is_first=False)
    assert torch.equal(other.mix(rows, [length], is_first=False, num_repeated=num_repeated), expected)
    assert torch.equal(other.mix(rows[-num_repeated:], [num_repeated], is_first=False), expected[-num_repeated:])
    assert torch.equal(other.state(), layer.state())


def test_softplus_of_rows() -> None:
    x = torch.cat((torch.linspace(-86, 90, 100_000), torch.tensor([0.0, -1e30, 1e30, 1e-6] * 8)))
    ours, biases = x.clone(), torch.full_like(x, 0.25)

    def soften(row: Any, biases: Any) -> None:
        soften_row(address(row), np.float32(0.5), address(biases), len(row) // 16)

    entry(soften)(ours.numpy(), biases.numpy())
    exact = torch.nn.functional.softplus(x.double() / 2 + 0.25, threshold=1000)
    usual = x.abs() < 30
    torch.testing.assert_close(ours[usual].double(), exact[usual], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.double(), exact, rtol=4e-6, atol=1e-37)  # e^x is as exact as x * log2(e) is
