"""Placement in columns equals placement one worker at a time, whatever has happened to the mesh before."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.domain.block_hashes import block_hashes
from mesh.domain.worker import Adapter, WorkerLoad, WorkerRole, WorkerState
from router.admission.in_flight import CapacityClaim, InFlightTable
from router.admission.placement import Placement, PlacementQuery, is_short_in, place
from router.admission.roster import InFlight
from router.workers.health import Trust
from router.workers.membership import Membership, WorkerView
from router.workers.mesh_view import MeshView
from tests.fakes.router_views import BLOCK, decode, prefill, query, snapshot
from tests.unit.router import reference_placement as reference

MINE = Adapter("mine", "digest-of-mine")
few = st.integers(0, 40)
in_flights = st.builds(InFlight, st.integers(0, 5), few, few, st.integers(0, 60), st.integers(0, 30))


@st.composite
def views(draw: Any) -> list[WorkerView]:
    made = []
    for number in range(draw(st.integers(0, 7))):
        make = draw(st.sampled_from([prefill, decode]))
        made.append(
            make(
                f"w{number}",
                state=draw(st.sampled_from([WorkerState.READY] * 5 + [WorkerState.DRAINING, WorkerState.LOST])),
                max_num_seqs=draw(st.sampled_from([0, 1, 3, 4, 8])),
                num_blocks=draw(st.sampled_from([2, 8, 16, 40, 200])),
                max_batch_tokens=draw(st.sampled_from([8, 16, 32])),
                free_blocks=draw(few),
                num_running=draw(st.integers(0, 3)),
                cached=range(draw(st.sampled_from([0, 0, 4, 8, 24, 160]))),
                adapters=draw(st.sampled_from([(), (MINE,)])),
                model=draw(st.sampled_from(["m"] * 9 + ["other"])),
            )
        )
    return made


@st.composite
def queries(draw: Any) -> PlacementQuery:
    num_tokens = draw(st.one_of(st.integers(1, 30), st.integers(120, 400)))
    return query(
        num_tokens,
        max_total_tokens=num_tokens + draw(st.integers(1, 40)),
        num_seqs=draw(st.sampled_from([1, 1, 2, 5])),
        avoid=draw(names),
        cut_off=draw(names),
        prefill_locally=draw(st.booleans()),
        adapter=draw(st.sampled_from(["", "", MINE.digest])),
        home=draw(st.sampled_from(["", "w0", "w1", "w2", "gone"])),
    )


names = st.frozensets(st.sampled_from([f"w{number}" for number in range(7)]), max_size=3)


@settings(max_examples=400)
@given(
    views(),
    queries(),
    st.lists(in_flights, min_size=7, max_size=7),
    st.tuples(names, names, names),
    st.tuples(few, few),
)
def test_decisions_are_those_of_the_definition(
    workers: list[WorkerView], asked: PlacementQuery, work: list[InFlight], sets: Any, limits: tuple[int, int]
) -> None:
    mesh = snapshot(
        *workers,
        in_flight={f"w{number}": each for number, each in enumerate(work)},
        **dict(zip(("unreachable", "unproven", "local_only"), sets, strict=True)),
        **dict(zip(("prefill_threshold", "prefill_overflow"), limits, strict=True)),
    )
    assert place(asked, mesh) == reference.place(asked, mesh)
    prefillers = [candidate.info for candidate in reference.healthy(mesh, WorkerRole.PREFILL)]
    assert is_short_in(mesh)(asked) is all(asked.num_tokens <= info.max_batch_tokens // 2 for info in prefillers)


class Mesh:
    """A membership, an in-flight table and the view that placement reads, which are told of everything that happens."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.membership = Membership(lambda: self.now_s)
        self.in_flight = InFlightTable(lambda: self.now_s)
        self.claims: list[CapacityClaim] = []
        self.unproven: set[str] = set()
        everything: Any = SimpleNamespace(
            name="m",
            facts=SimpleNamespace(tokenizer_fingerprint="t"),
            unreachable=lambda views: frozenset(),
            trust=lambda info: Trust.NONE if info.incarnation in self.unproven else Trust.FULL,
        )
        self.view = MeshView(
            everything, membership=self.membership, links=everything, in_flight=self.in_flight, health=everything
        )
        self.membership.on_change(lambda _: self._changed())
        self.membership.on_report(self.view.reported)
        for number in range(2):
            for make in (prefill, decode):
                self.membership.join(make(f"{make.__name__}-{number}", num_blocks=16, max_num_seqs=6).info)

    def _changed(self) -> None:
        self.view.discard_snapshot()
        self.in_flight.follow(self.membership.views())

    def heartbeat(self, free_blocks: list[int], num_running: list[int], states: list[WorkerState]) -> None:
        """All workers report."""
        columns = (self.membership.views(), free_blocks, num_running, states)
        for view, free, running, state in zip(*columns, strict=True):
            self.membership.heartbeat(view.info, WorkerLoad(free_blocks=free, num_running=running), state)

    def cache(self, number: int, num_tokens: int) -> None:
        info = self._nth(number).info
        self.membership.replace_cache(info, 0, block_hashes(range(num_tokens), BLOCK, "m"))

    def prove(self, number: int, *, proven: bool) -> None:
        info = self._nth(number).info
        (self.unproven.discard if proven else self.unproven.add)(info.incarnation)
        self._changed()

    def restart(self, number: int) -> None:
        info = self._nth(number).info
        self.membership.join(replace(info, incarnation=f"{info.worker_id} since {self.now_s}"))

    def take(self, num_tokens: int) -> None:
        placed = place(query(num_tokens), self.view.snapshot())
        if isinstance(placed, Placement):
            self.claims.append(self.in_flight.claim(placed, num_tokens))

    def on_claim(self, number: int, action: str) -> None:
        if not self.claims:
            return
        claim = self.claims[number % len(self.claims)]
        if action == "grow":
            claim.grow(claim.num_tokens + number % 7)
        elif action == "fork":
            self.claims.append(claim.fork())
        else:
            getattr(claim, action)()
        if action == "release":
            self.claims.remove(claim)

    def _nth(self, number: int) -> WorkerView:
        workers = self.membership.views()
        return workers[number % len(workers)]

    def fresh(self) -> Any:
        """A snapshot of now, made from nothing but what is there."""
        workers = self.membership.views()
        present = {view.info.incarnation for view in workers}
        sums = reference.sums_of(self.claims, workers)
        in_flight = {incarnation: work for incarnation, work in sums.items() if incarnation in present}
        return snapshot(*workers, in_flight=in_flight, unproven=frozenset(self.unproven & present))


