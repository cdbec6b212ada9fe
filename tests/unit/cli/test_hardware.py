"""Which cores and GPUs services get, and how many GPUs a process sees."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.host import Cores
from tandem_cli.local_mesh.hardware import CoreAssignment, assign_cores, assign_gpus, num_gpus


@pytest.mark.parametrize(
    ("available", "num_prefill", "num_decode", "cores"),
    [
        ([0, 1], 1, 1, CoreAssignment(((0,),), ((1,),))),
        ([0, 1], 0, 1, CoreAssignment((), ((0, 1),))),
        ([4, 5, 6], 1, 1, CoreAssignment(((4, 5),), ((6,),), router=(4, 5))),
        ([0, 1, 2, 3], 1, 2, CoreAssignment(((0, 1),), ((2,), (3,)), router=(0, 1))),
        ([0, 1, 2, 3], 0, 1, CoreAssignment((), ((1, 2, 3),), router=(0,))),
        ([0, 1], 1, 2, CoreAssignment(((0,),), ((1,), (0,)))),
        ([3], 1, 1, CoreAssignment(((3,),), ((3,),))),
    ],
)
def test_assignments(available: list[int], num_prefill: int, num_decode: int, cores: CoreAssignment) -> None:
    assert assign_cores(available, num_prefill=num_prefill, num_decode=num_decode) == cores


@pytest.mark.parametrize(
    ("num_cores", "num_prefill", "ranks", "prefill", "decode"),
    [
        (3, 1, [1, 2], [(0,)], [(1, 2)]),
        (6, 1, [2, 1], [(0, 1, 2, 3)], [(4, 5)]),
        (8, 1, [2, 2], [(0, 1, 2, 3)], [(4, 5, 6, 7)]),
        (5, 1, [1, 2], [(0, 1)], [(2, 3)]),  # no rank has more cores than another rank of its worker
        (5, 0, [2, 2], [], [(1, 2), (3, 4)]),
        (2, 0, [2], [], [(0, 1)]),
        (2, 1, [2, 2], [(0, 1)], [(0, 1)]),
        (3, 1, [2, 2], [(0, 1)], [(0, 2)]),
        (1, 1, [1, 4], [(0,)], [(0,)]),
    ],
)
def test_a_worker_of_several_ranks_has_cores_for_each(
    num_cores: int, num_prefill: int, ranks: list[int], prefill: list[Cores], decode: list[Cores]
) -> None:
    cores = assign_cores(range(num_cores), num_prefill=num_prefill, num_decode=len(ranks) - num_prefill, ranks=ranks)
    assert (list(cores.prefill), list(cores.decode)) == (prefill, decode)


@given(st.integers(1, 64), st.lists(st.integers(1, 4), max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_have_as_many_cores_as_other_ranks_or_one_more(
    num_cores: int, prefill: list[int], decode: list[int]
) -> None:
    ranks = [*prefill, *decode]
    cores = assign_cores(range(num_cores), num_prefill=len(prefill), num_decode=len(decode), ranks=ranks)
    shares = [*cores.prefill, *cores.decode]
    assert all(shares)
    assert all(core in range(num_cores) for share in shares for core in share)
    if num_cores >= sum(ranks):
        assert cores.is_exclusive
        per_rank = [divmod(len(share), num_ranks) for share, num_ranks in zip(shares, ranks, strict=True)]
        assert {unused for _, unused in per_rank} == {0}
        assert max(cores for cores, _ in per_rank) - min(cores for cores, _ in per_rank) <= 1
    else:
        assert [len(share) for share in shares] == [min(num_ranks, num_cores) for num_ranks in ranks]


def test_workers_of_several_ranks_neither_lend_nor_borrow() -> None:
    cores = assign_cores(range(8), num_prefill=2, num_decode=2, ranks=[1, 1, 2, 1])
    assert [cores.lent_to(role, 0) for role in ("prefill", "decode")] == [(), ()]
    assert [cores.lent_to(role, 1) for role in ("prefill", "decode")] == [cores.decode[1], cores.prefill[1]]
    first, second = cores.split([(1, 1), (1, 1)])
    assert (first.lent_to("prefill", 0), second.lent_to("prefill", 0)) == ((), cores.decode[1])
    assert "decode-0 on 4,5 (2 ranks)" in cores.describe()
    assert "lend" not in first.describe()


def test_a_worker_takes_no_more_than_it_may() -> None:
    cores = assign_cores(range(8), num_prefill=1, num_decode=1, max_per_worker=2)
    assert cores == CoreAssignment(((0, 1),), ((4, 5),), router=(0, 1, 2, 3, 6, 7))


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 8))
def test_every_worker_has_cores_and_shares_only_if_it_must(num_cores: int, num_prefill: int, num_decode: int) -> None:
    cores = assign_cores(range(num_cores), num_prefill=num_prefill, num_decode=num_decode)
    shares = [*cores.prefill, *cores.decode]
    assert len(shares) == num_prefill + num_decode
    assert all(shares)
    assert cores.is_exclusive == (num_cores >= len(shares))
    if num_prefill and num_cores >= len(shares):
        assert sorted(core for share in shares for core in share) == list(range(num_cores))


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 8))
def test_the_router_stays_off_decode_cores_if_it_can(num_cores: int, num_prefill: int, num_decode: int) -> None:
    cores = assign_cores(range(num_cores), num_prefill=num_prefill, num_decode=num_decode)
    assert not {core for share in cores.decode for core in share} & set(cores.router)
    if num_cores > num_prefill + num_decode and (num_prefill or num_cores >= 4):
        assert cores.router


def test_partners_lend_each_other_their_cores_unless_they_share_them() -> None:
    cores = assign_cores(range(4), num_prefill=1, num_decode=2)
    assert (cores.lent_to("prefill", 0), cores.lent_to("decode", 0), cores.lent_to("decode", 1)) == ((2,), (0, 1), ())
    assert assign_cores([0], num_prefill=1, num_decode=1).lent_to("decode", 0) == ()


def test_decode_workers_alone_are_partners_two_by_two() -> None:
    cores = assign_cores(range(3), num_prefill=0, num_decode=3)
    assert [cores.lent_to("decode", number) for number in range(3)] == [(1,), (0,), ()]
    assert "partners lend their cores" in cores.describe()
    cores = assign_cores(range(3), num_prefill=0, num_decode=2, ranks=[2, 1])
    assert [cores.lent_to("decode", number) for number in range(2)] == [(), ()]
    assert "lend" not in assign_cores(range(3), num_prefill=0, num_decode=1).describe()


def test_who_runs_where_is_said_in_a_line() -> None:
    assert assign_cores([0, 1], num_prefill=1, num_decode=1).describe() == (
        "cores: prefill-0 on 0, decode-0 on 1 "
        "(so prefill does not delay decode; partners lend their cores while idle); router on any"
    )
    assert assign_cores([0, 1], num_prefill=0, num_decode=1).describe() == "cores: decode-0 on 0,1; router on any"
    assert "fewer cores than workers" in assign_cores([0], num_prefill=1, num_decode=1).describe()


@pytest.mark.parametrize(
    ("workers", "gpus", "chosen"),
    [
        ({"prefill-0": ("cuda", 1), "decode-0": ("cuda", 1)}, 2, {"prefill-0": "cuda:0", "decode-0": "cuda:1"}),
        ({"a": ("cuda", 1), "b": ("cuda", 1), "c": ("cuda", 1)}, 2, {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0"}),
        ({"a": ("cuda", 1), "b": ("cuda", 1)}, 1, {"a": "cuda:0", "b": "cuda:0"}),
        ({"a": ("cuda", 2), "b": ("cuda", 2)}, 4, {"a": "cuda:0", "b": "cuda:2"}),
        ({"a": ("cuda", 1), "b": ("cuda", 2)}, 2, {"a": "cuda:0", "b": "cuda:0"}),  # ranks lie side by side
        ({"a": ("cuda", 4), "b": ("cuda", 1)}, 2, {"b": "cuda:0"}),  # the first is refused by itself
        ({"a": ("cuda:1", 1), "b": ("auto", 1), "c": ("cpu", 2), "d": ("cuda:0,cuda:1", 2)}, 2, {}),
        ({"a": ("cuda", 1)}, 0, {}),
    ],
)
def test_workers_take_gpus_in_turn(workers: dict[str, tuple[str, int]], gpus: int, chosen: dict[str, str]) -> None:
    assert assign_gpus(workers, gpus) == chosen


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("0", 1), ("2, 0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-5a,MIG-7b", 2)],
)
def test_gpus_that_cuda_shows(tmp_path: Path, visible: str | None, count: int) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / address).mkdir()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environ, tmp_path) == count
    assert num_gpus({}, tmp_path / "none") == 0
