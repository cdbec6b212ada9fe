"""Who is in the mesh: joining, silence, restarts, and following caches through gaps."""

from dataclasses import replace

import pytest

from mesh.domain.errors import LayoutMismatch
from mesh.domain.kv import KVLayout
from mesh.domain.worker import Adapter, CacheEvent, WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from router.workers.coordination import TwinWatch
from router.workers.membership import Membership

INFO = WorkerInfo(
    worker_id="decode-0",
    incarnation="one",
    role=WorkerRole.DECODE,
    address="h:1",
    model="m",
    tokenizer_fingerprint="t",
    layout=KVLayout("fp", 2, 4, 8, 16, "float32"),
    max_batch_tokens=256,
    max_num_seqs=8,
    num_blocks=10,
    max_model_len=100,
    adapters=(Adapter("mine", "1"),),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def membership(clock: Clock) -> Membership:
    membership = Membership(clock)
    membership.join(INFO)
    return membership


def state(membership: Membership) -> WorkerState:
    view = membership.find("decode-0")
    assert view is not None
    return view.state


def test_silent_worker_is_lost_then_forgotten_and_a_beat_brings_it_back(membership: Membership, clock: Clock) -> None:
    clock.now = 6
    membership.expire(silent_s=5, forget_s=60)
    assert state(membership) is WorkerState.LOST
    membership.heartbeat(INFO, WorkerLoad(), WorkerState.READY)
    assert state(membership) is WorkerState.READY
    clock.now = 100
    membership.expire(silent_s=5, forget_s=60)
    assert membership.views() == []


def test_workers_are_listed_by_role_and_id_whenever_they_join(membership: Membership) -> None:
    for role, name in ((WorkerRole.PREFILL, "b"), (WorkerRole.DECODE, "z"), (WorkerRole.PREFILL, "a")):
        membership.join(replace(INFO, worker_id=name, incarnation=f"run of {name}", role=role))
    assert [view.info.worker_id for view in membership.views()] == ["decode-0", "z", "a", "b"]
    membership.join(replace(INFO, worker_id="z", incarnation="next run", role=WorkerRole.PREFILL))
    assert [view.info.worker_id for view in membership.views()] == ["decode-0", "a", "b", "z"]


@pytest.mark.parametrize("farewell", [WorkerState.STOPPED, WorkerState.SWITCHING])
def test_a_worker_that_has_said_farewell_is_not_lost(
    membership: Membership, clock: Clock, farewell: WorkerState
) -> None:
    changes: list[WorkerState] = []
    membership.on_change(lambda view: changes.append(view.state))
    clock.now = 2
    membership.leave(INFO, farewell)
    membership.lose(INFO)
    clock.now = 60
    membership.expire(silent_s=5, forget_s=300)
    assert changes == [farewell]
    clock.now = 63
    membership.expire(silent_s=5, forget_s=300)
    assert state(membership) is (WorkerState.STOPPED if farewell is WorkerState.STOPPED else WorkerState.LOST)
    clock.now = 303
    membership.expire(silent_s=5, forget_s=300)
    assert membership.views() == []


def test_a_lost_worker_must_still_fit_when_it_comes_back(membership: Membership) -> None:
    membership.lose(INFO)
    other = replace(INFO, worker_id="decode-1", incarnation="other", layout=replace(INFO.layout, model_fingerprint="x"))
    membership.join(other)
    with pytest.raises(LayoutMismatch):
        membership.heartbeat(INFO, WorkerLoad(), WorkerState.READY)
    assert state(membership) is WorkerState.LOST
    membership.lose(other)
    membership.heartbeat(INFO, WorkerLoad(), WorkerState.READY)
    assert state(membership) is WorkerState.READY


def test_former_self_is_ignored(membership: Membership) -> None:
    membership.join(replace(INFO, incarnation="two"))
    membership.lose(INFO)
    membership.heartbeat(INFO, WorkerLoad(num_running=9), WorkerState.DRAINING)
    view = membership.find("decode-0")
    assert view is not None
    assert (view.info.incarnation, view.state, view.load.num_running) == ("two", WorkerState.READY, 0)


def test_cache_is_followed_and_a_gap_asks_for_a_snapshot(membership: Membership) -> None:
    apply = membership.apply_cache_events
    assert apply(INFO, 0, [CacheEvent(b"a", False), CacheEvent(b"b", False), CacheEvent(b"a", True)])
    view = membership.find("decode-0")
    assert view is not None
    assert view.cached == {b"b"}
    assert not apply(INFO, 7, [CacheEvent(b"z", False)])
    membership.replace_cache(INFO, 8, [b"x"])
    assert apply(INFO, 8, [CacheEvent(b"y", False)])
    view = membership.find("decode-0")
    assert view is not None
    assert view.cached == {b"x", b"y"}


def test_returning_worker_must_send_a_snapshot(membership: Membership) -> None:
    membership.lose(INFO)
    membership.heartbeat(INFO, WorkerLoad(), WorkerState.READY)
    assert not membership.apply_cache_events(INFO, 0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": replace(INFO.layout, dtype="float16")}, "dtype: 'float32' here, 'float16' there"),
        ({"layout": replace(INFO.layout, model_fingerprint="other")}, "'fp' here, 'other' there"),
        ({"tokenizer_fingerprint": "u"}, "tokenizers differ: t at decode-0, u at prefill-0"),
        ({"protocol_version": 99}, "speaks protocol 99"),
        ({"adapters": (Adapter("mine", "2"),)}, "adapters named mine differ: 1 at decode-0, 2 at prefill-0"),
    ],
)
def test_worker_that_does_not_fit_is_refused_in_words(membership: Membership, change: dict, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        membership.join(replace(INFO, worker_id="prefill-0", **change))
    membership.join(replace(INFO, worker_id="prefill-0", model="another-model", layout=INFO.layout))


def test_changes_are_announced_and_reports_apart(membership: Membership) -> None:
    changes: list[int] = []
    reports: list[int] = []
    membership.on_change(lambda _: changes.append(1))
    membership.on_report(lambda view: reports.append(view.load.free_blocks))
    membership.heartbeat(INFO, WorkerLoad(free_blocks=7), WorkerState.READY)
    membership.replace_cache(INFO, 3, [b"a"])
    assert (len(changes), reports) == (0, [7, 7])
    membership.heartbeat(INFO, WorkerLoad(free_blocks=6), WorkerState.DRAINING)
    membership.lose(INFO)
    assert (len(changes), reports) == (2, [7, 7])


@pytest.mark.parametrize("left", [WorkerState.DRAINING, WorkerState.STALLED, WorkerState.LOST])
def test_a_worker_that_connects_again_keeps_its_state_until_a_heartbeat(
    membership: Membership, left: WorkerState
) -> None:
    load = WorkerLoad(free_blocks=3)
    membership.heartbeat(INFO, load, WorkerState.READY if left is WorkerState.LOST else left)
    if left is WorkerState.LOST:
        membership.lose(INFO)
    membership.join(INFO)
    view = membership.find("decode-0")
    assert view is not None
    assert (view.state, view.load) == (left, load)
    membership.heartbeat(INFO, load, WorkerState.READY)
    assert state(membership) is WorkerState.READY
    membership.join(replace(INFO, incarnation="two"))
    assert state(membership) is WorkerState.READY


def test_workers_are_in_the_order_of_role_and_name(membership: Membership) -> None:
    for name, role in (
        ("prefill-0", WorkerRole.PREFILL),
        ("decode-2", WorkerRole.DECODE),
        ("decode-1", WorkerRole.DECODE),
    ):
        membership.join(replace(INFO, worker_id=name, incarnation=name, role=role))
    membership.heartbeat(
        replace(INFO, worker_id="decode-2", incarnation="decode-2"), WorkerLoad(free_blocks=3), WorkerState.READY
    )
    membership.lose(INFO)
    names = [view.info.worker_id for view in membership.views()]
    assert names == ["decode-0", "decode-1", "decode-2", "prefill-0"]


def test_twins_are_forgotten_with_their_worker(membership: Membership, clock: Clock) -> None:
    twins = TwinWatch(membership)
    for number in range(100):
        info = replace(INFO, worker_id=f"decode-{number}")
        membership.join(replace(info, incarnation="two"))
        twins.note(info, WorkerState.READY)
        clock.now += 100
        membership.expire(silent_s=5, forget_s=60)
    assert len(twins._former) == 1
