"""Which device each rank takes, as settings name them, and what is refused. Torch is told how many GPUs there are."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from engine.attention.backend import one_token
from engine.devices import first_device, num_devices, rank_devices
from engine.ranks.collectives import LOOPBACK, Place, _metadata_on, require_backend, summing
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)


@pytest.mark.parametrize(
    ("names", "degrees", "devices"),
    [
        ("cpu", Degrees(3), ("cpu",) * 3),
        ("cuda", Degrees(2), ("cuda:0", "cuda:1")),
        ("auto", Degrees(2, 2), ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:2", Degrees(2), ("cuda:2", "cuda:3")),
        ("cuda:3, cuda:0", Degrees(1, 2), ("cuda:3", "cuda:0")),
    ],
)
def test_each_rank_has_its_device(names: str, degrees: Degrees, devices: tuple[str, ...]) -> None:
    assert rank_devices(names, degrees) == devices
    if "," in names:
        assert first_device(names) == devices[0]


@pytest.mark.parametrize(
    ("names", "degrees", "error"),
    [
        ("cuda", Degrees(8), "tensor_parallel 8 needs 8 GPUs, one for each rank: there are 4, so use degrees whose"),
        ("cuda:2", Degrees(2, 2), "2 with pipeline_parallel 2 needs 4 GPUs, .*there are 2, so .* product is 2 or less"),
        ("cuda:3", Degrees(2), "tensor_parallel 2 needs 2 GPUs, one for each rank: there is one, so use 1"),
        ("cuda:4", Degrees(2), "there is none there"),
        ("cuda:0,cuda:0", Degrees(2), "device cuda:0,cuda:0 does not name one GPU for each of 2 ranks"),
        ("cuda:0,cuda:1", Degrees(3), "does not name one GPU for each of 3 ranks"),
        ("cuda:0,cpu", Degrees(2), "does not name one GPU"),
        ("gpu7", Degrees(2), "device 'gpu7' is not known"),
    ],
)
def test_too_few_devices_are_named_with_the_degrees_that_can_be(names: str, degrees: Degrees, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        rank_devices(names, degrees)


def test_devices_are_counted_from_the_first_that_is_named() -> None:
    assert [num_devices(names) for names in ("cpu", "cuda", "auto", "cuda:1", "cuda:0,cuda:3")] == [0, 4, 4, 3, 2]


def test_ranks_on_devices_that_nothing_connects_are_refused() -> None:
    require_backend(torch.device("cuda:1"))
    with pytest.raises(ConfigurationError, match="ranks on meta cannot be connected: use cpu or cuda, or one rank"):
        require_backend(torch.device("meta"))


class FakeNccl:
    """Stands in for torch's ProcessGroupNCCL, which torch for CPUs lacks."""

    class Options:
        _timeout: object = None

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        assert options._timeout is not None
        self.place = (rank, size)
        self.device: torch.device | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device


@pytest.mark.parametrize(("host", "interface"), [(LOOPBACK, "lo"), ("10.0.0.1", None)])
def test_gpus_are_connected_by_nccl(host: str, interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine it listens on loopback only."""
    environ: dict[str, str] = {}
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr("engine.ranks.collectives.os.environ", environ)
    group = summing(distributed.HashStore(), Place(3, Degrees(2, 2), torch.device("cuda:3"), host))
    assert isinstance(group, FakeNccl)
    assert (group.place, group.device) == ((1, 2), torch.device("cuda:3"))
    assert environ.get("NCCL_SOCKET_IFNAME") == interface


def test_all_of_a_step_goes_to_the_ranks_device() -> None:
    step = one_token()
    moved = _metadata_on(torch.device("meta"), step)
    tensors = [value for f in fields(moved) if isinstance(value := getattr(moved, f.name), torch.Tensor)]
    assert len(tensors) == 7
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved.num_decodes, moved.chunks) == (step.num_decodes, step.chunks)
    assert _metadata_on(torch.device("cpu"), step) is step


@given(st.integers(1, 6), st.integers(1, 6))
def test_residuals_go_through_all_stages_and_back_to_the_leader(tensor: int, pipeline: int) -> None:
    degrees = Degrees(tensor, pipeline)
    places = [Place(rank, degrees, torch.device("cpu"), LOOPBACK) for rank in range(degrees.num_ranks)]
    hops = {(place.rank, place.sends_to) for place in places if place.sends_to is not None}
    assert hops == {(place.takes_from, place.rank) for place in places if place.takes_from is not None}
    assert len(hops) == (tensor * (pipeline - 1) + 1 if pipeline > 1 else 0)
    rank, stages = 0, []
    while pipeline > 1 and len(stages) < pipeline:
        stages.append(places[rank].stage)
        target = places[rank].sends_to
        assert target is not None
        rank = target
    assert stages == (list(range(pipeline)) if pipeline > 1 else [])
    assert rank == 0
