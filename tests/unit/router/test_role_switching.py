"""The rule by which workers change their roles: what it waits for, whom it takes, and what it never does."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.worker import WorkerRole
from router.role_switching import MAX_USED, Candidate, Figures, Switch, SwitchLimits, decide, other, used_without_one

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
LIMITS = SwitchLimits(after_s=30, pause_s=120)


def workers(role: WorkerRole, *work: int, switchable: bool = True) -> list[Candidate]:
    return [Candidate(f"{role.value}-{number}", switchable, (each, 0)) for number, each in enumerate(work)]


READY = Figures(
    wanted={P: "prompts waited for one"},
    wanted_s=30,
    settled_s=120,
    workers={P: workers(P, 5), D: workers(D, 3, 1, 2)},
    used={P: 1.0, D: 0.4},
)


def test_the_worker_with_the_least_work_changes() -> None:
    assert decide(READY, LIMITS) == Switch("decode-1", P)
    to_decode = replace(READY, wanted={D: "KV is full"}, used={P: 0.2, D: 1.0}, workers={P: workers(P, 4, 4), D: []})
    assert decide(to_decode, LIMITS) == Switch("prefill-0", D), "ties go by name"


def test_only_switchable_workers_change() -> None:
    mixed = [*workers(D, 0, switchable=False), Candidate("decode-9", True, (7, 0))]
    assert decide(replace(READY, used={P: 1.0, D: 0.3}, workers={P: [], D: mixed}), LIMITS) == Switch("decode-9", P)
    fixed = workers(D, 0, 0, switchable=False)
    assert decide(replace(READY, workers={P: [], D: fixed}), LIMITS) == "no decode worker can switch"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"wanted": {}}, ""),
        ({"wanted": {P: "a", D: "b"}}, "both roles lack a worker"),
        ({"wanted_s": 29.9}, "the advice is new"),
        ({"settled_s": 119.9}, "a worker has come or gone"),
        ({"workers": {P: workers(P, 5), D: workers(D, 0)}}, "decode-0 is the last decode worker"),
        ({"workers": {P: workers(P, 5), D: []}}, "no decode worker can switch"),
        ({"used": {P: 1.0, D: 0.5}}, "the decode workers have too much work to be one less"),
    ],
)
def test_it_waits_and_says_for_what(changes: Mapping[str, object], why: str) -> None:
    assert decide(replace(READY, **changes), LIMITS) == why  # type: ignore[arg-type]


def test_what_the_others_would_have_to_do() -> None:
    assert used_without_one(READY, D) == pytest.approx(0.6)
    assert used_without_one(READY, P) == float("inf")


FIGURES = st.builds(
    Figures,
    wanted=st.dictionaries(st.sampled_from(WorkerRole), st.just("why")),
    wanted_s=st.floats(0, 100),
    settled_s=st.floats(0, 300),
    workers=st.fixed_dictionaries(
        {
            role: st.lists(
                st.builds(Candidate, st.sampled_from([f"{role.value}-{n}" for n in range(9)]), st.booleans()),
                max_size=5,
                unique_by=lambda worker: worker.worker_id,
            )
            for role in WorkerRole
        }
    ),
    used=st.fixed_dictionaries({role: st.floats(0, 1) for role in WorkerRole}),
)


@given(FIGURES)
def test_no_role_is_left_without_a_worker_and_nothing_flaps(figures: Figures) -> None:
    decision = decide(figures, LIMITS)
    if isinstance(decision, str):
        return
    from_role = other(decision.role)
    assert decision.role in figures.wanted
    assert from_role not in figures.wanted
    assert decision.worker_id in {worker.worker_id for worker in figures.workers[from_role] if worker.switchable}
    assert len(figures.workers[from_role]) >= 2
    # The workers that stay are below the level at which the opposite advice would be given.
    assert used_without_one(figures, from_role) <= MAX_USED
    assert figures.wanted_s >= LIMITS.after_s
    assert figures.settled_s >= LIMITS.pause_s
