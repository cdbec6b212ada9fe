"""Arrays that go to a device side by side in one buffer, and results that come back in one tensor."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from engine.device_copies import PackedCopies, Staging

CPU = torch.device("cpu")
ANY_ARRAY = st.one_of(
    *(
        arrays(dtype, st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), elements=st.integers(0, 2**20))
        for dtype in (np.int64, np.int32, np.float32, np.float64)
    )
)
STEPS = st.lists(st.dictionaries(st.sampled_from("abcdef"), ANY_ARRAY, max_size=6), min_size=1, max_size=4)


@given(STEPS)
def test_arrays_arrive_as_they_were_and_stay_for_one_more_call(steps: list[dict[str, NDArray[Any]]]) -> None:
    copies = PackedCopies(CPU)
    last: list[tuple[dict[str, NDArray[Any]], Any]] = []
    for step in steps:
        tensors = copies.to_device(step)
        last = [*last[-1:], ({name: array.copy() for name, array in step.items()}, tensors)]
        for array in step.values():
            array[:] = 7  # the host's arrays are free again
        for before, arrived in last:
            assert arrived.keys() == before.keys()
            for name, array in before.items():
                assert arrived[name].numpy().dtype == array.dtype
                np.testing.assert_array_equal(arrived[name].numpy(), array)


def test_arrays_that_are_too_long_for_the_buffer_get_a_larger_one() -> None:
    copies = PackedCopies(CPU)
    for num in (10, 100_000, 10, 1_000_000, 10):
        sent = np.arange(num, dtype=np.int64)
        small = np.arange(3, dtype=np.int32)
        tensors = copies.to_device({"sent": sent, "small": small})
        assert (tensors["sent"].numpy() == sent).all()
        assert (tensors["small"].numpy() == small).all()


def test_results_come_back_exactly() -> None:
    ids = torch.tensor([[2**53 - 1, 0], [5, 6]])
    values = torch.tensor([0.1, -3e38, float("nan"), float("-inf")])
    none = torch.empty((0, 3))
    back = PackedCopies(CPU).to_host([ids, values, none, values.sum()])
    assert [tensor.dtype for tensor in back] == [torch.int64, torch.float32, torch.float32, torch.float32]
    assert torch.equal(back[0], ids)
    assert torch.equal(back[1], values) or torch.equal(back[1].nan_to_num(1.0), values.nan_to_num(1.0))
    assert back[2].shape == (0, 3)
    assert back[3].shape == ()


def test_a_staging_never_moves() -> None:
    staging = Staging(64, CPU)
    before = (staging.host.ctypes.data, staging.device.data_ptr())
    staging.wait()
    staging.host[:] = 3
    staging.send(32)
    assert staging.device.tolist() == [3] * 32 + [0] * 32
    assert (staging.host.ctypes.data, staging.device.data_ptr()) == before


class FakeEvent:
    """As torch.cuda.Event; without a stream, `record` means that of the thread's current device."""

    def __init__(self) -> None:
        self.stream: object = None

    def record(self, stream: object = "of cuda:0") -> None:
        self.stream = stream


def test_a_worker_of_another_gpu_waits_for_its_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, event = Staging(64, CPU), FakeEvent()
    monkeypatch.setattr(staging, "_sent", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    staging.send(8)
    assert event.stream == "of cpu", "the stream of the memory that is copied to"
