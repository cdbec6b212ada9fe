"""The stand-in for CUDA graphs repeats work on the same memory, and finds what a graph would silently do wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.tape import NotCapturable, ReplayDiffers, TapeCapture

WEIGHTS = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


def work(x: Tensor) -> Tensor:
    """Views, operations in place, new memory, several results."""
    heads = (x @ WEIGHTS).view(-1, 2, 3)
    low, high = heads.chunk(2, 1)
    out = torch.empty_like(heads)
    out[:, :1] = high
    out[:, 1:] = low
    values, order = out.flatten(1).sort(1)
    return values.add_(order.to(x.dtype)).mul_(2.0)


def test_a_replay_computes_what_the_buffer_holds_now() -> None:
    buffer = torch.ones(4, 6)
    with torch.inference_mode():
        graph, result = TapeCapture()(lambda: work(buffer))
        for seed in range(5):
            buffer.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(result, work(buffer))


def test_a_number_of_the_host_is_found_out() -> None:
    buffer, numbers = torch.ones(4, 6), [2]
    graph, _ = TapeCapture()(lambda: buffer[: numbers[0]] * 3)
    graph.replay()
    numbers[0] = 3
    with pytest.raises(ReplayDiffers, match="baked"):
        graph.replay()


def test_a_buffer_that_was_replaced_is_found_out() -> None:
    buffers = [torch.ones(4, 6)]
    graph, _ = TapeCapture()(lambda: buffers[0] * 3)
    buffers[0] = torch.ones(4, 6)
    with pytest.raises(ReplayDiffers, match=r"not where they were.*\(4, 6\)"):
        graph.replay()


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.ones(3) * torch.ones(3).sum().item(),
        lambda: torch.ones(3)[torch.ones(3).nonzero()],
        lambda: torch.ones(3) * torch.tensor([1.0, 2.0, 3.0]),
        lambda: torch.ones(3) * torch.from_numpy(np.ones(3)),
    ],
    ids=["reads a value", "a shape by values", "a tensor of numbers", "an array"],
)
def test_what_waits_for_the_device_is_refused(run: Callable[[], Tensor]) -> None:
    with pytest.raises(NotCapturable):
        TapeCapture()(run)
