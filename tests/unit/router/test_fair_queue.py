"""FairQueue: FIFO for one tenant, one after another for several, higher classes first, nobody starved, nothing lost."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_queue import LOW_PRIORITY_INTERVAL, FairQueue, QueueEntry
from router.tenants import Priority

BATCH, STANDARD, INTERACTIVE = Priority
TENANTS = ("a", "b", "c")
entries = st.builds(QueueEntry, st.sampled_from(TENANTS), st.sampled_from(Priority))
Item = tuple[QueueEntry, int]


def filled(*groups: tuple[str, Priority, Sequence[str]]) -> FairQueue[str]:
    queue = FairQueue[str]()
    for tenant, priority, items in groups:
        for item in items:
            queue.add(QueueEntry(tenant, priority), item)
    return queue


def drain(queue: FairQueue[str]) -> list[str]:
    return [queue.take_first() for _ in range(len(queue))]


def joined(waiting: Sequence[QueueEntry]) -> FairQueue[Item]:
    queue = FairQueue[Item]()
    for number, entry in enumerate(waiting):
        queue.add(entry, (entry, number))
    return queue


def test_one_tenant_is_first_come_first_served() -> None:
    queue = filled(("", STANDARD, "abc"))
    queue.add_replay("replay")
    queue.add_replay("later replay")
    assert drain(queue) == ["replay", "later replay", "a", "b", "c"]


def test_tenants_take_turns() -> None:
    queue = filled(("greedy", STANDARD, ["g0", "g1", "g2", "g3"]), ("modest", STANDARD, ["m0"]), ("3", STANDARD, ["t"]))
    assert queue.first() == "g0"
    assert drain(queue) == ["g0", "m0", "t", "g1", "g2", "g3"]


def test_higher_classes_go_first_and_every_eighth_turn_is_for_lower_ones() -> None:
    queue = filled(("a", BATCH, "xy"), ("a", STANDARD, "s"), ("b", INTERACTIVE, "0123456789abcdefghij"))
    assert "".join(drain(queue)) == "0123456x789abcdyefghijs"  # x waits longest, then y, then s


def test_items_that_pass_the_head_leave_every_eighth_turn_to_lower_classes() -> None:
    queue = filled(("a", BATCH, "xy"), ("a", STANDARD, "s"), ("b", INTERACTIVE, "L0123456789abcdefghij"))
    passed = ""
    while (item := queue.first_where(lambda item: item != "L")) is not None:
        queue.take(item)
        passed += item
        assert queue.first() == "L"
    assert passed == "0123456x789abcdyefghijs"


@given(st.lists(st.tuples(st.sampled_from(["add", "urgent", "take", "remove"]), entries)))
def test_nothing_is_lost(steps: list[tuple[str, QueueEntry]]) -> None:
    queue, waiting = FairQueue[Item](), dict[Item, None]()
    for number, (step, entry) in enumerate(steps):
        item = (entry, number)
        if step == "add":
            queue.add(entry, item)
            waiting[item] = None
        elif step == "urgent":
            queue.add_replay(item)
            waiting[item] = None
        elif step == "remove":
            target = next(iter(waiting), item)
            assert queue.remove(target) == (target in waiting)
            waiting.pop(target, None)
        elif waiting:
            first = queue.first()
            assert queue.take_first() == first
            del waiting[first]
        assert len(queue) == len(waiting)
    assert {queue.take_first() for _ in range(len(queue))} == waiting.keys()


@given(st.lists(entries, min_size=1), st.lists(st.sampled_from(TENANTS), min_size=1))
def test_whoever_waits_is_served_however_many_of_higher_classes_join(
    waiting: list[QueueEntry], joining: list[str]
) -> None:
    queue, left = joined(waiting), dict.fromkeys(zip(waiting, range(len(waiting)), strict=True))
    most = LOW_PRIORITY_INTERVAL * len(waiting)
    for number in range(len(waiting), len(waiting) + most):
        entry = QueueEntry(joining[number % len(joining)], INTERACTIVE)
        queue.add(entry, (entry, number))
        left.pop(queue.take_first(), None)
    assert not {item for item in left if item[0].priority is not INTERACTIVE}


@given(st.lists(entries, min_size=1))
def test_a_higher_class_has_seven_turns_in_eight(waiting: list[QueueEntry]) -> None:
    queue, present = joined(waiting), [entry.priority for entry in waiting]
    num_lower_in_a_row, num_higher = 0, LOW_PRIORITY_INTERVAL
    while present:
        (entry, _), highest = queue.take_first(), max(present)
        present.remove(entry.priority)
        if entry.priority is highest:
            num_higher += 1
            num_lower_in_a_row = 0
        else:
            num_lower_in_a_row += 1
            assert num_lower_in_a_row == 1
            assert num_higher >= LOW_PRIORITY_INTERVAL - 1
            num_higher = 0


@given(st.lists(entries, min_size=1))
def test_within_a_class_no_tenant_has_two_turns_while_another_waits(waiting: list[QueueEntry]) -> None:
    queue = joined(waiting)
    left = {entry: waiting.count(entry) for entry in waiting}
    last: dict[Priority, list[str]] = {priority: [] for priority in Priority}
    while len(queue):
        entry, _ = queue.take_first()
        left[entry] -= 1
        served = last[entry.priority]
        if entry.tenant in served:  # everybody else who still waits has had a turn since
            since = served[served.index(entry.tenant) + 1 :]
            others = {other.tenant for other in left if other.priority is entry.priority and left[other]}
            assert others - {entry.tenant} <= set(since)
            served.remove(entry.tenant)
        served.append(entry.tenant)


@given(st.lists(entries), entries)
def test_who_is_ahead(waiting: list[QueueEntry], entry: QueueEntry) -> None:
    """Right up to each other tenant's place in the round, and up to one turn of a lower class."""
    queue = joined(waiting)
    ahead = list(queue.ahead_of(entry))
    assert len(set(ahead)) == len(ahead)
    newcomer = (entry, len(waiting))
    queue.add(entry, newcomer)
    actual = 0
    while queue.take_first() != newcomer:
        actual += 1
    assert abs(len(ahead) - actual) <= len(TENANTS) + 1