numbers = st.integers(0, 20)
states = st.sampled_from([WorkerState.READY] * 6 + [WorkerState.DRAINING, WorkerState.STALLED])
actions = st.sampled_from(
    ["confirm", "grow", "grow", "first_token", "prefill_computed", "prefill_released", "fork", "release"]
)
steps = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 30)),
    st.tuples(st.just("on_claim"), numbers, actions),
    st.tuples(
        st.just("heartbeat"),
        *(st.lists(each, min_size=4, max_size=4) for each in (st.integers(0, 16), st.integers(0, 3), states)),
    ),
    st.tuples(st.just("cache"), numbers, st.sampled_from([0, 8, 24])),
    st.tuples(st.just("restart"), numbers),
)


def reports(free_blocks: int) -> tuple[Any, float]:
    return ("heartbeat", [free_blocks] * 4, [0] * 4, [WorkerState.READY] * 4), 0.2


# Two long prompts, one at each decode worker, which both then report: a third one fits or not, as they say.
TWO_CONFIRMED = [
    *[(("take", 30), 0.0), (("take", 30), 0.0)],
    *[(("on_claim", number, "confirm"), 0.0) for number in range(2)],
]


@settings(max_examples=200)
@example([*TWO_CONFIRMED, reports(3), reports(16)], [])
@given(st.lists(st.tuples(steps, st.sampled_from([0.0, 0.06, 0.2])), max_size=24), st.lists(numbers, max_size=1))
def test_a_snapshot_that_is_kept_equals_a_new_one(history: list[Any], unproven: list[int]) -> None:
    mesh = Mesh()
    for number in unproven:
        mesh.prove(number, proven=False)
    for (name, *values), waited_s in history:
        mesh.now_s += waited_s
        getattr(mesh, name)(*values)
        fresh = mesh.fresh()
        assert fresh.in_flight.items() <= mesh.in_flight.by_worker().items()
        for num_tokens in (4, 12, 30):
            assert place(query(num_tokens), mesh.view.snapshot()) == reference.place(query(num_tokens), fresh)
    for claim in list(mesh.claims):
        claim.release()
    assert mesh.in_flight.by_worker() == {}
