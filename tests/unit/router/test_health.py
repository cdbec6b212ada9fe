"""The state machine of trust: whom canaries prove, what failures take away; and one sick worker holds nobody up."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import (
    Replayable,
    SequencePreempted,
    TransferCorrupt,
    TransferFailed,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
)
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.tasks import backoff_s
from router.admission.placement import Placement
from router.workers.health import Canary, Trust, WorkerHealth
from tests.evidence import Evidence
from tests.fakes.router_views import decode, prefill

P0, P1 = prefill("p0").info, prefill("p1").info
D0, D1 = decode("d0").info, decode("d1").info
TRIP_AFTER = 3


class Bench:
    """Workers in virtual time. Those in `sick` fail every canary; those in `deaf` every one that brings them KV."""

    def __init__(self, *infos: WorkerInfo, sick: Any = (), deaf: Any = ()) -> None:
        self.now_s = 0.0
        self.infos = list(infos)
        self.sick = set(sick)
        self.deaf = set(deaf)
        self.tries: list[tuple[float, Canary]] = []
        self.health = WorkerHealth(lambda: self.now_s, trip_after=TRIP_AFTER)
        self.health.follow(infos)

    def trust_levels(self) -> list[Trust]:
        return [self.health.trust(info) for info in self.infos]

    def run_due(self) -> None:
        """Run what is due now, all at the same time."""
        for canary in self.health.start_due(self.infos):
            self.tries.append((self.now_s, canary))
            placement = canary.placement
            hears = placement.prefill is None or placement.decode not in self.deaf
            if hears and not self.sick & {placement.prefill, placement.decode}:
                self.health.passed(canary)
            else:
                self.health.failed(canary)

    def run_until(self, until_s: float) -> None:
        """Run everything that is due up to then."""
        while (wait_s := self.health.next_due_s(self.infos)) is not None and self.now_s + wait_s <= until_s:
            self.now_s += wait_s
            self.run_due()
        self.now_s = until_s

    def fail(self, *placed: WorkerInfo, error: Replayable | None = None, started_s: float | None = None) -> list[str]:
        """A client's attempt fails at a decode worker, or at a prefill and a decode worker; who has tripped?"""
        placement = Placement(*placed) if len(placed) == 2 else Placement(None, *placed)
        started_s = self.now_s if started_s is None else started_s
        error = error or WorkerLost("gone")
        tripped = self.health.attempt_failed(placement, error, blamed=placement.decode, started_s=started_s)
        return [info.worker_id for info in tripped]


def test_a_mesh_is_proven_with_a_few_canaries_at_once() -> None:
    bench = Bench(P0, P1, D0, D1)
    bench.run_until(0.0)
    assert bench.trust_levels() == [Trust.FULL] * 4
    assert len(bench.tries) <= 6
    assert bench.health.next_due_s(bench.infos) is None


def test_without_prefill_workers_local_is_all_there_is() -> None:
    bench = Bench(D0)
    bench.run_until(100.0)
    assert (bench.trust_levels(), len(bench.tries)) == ([Trust.LOCAL], 1)
    bench.infos.append(P0)
    bench.health.follow(bench.infos)
    bench.run_due()
    assert bench.trust_levels() == [Trust.FULL, Trust.FULL]


def test_unknown_runs_of_workers_are_not_trusted() -> None:
    bench = Bench(D0)
    assert bench.health.trust(D1) is Trust.NONE
    bench.run_until(0.0)
    bench.health.follow([])
    assert bench.health.trust(D0) is Trust.NONE
    assert not bench.fail(D0)


def test_a_sick_worker_is_tried_less_and_less_often() -> None:
    bench = Bench(D0, sick=[D0])
    bench.run_until(40.0)
    assert [at_s for at_s, _ in bench.tries] == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5]


def test_ten_minutes_of_a_dead_worker(evidence: Evidence) -> None:
    bench = Bench(D0, sick=[D0])
    bench.run_until(600.0)
    num_tries = len(bench.tries)
    evidence(
        "R26", "canaries, a line each, of a worker dead for 10 min", num_tries, target="<= 600", ok=num_tries <= 600
    )


workers = st.lists(st.sampled_from([P0, P1, D0, D1]), min_size=1, unique=True)


