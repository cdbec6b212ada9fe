"""The stand-in for CUDA graphs repeats work on the same memory, and finds what a graph would silently do wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.tape import NotCapturable, ReplayDiffers, TapeCapture, TapedKernels

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


class Scaling:
    """Stands in for a module of kernels with one kernel, `scaled`, which fills `out`."""

    scaled: "Scaling"

    def __init__(self) -> None:
        self.scaled = self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: Tensor, out: Tensor, *, factor: int) -> None:
            out[: grid[0]] = x[: grid[0]] * factor

        return launch


def test_launches_of_kernels_are_repeated_as_they_were() -> None:
    """With the grid and the numbers of the capture, on what the buffer holds now."""
    buffer, kernels, numbers = torch.ones(4, 6), TapedKernels(Scaling()), {"grid": 4, "factor": 2}

    def scaled() -> Tensor:
        out = torch.empty_like(buffer)
        kernels.scaled[(numbers["grid"],)](buffer, out, factor=numbers["factor"])
        return out + 1.0

    graph, result = TapeCapture()(scaled)
    buffer.fill_(5.0)
    graph.replay()
    assert torch.equal(result, torch.full((4, 6), 11.0))
    for number in numbers:
        before, numbers[number] = numbers[number], 3
        with pytest.raises(ReplayDiffers, match="baked"):
            graph.replay()
        numbers[number] = before
    graph.replay()


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.ones(3) * torch.ones(3).sum().item(),
        lambda: torch.ones(3) * torch.ones(3).tolist()[0],
        lambda: torch.ones(3)[torch.ones(3).nonzero()],
        lambda: torch.ones(3) * torch.tensor([1.0, 2.0, 3.0]),
        lambda: torch.ones(3) * torch.from_numpy(np.ones(3)),
    ],
    ids=["reads a value", "reads a list", "a shape by values", "a tensor of numbers", "an array"],
)
def test_what_waits_for_the_device_is_refused(run: Callable[[], Tensor]) -> None:
    with pytest.raises(NotCapturable):
        TapeCapture()(run)
