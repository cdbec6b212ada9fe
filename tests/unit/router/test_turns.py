"""Turns: FIFO for one tenant, one after another for several."""

from hypothesis import given
from hypothesis import strategies as st

from router.turns import Turns


def drain(turns: Turns[str]) -> list[str]:
    return [turns.take_first() for _ in range(len(turns))]


def test_one_tenant_is_first_come_first_served() -> None:
    turns = Turns[str]()
    for item in "abc":
        turns.add("", item)
    turns.add_first("replay")
    assert drain(turns) == ["replay", "a", "b", "c"]


def test_tenants_take_turns() -> None:
    turns = Turns[str]()
    for number in range(4):
        turns.add("greedy", f"g{number}")
    turns.add("modest", "m0")
    turns.add("third", "t0")
    assert turns.first() == "g0"
    assert drain(turns) == ["g0", "m0", "t0", "g1", "g2", "g3"]


@given(st.lists(st.tuples(st.sampled_from(["add", "urgent", "take", "remove"]), st.integers(0, 3))))
def test_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    turns, waiting = Turns[tuple[int, int]](), dict[tuple[int, int], int]()
    for number, (step, tenant) in enumerate(steps):
        item = (tenant, number)
        if step == "add":
            turns.add(str(tenant), item)
            waiting[item] = 0
        elif step == "urgent":
            turns.add_first(item)
            waiting[item] = 0
        elif step == "remove":
            target = min(waiting, default=item)
            assert turns.remove(target) == (target in waiting)
            waiting.pop(target, None)
        elif waiting:
            first = turns.first()
            assert turns.take_first() == first
            assert waiting.pop(first) is not None
        assert len(turns) == len(waiting)
    assert {turns.take_first() for _ in range(len(turns))} == waiting.keys()
