"""AdapterSlots: what is in memory and who waits, so that no step ever sees a slot that changes under its sequences."""

import gc
import threading
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path

import pytest

from checkpoint.adapters import AdapterFiles
from engine.adapter_slots import AdapterSlots
from engine.sequence import SequenceState
from mesh.domain.errors import ConfigurationError, ModelFailed, WorkerBusy
from tests.defects import Repaired
from tests.fakes.requests import make_request

WAIT_S = 60.0


class Model:
    """Slots with the digests that were put into them."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [""] * num_slots
        self.reads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def put(self, slot: int, adapter: AdapterFiles) -> None:
        self.gate.wait(WAIT_S)
        self.slots[slot] = adapter.digest
        self.reads.append(adapter.digest)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of adapters whose files have changed."""
    changed: set[str] = set()

    def require(adapter: AdapterFiles) -> None:
        if adapter.name in changed:
            raise ConfigurationError(f"adapter {adapter.name} has changed")

    monkeypatch.setattr("engine.adapter_slots.require_unchanged", require)
    return changed


def slots_of(model: Model, names: str, max_wait_s: float = WAIT_S, kept_closed_s: float = 0.1) -> AdapterSlots:
    adapters = [AdapterFiles(name, Path(name), name, "", {}) for name in names]
    return AdapterSlots(adapters, len(model.slots), model.put, max_wait_s, kept_closed_s)


def sequence(adapter: str, request: str = "") -> SequenceState:
    return SequenceState(make_request(request or f"of-{adapter}", (1, 2), adapter=adapter))


def ready(future: "Future[None] | None") -> None:
    if future is not None:
        future.result(WAIT_S)


def waits(future: "Future[None] | None") -> bool:
    assert future is not None
    return bool(wait([future], timeout=0.1).not_done)


def test_the_first_adapters_are_read_at_the_start_and_others_when_they_are_needed() -> None:
    model = Model(2)
    slots = slots_of(model, "abcd")
    assert (model.slots, slots.slots) == (["a", "b"], {"a": 0, "b": 1})
    assert slots.prepare([sequence("b")]) is None
    assert slots.prepare([sequence("")]) is None
    assert slots.prepare([sequence("unknown")]) is None  # which the scheduler refuses
    ready(slots.prepare([sequence("c")]))
    assert (model.slots, slots.slots) == (["c", "b"], {"b": 1, "c": 0})  # "a" was used least recently
    assert slots.prepare([sequence("b")]) is None
    ready(slots.prepare([sequence("d")]))
    assert slots.slots == {"b": 1, "d": 0}


def test_an_adapter_stays_while_a_sequence_uses_it() -> None:
    model = Model(1)
    slots = slots_of(model, "ab")
    first, second = sequence("a", "r1"), sequence("a", "r2")
    assert slots.prepare([first]) is slots.prepare([second]) is None
    other = slots.prepare([sequence("b")])
    assert waits(other)
    slots.forget(first)
    assert waits(other)
    assert slots.slots == {"a": 0}
    del second  # ended without a word, as where its client left while it waited
    gc.collect()
    ready(other)
    assert slots.slots == {"b": 0}


def test_who_comes_for_an_adapter_that_must_leave_waits_behind() -> None:
    model = Model(1)
    slots = slots_of(model, "ab")
    first = sequence("a", "r1")
    slots.prepare([first])
    other = sequence("b")
    for_other, for_later = slots.prepare([other]), slots.prepare([sequence("a", "r2")])
    assert waits(for_other)
    slots.forget(first)
    ready(for_other)
    assert waits(for_later)
    slots.forget(other)
    ready(for_later)
    assert model.reads == ["a", "b", "a"]


def test_choices_of_one_request_begin_together() -> None:
    """If one of them held the adapter while another waited for it, none of them would end."""
    model = Model(1)
    slots = slots_of(model, "ab")
    first = sequence("a", "r1")
    slots.prepare([first])
    other, choices = sequence("b"), [sequence("a", f"r2-{number}") for number in range(3)]
    for_other, for_choices = slots.prepare([other]), slots.prepare(choices)
    slots.forget(first)
    ready(for_other)
    assert waits(for_choices)
    slots.forget(other)
    ready(for_choices)
    for_last = slots.prepare([sequence("b", "r3")])
    for choice in choices:
        assert waits(for_last)
        slots.forget(choice)
    ready(for_last)


def test_whichever_adapter_is_free_first_leaves() -> None:
    model = Model(2)
    slots = slots_of(model, "abc")
    long, short = sequence("a"), sequence("b")
    slots.prepare([long])
    slots.prepare([short])
    other = slots.prepare([sequence("c")])
    assert waits(other)
    slots.forget(short)
    ready(other)
    assert slots.slots == {"a": 0, "c": 1}
    assert slots.prepare([sequence("a", "later")]) is None


