"""Which cores workers get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_cli.cores import CorePlan, assign_cores


@pytest.mark.parametrize(
    ("available", "num_prefill", "num_decode", "plan"),
    [
        ([0, 1], 1, 1, CorePlan(((0,),), ((1,),))),
        ([0, 1], 0, 1, CorePlan((), ((0, 1),))),
        ([4, 5, 6], 1, 1, CorePlan(((4, 5),), ((6,),), router=(4, 5))),
        ([0, 1, 2, 3], 1, 2, CorePlan(((0, 1),), ((2,), (3,)), router=(0, 1))),
        ([0, 1, 2, 3], 0, 1, CorePlan((), ((1, 2, 3),), router=(0,))),
        ([0, 1], 1, 2, CorePlan(((0,),), ((1,), (0,)))),
        ([3], 1, 1, CorePlan(((3,),), ((3,),))),
    ],
)
def test_plans(available: list[int], num_prefill: int, num_decode: int, plan: CorePlan) -> None:
    assert assign_cores(available, num_prefill=num_prefill, num_decode=num_decode) == plan


def test_a_worker_takes_no_more_than_it_may() -> None:
    plan = assign_cores(range(8), num_prefill=1, num_decode=1, max_per_worker=2)
    assert plan == CorePlan(((0, 1),), ((4, 5),), router=(0, 1, 2, 3, 6, 7))


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 8))
def test_every_worker_has_cores_and_shares_only_if_it_must(num_cores: int, num_prefill: int, num_decode: int) -> None:
    plan = assign_cores(range(num_cores), num_prefill=num_prefill, num_decode=num_decode)
    shares = [*plan.prefill, *plan.decode]
    assert len(shares) == num_prefill + num_decode
    assert all(shares)
    assert plan.is_exclusive == (num_cores >= len(shares))
    if num_prefill and num_cores >= len(shares):
        assert sorted(core for share in shares for core in share) == list(range(num_cores))


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 8))
def test_the_router_stays_off_decode_cores_if_it_can(num_cores: int, num_prefill: int, num_decode: int) -> None:
    plan = assign_cores(range(num_cores), num_prefill=num_prefill, num_decode=num_decode)
    assert not {core for share in plan.decode for core in share} & set(plan.router)
    if num_cores > num_prefill + num_decode and (num_prefill or num_cores >= 4):
        assert plan.router


def test_partners_lend_each_other_their_cores_unless_they_share_them() -> None:
    plan = assign_cores(range(4), num_prefill=1, num_decode=2)
    assert (plan.lent_to("prefill", 0), plan.lent_to("decode", 0), plan.lent_to("decode", 1)) == ((2,), (0, 1), ())
    assert assign_cores([0], num_prefill=1, num_decode=1).lent_to("decode", 0) == ()


def test_who_runs_where_is_said_in_a_line() -> None:
    assert assign_cores([0, 1], num_prefill=1, num_decode=1).describe() == (
        "cores: prefill-0 on 0, decode-0 on 1 "
        "(so prefill does not delay decode; partners lend their cores while idle); router on any"
    )
    assert "fewer cores than workers" in assign_cores([0], num_prefill=1, num_decode=1).describe()