@given(workers, workers, st.booleans())
def test_one_sick_worker_keeps_no_other_from_being_proven(
    infos: list[WorkerInfo], sick: list[WorkerInfo], deaf: bool
) -> None:
    """Whoever is healthy gets what the other healthy ones allow, and nobody gets what is not true."""
    bad = {sick[0]}
    bench = Bench(*infos, **({"deaf": bad} if deaf else {"sick": bad}))
    bench.run_until(30.0)
    well = [info for info in infos if info not in bad]
    prefills, decodes = {P0, P1} & set(well), {D0, D1} & set(well)
    if deaf:  # then only a decode worker has anything
        prefills = {P0, P1} & set(infos)
    for info in infos:
        trust = bench.health.trust(info)
        if info in {P0, P1}:
            expected = Trust.FULL if info in prefills and decodes else Trust.NONE
        elif info in decodes:
            expected = Trust.FULL if prefills else Trust.LOCAL
        else:
            expected = Trust.LOCAL if deaf else Trust.NONE
        assert trust is expected, info.worker_id


@given(st.lists(st.sampled_from(["wait", "run", "fail", "transfer", "finish"]), max_size=60), workers)
def test_whatever_happens(steps: list[str], sick: list[WorkerInfo]) -> None:
    """Tries are spaced, only proven partners take part, at most one try of each runs, and trips need failures."""
    bench = Bench(P0, P1, D0, D1, sick=sick[1:])
    num_failures = 0
    for step in steps:
        if step == "wait":
            bench.now_s += 0.3
        elif step == "run":
            before = {info: bench.health.trust(info) for info in bench.infos}
            started = bench.health.start_due(bench.infos)
            assert len({canary.subject for canary in started}) == len(started)
            assert not bench.health.start_due([canary.subject for canary in started])
            for canary in started:
                pair = {canary.placement.prefill, canary.placement.decode} - {canary.subject, None}
                assert all(before[partner] is not Trust.NONE for partner in pair)
                assert canary.before is before[canary.subject] is not Trust.FULL
                (bench.health.failed if canary.subject in bench.sick else bench.health.passed)(canary)
        elif step == "finish":
            bench.health.attempt_finished(Placement(P0, D0))
            num_failures = 0
        else:
            error = TransferFailed("cut") if step == "transfer" else WorkerLost("gone")
            num_failures += 1
            tripped = bench.fail(P0, D0, error=error)
            assert not tripped or num_failures >= TRIP_AFTER
    bench.sick.clear()
    bench.run_until(bench.now_s + 60.0)
    assert bench.trust_levels() == [Trust.FULL] * 4


@pytest.fixture
def proven() -> Bench:
    bench = Bench(P0, D0, D1)
    bench.run_until(20.0)
    assert bench.trust_levels() == [Trust.FULL] * 3
    return bench


def test_failures_in_a_row_trip_and_a_canary_lets_back_in(proven: Bench) -> None:
    assert [proven.fail(D0) for _ in range(3)] == [[], [], ["d0"]]
    assert proven.trust_levels() == [Trust.FULL, Trust.NONE, Trust.FULL]
    proven.run_due()
    proven.run_due()
    assert proven.trust_levels() == [Trust.FULL] * 3


def test_a_success_between_starts_the_count_anew(proven: Bench) -> None:
    for _ in range(5):
        assert not proven.fail(D0)
        assert not proven.fail(D0)
        proven.health.attempt_finished(Placement(P0, D0))


@pytest.mark.parametrize("error", [WorkerBusy("full"), SequencePreempted("room"), WorkerDraining("draining")])
def test_want_of_room_is_no_failure(proven: Bench, error: Replayable) -> None:
    assert not [trip for _ in range(10) for trip in proven.fail(P0, D0, error=error)]


@pytest.mark.parametrize("error", [TransferFailed("cut"), TransferCorrupt("flipped")])
def test_a_broken_transfer_counts_against_both_ends(proven: Bench, error: Replayable) -> None:
    """And a decode worker goes on with what needs no transfer."""
    assert [proven.fail(P0, D0, error=error) for _ in range(3)][-1] == ["p0", "d0"]
    assert proven.trust_levels() == [Trust.NONE, Trust.LOCAL, Trust.FULL]


def test_a_decode_worker_that_cannot_receive_goes_on_alone(proven: Bench) -> None:
    proven.deaf.add(D0)
    for _ in range(3):
        proven.fail(P0, D0, error=TransferFailed("cut"))
    proven.run_until(60.0)
    assert proven.trust_levels() == [Trust.FULL, Trust.LOCAL, Trust.FULL]
    proven.deaf.clear()
    proven.run_until(90.0)
    assert proven.trust_levels() == [Trust.FULL] * 3


