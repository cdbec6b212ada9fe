"""Turns: FIFO for one tenant, one after another for several, higher classes first, nobody starved, nothing lost."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.tenants import Priority
from router.turns import LOWER_TURN, Lane, Turns

BATCH, STANDARD, INTERACTIVE = Priority
TENANTS = ("a", "b", "c")
lanes = st.builds(Lane, st.sampled_from(TENANTS), st.sampled_from(Priority))
Item = tuple[Lane, int]


def filled(*groups: tuple[str, Priority, Sequence[str]]) -> Turns[str]:
    turns = Turns[str]()
    for tenant, priority, items in groups:
        for item in items:
            turns.add(Lane(tenant, priority), item)
    return turns


def drain(turns: Turns[str]) -> list[str]:
    return [turns.take_first() for _ in range(len(turns))]


def joined(waiting: Sequence[Lane]) -> Turns[Item]:
    turns = Turns[Item]()
    for number, lane in enumerate(waiting):
        turns.add(lane, (lane, number))
    return turns


def test_one_tenant_is_first_come_first_served() -> None:
    turns = filled(("", STANDARD, "abc"))
    turns.add_first("replay")
    assert drain(turns) == ["replay", "a", "b", "c"]


def test_tenants_take_turns() -> None:
    turns = filled(("greedy", STANDARD, ["g0", "g1", "g2", "g3"]), ("modest", STANDARD, ["m0"]), ("3", STANDARD, ["t"]))
    assert turns.first() == "g0"
    assert drain(turns) == ["g0", "m0", "t", "g1", "g2", "g3"]


def test_higher_classes_go_first_and_every_eighth_turn_is_for_lower_ones() -> None:
    turns = filled(("a", BATCH, "xy"), ("a", STANDARD, "s"), ("b", INTERACTIVE, "0123456789abcdefghij"))
    assert "".join(drain(turns)) == "0123456x789abcdyefghijs"  # x waits longest, then y, then s


@given(st.lists(st.tuples(st.sampled_from(["add", "urgent", "take", "remove"]), lanes)))
def test_nothing_is_lost(steps: list[tuple[str, Lane]]) -> None:
    turns, waiting = Turns[Item](), dict[Item, None]()
    for number, (step, lane) in enumerate(steps):
        item = (lane, number)
        if step == "add":
            turns.add(lane, item)
            waiting[item] = None
        elif step == "urgent":
            turns.add_first(item)
            waiting[item] = None
        elif step == "remove":
            target = next(iter(waiting), item)
            assert turns.remove(target) == (target in waiting)
            waiting.pop(target, None)
        elif waiting:
            first = turns.first()
            assert turns.take_first() == first
            del waiting[first]
        assert len(turns) == len(waiting)
    assert {turns.take_first() for _ in range(len(turns))} == waiting.keys()


@settings(deadline=None)
@given(st.lists(lanes, min_size=1), st.lists(st.sampled_from(TENANTS), min_size=1))
def test_whoever_waits_is_served_however_many_of_higher_classes_join(waiting: list[Lane], joining: list[str]) -> None:
    turns, left = joined(waiting), dict.fromkeys(zip(waiting, range(len(waiting)), strict=True))
    most = LOWER_TURN * len(waiting)
    for number in range(len(waiting), len(waiting) + most):
        lane = Lane(joining[number % len(joining)], INTERACTIVE)
        turns.add(lane, (lane, number))
        left.pop(turns.take_first(), None)
    assert not {item for item in left if item[0].priority is not INTERACTIVE}


@given(st.lists(lanes, min_size=1))
def test_a_higher_class_has_seven_turns_in_eight(waiting: list[Lane]) -> None:
    turns, present = joined(waiting), [lane.priority for lane in waiting]
    num_lower_in_a_row, num_higher = 0, LOWER_TURN
    while present:
        (lane, _), highest = turns.take_first(), max(present)
        present.remove(lane.priority)
        if lane.priority is highest:
            num_higher += 1
            num_lower_in_a_row = 0
        else:
            num_lower_in_a_row += 1
            assert num_lower_in_a_row == 1
            assert num_higher >= LOWER_TURN - 1
            num_higher = 0


@given(st.lists(lanes, min_size=1))
def test_within_a_class_no_tenant_has_two_turns_while_another_waits(waiting: list[Lane]) -> None:
    turns = joined(waiting)
    left = {lane: waiting.count(lane) for lane in waiting}
    last: dict[Priority, list[str]] = {priority: [] for priority in Priority}
    while len(turns):
        lane, _ = turns.take_first()
        left[lane] -= 1
        served = last[lane.priority]
        if lane.tenant in served:  # everybody else who still waits has had a turn since
            since = served[served.index(lane.tenant) + 1 :]
            others = {other.tenant for other in left if other.priority is lane.priority and left[other]}
            assert others - {lane.tenant} <= set(since)
            served.remove(lane.tenant)
        served.append(lane.tenant)


@given(st.lists(lanes), lanes)
def test_who_is_ahead(waiting: list[Lane], lane: Lane) -> None:
    """Right up to each other tenant's place in the round, and up to one turn of a lower class."""
    turns = joined(waiting)
    ahead = list(turns.ahead_of(lane))
    assert len(set(ahead)) == len(ahead)
    newcomer = (lane, len(waiting))
    turns.add(lane, newcomer)
    actual = 0
    while turns.take_first() != newcomer:
        actual += 1
    assert abs(len(ahead) - actual) <= len(TENANTS) + 1