def test_nobody_waits_for_ever() -> None:
    model = Model(1)
    slots = slots_of(model, "ab", max_wait_s=0.2)
    first = sequence("a")
    slots.prepare([first])
    waiting = [slots.prepare([sequence("b", f"r{number}")]) for number in range(3)]
    for future in waiting:
        with pytest.raises(WorkerBusy, match="other requests use all adapters"):
            ready(future)
    ready(slots.prepare([sequence("a", "later")]))
    assert slots.prepare([sequence("a", "open again")]) is None


def test_steady_traffic_for_one_adapter_keeps_no_other_out(repaired: Repaired) -> None:
    """Sequences of the one overlap, so there is always one; the other's request gives up, and comes again."""
    model = Model(1)
    slots = slots_of(model, "ab", max_wait_s=0.2, kept_closed_s=WAIT_S)
    first = sequence("a", "r1")
    slots.prepare([first])
    with pytest.raises(WorkerBusy):
        ready(slots.prepare([sequence("b")]))
    second = sequence("a", "r2")
    for_second = slots.prepare([second])
    assert waits(for_second), "the adapter is still to leave"
    slots.forget(first)
    replay = sequence("b", "again")
    for_replay = slots.prepare([replay])
    ready(for_replay)
    slots.forget(replay)
    for_third = slots.prepare([sequence("a", "r3")])
    ready(for_third)
    assert model.reads == ["a", "b", "a"]
    repaired("D41", "the adapter stays closed until the replay comes: served as soon as what runs has ended")


def test_a_cancelled_request_closes_no_adapter(repaired: Repaired) -> None:
    slots = slots_of(Model(1), "ab", kept_closed_s=WAIT_S)
    first = sequence("a", "r1")
    slots.prepare([first])
    other = slots.prepare([sequence("b")])
    assert other is not None
    second, third = slots.prepare([sequence("a", "r2")]), slots.prepare([sequence("b", "another")])
    assert waits(second)
    assert other.cancel()
    assert waits(second), "another request needs the slot, too"
    assert third is not None
    assert third.cancel()
    ready(second)
    assert slots.prepare([sequence("a", "r4")]) is None
    assert slots.slots == {"a": 0}
    repaired("D42", "once the request is cancelled, the others go on")


def test_who_waits_for_an_adapter_that_may_stay_goes_on_while_another_is_read() -> None:
    model = Model(2)
    slots = slots_of(model, "abc", kept_closed_s=WAIT_S)
    long, short = sequence("a"), sequence("b")
    slots.prepare([long])
    slots.prepare([short])
    other, later = slots.prepare([sequence("c")]), slots.prepare([sequence("a", "later")])
    assert waits(later), "the adapter is to leave"
    model.gate.clear()
    slots.forget(short)
    ready(later)
    assert waits(other)
    model.gate.set()
    ready(other)
    assert slots.slots == {"a": 0, "c": 1}


def test_requests_for_one_adapter_read_it_once() -> None:
    model = Model(1)
    slots = slots_of(model, "ab")
    model.gate.clear()
    futures = [slots.prepare([sequence("b", f"r{number}")]) for number in range(5)]
    model.gate.set()
    for future in futures:
        ready(future)
    assert model.reads == ["a", "b"]


def test_an_adapter_that_cannot_be_read_fails_its_requests_and_throws_none_out(unchanged: set[str]) -> None:
    model = Model(1)
    slots = slots_of(model, "ab")
    unchanged.add("b")
    with pytest.raises(ModelFailed, match="adapter b has changed"):
        ready(slots.prepare([sequence("b")]))
    assert slots.slots == {"a": 0}
    assert slots.prepare([sequence("a")]) is None


def test_an_adapter_that_changes_while_its_request_waits_is_not_used(unchanged: set[str], repaired: Repaired) -> None:
    model = Model(1)
    slots = slots_of(model, "ab")
    first = sequence("a")
    slots.prepare([first])
    other = slots.prepare([sequence("b")])
    assert waits(other)
    unchanged.add("b")
    slots.forget(first)
    with pytest.raises(ModelFailed, match="adapter b has changed"):
        ready(other)
    assert slots.slots == {}
    ready(slots.prepare([sequence("a")]))
    assert slots.slots == {"a": 0}, "its slot is free"
    repaired("D40", "its requests fail, and the log says why")


def test_an_adapter_that_changes_before_the_start_is_over_is_refused(unchanged: set[str]) -> None:
    unchanged.add("a")
    with pytest.raises(ConfigurationError, match="adapter a has changed"):
        slots_of(Model(1), "ab")


def test_closing_cancels_what_waits() -> None:
    slots = slots_of(Model(1), "ab", max_wait_s=0.2)
    first = sequence("a")
    slots.prepare([first])
    waiting = [slots.prepare([sequence("b", f"r{number}")]) for number in range(2)]
    slots.close()
    for future in waiting:
        with pytest.raises(CancelledError):
            ready(future)