def test_streams_that_break_together_are_one_event(proven: Bench) -> None:
    began_s = proven.now_s
    proven.now_s += 5.0
    assert not any(proven.fail(D0, started_s=began_s) for _ in range(100))
    proven.now_s += 1.0
    assert [proven.fail(D0), proven.fail(D0)] == [[], ["d0"]]  # the third in a row
    proven.run_due()
    assert not any(proven.fail(D0, started_s=began_s) for _ in range(100))
    assert proven.trust_levels()[1] is not Trust.NONE


def test_a_worker_that_only_canaries_like_is_tried_less_and_less_often(proven: Bench) -> None:
    gaps = []
    for _ in range(8):
        for _ in range(3):
            proven.fail(D0)
        tripped_s = proven.now_s
        while proven.health.trust(D0) is Trust.NONE:
            proven.now_s += proven.health.next_due_s([D0]) or 0.0
            proven.run_due()
        gaps.append(proven.now_s - tripped_s)
    assert gaps == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_canary_does_not_undo_a_trip_that_came_while_it_ran() -> None:
    bench = Bench(P0, D0)
    bench.run_due()  # the decode worker is LOCAL
    canaries = bench.health.start_due(bench.infos)
    for _ in range(3):
        bench.fail(D0)
    assert bench.health.trust(D0) is Trust.NONE
    for canary in canaries:
        bench.health.passed(canary)
    assert bench.trust_levels() == [Trust.FULL, Trust.NONE]


def test_backoff() -> None:
    assert [backoff_s(n, first_s=0.5, max_s=10.0) for n in (0, 1, 2, 3, 6, 100)] == [0.0, 0.5, 1.0, 2.0, 10.0, 10.0]


def test_hundreds_that_join_at_once_share_their_partners() -> None:
    """Each canary takes a second. A partner is in four at a time, and those who are proven help."""
    joining = [decode(f"d{number}").info for number in range(300)]
    bench = Bench(P0, *joining)
    while any(trust is Trust.NONE for trust in bench.trust_levels()):
        bench.run_due()  # each decode worker on its own
    rounds, busiest = 0, 0
    while canaries := bench.health.start_due(bench.infos):
        helpers = Counter(canary.placement.prefill for canary in canaries if canary.subject.role is WorkerRole.DECODE)
        busiest = max([busiest, *helpers.values()])
        assert bench.health.next_due_s(bench.infos) is None, "nothing is due until one of them ends"
        for canary in canaries:
            bench.health.passed(canary)
        rounds += 1
    assert busiest == 4
    assert rounds <= 300 // 4 + 1
    assert set(bench.trust_levels()) == {Trust.FULL}


def test_a_thousand_that_join_at_once_are_tried_a_few_dozen_at_a_time() -> None:
    """The sick ones hold their places until they fail, and then wait; the others are proven meanwhile."""
    joining = [decode(f"d{number}").info for number in range(1000)]
    bench = Bench(*joining)
    held = bench.health.start_due(joining)
    assert len(held) == 64
    assert bench.health.start_due(joining) == []
    assert bench.health.next_due_s(joining) is None, "nothing is due until one of them ends"
    for canary in held[:60]:
        bench.health.failed(canary)
    bench.run_until(0.1)
    assert Counter(bench.trust_levels()) == {Trust.NONE: 64, Trust.LOCAL: 936}
    assert bench.health.next_due_s(joining) == pytest.approx(0.4), "the sick ones are tried again"


def test_proven_prefill_workers_help_to_prove_the_rest() -> None:
    joining = [decode(f"d{number}").info for number in range(40)]
    helpers = [prefill(f"p{number}").info for number in range(5)]
    bench = Bench(*helpers, *joining)
    bench.run_until(0.0)
    asked = Counter(canary.placement.prefill for _, canary in bench.tries if canary.placement.prefill is not None)
    assert set(asked) == set(helpers)
    assert set(bench.trust_levels()) == {Trust.FULL}


def test_a_failed_canary_frees_its_partner() -> None:
    joining = [decode(f"d{number}").info for number in range(4)]
    bench = Bench(P0, *joining)
    bench.run_until(0.0)
    late = [decode(f"late{number}").info for number in range(8)]
    bench.infos += late
    bench.deaf |= set(late[:4])
    bench.health.follow(bench.infos)
    bench.run_until(60.0)
    assert [bench.health.trust(info) for info in late] == [Trust.LOCAL] * 4 + [Trust.FULL] * 4
