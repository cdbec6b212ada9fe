"""The rule by which workers change their roles, for one model: from the router's advice to one switch at a time.

    one more worker of a role is advised, and not of both ── for `after_s`
        ─▶ no worker has come or gone ── for `pause_s`, which a switch begins anew
        ─▶ the other role keeps a worker, and the others of it would be in use no more than MAX_USED
        ─▶ of its workers that can switch, the one with the least work does

Workers that come and go are seen by every router, so the pause holds whichever of them decides. `decide` is pure.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from mesh.domain.errors import MeshError
from mesh.domain.worker import WorkerRole
from router.admission.roster import Roster
from router.advice import Action, Adviser
from router.workers.mesh_view import MeshView

log = structlog.get_logger(__name__)

_LOOK_S = 5.0
MAX_USED = 0.7
"""Of a role that gives a worker away, the largest share that may be in use of the workers that stay."""


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Advice is followed after it has stood for `after_s`, if no worker has come or gone for `pause_s`."""

    after_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that serves. `work` orders the workers of a role by their work."""

    worker_id: str
    switchable: bool
    work: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """The input of the rule. One more worker is `wanted` of these roles, for `wanted_s`, with the reasons; no worker
    has come or gone for `settled_s`; `used` is the share of each role's workers in use over the last minute.
    """

    wanted: Mapping[WorkerRole, str]
    wanted_s: float
    settled_s: float
    workers: Mapping[WorkerRole, Sequence[Candidate]]
    used: Mapping[WorkerRole, float]


@dataclass(frozen=True, slots=True)
class Switch:
    """This worker should take this role."""

    worker_id: str
    role: WorkerRole


def other(role: WorkerRole) -> WorkerRole:
    """The role that a worker of `role` would come from."""
    return WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL


def decide(figures: Figures, limits: SwitchLimits) -> Switch | str:
    """The switch to make now, or why there is none; "" if nothing is wanted."""
    if not figures.wanted:
        return ""
    if len(figures.wanted) > 1:
        return "both roles lack a worker"
    (role,) = figures.wanted
    giving = figures.workers[other(role)]
    candidates = [worker for worker in giving if worker.switchable]
    if not candidates:
        return f"no {other(role).value} worker can switch"
    if len(giving) < 2:
        return f"{giving[0].worker_id} is the last {other(role).value} worker"
    if used_without_one(figures, other(role)) > MAX_USED:
        return f"the {other(role).value} workers have too much work to be one less"
    if figures.wanted_s < limits.after_s:
        return "the advice is new"
    if figures.settled_s < limits.pause_s:
        return "a worker has come or gone"
    worker = min(candidates, key=lambda candidate: (candidate.work, candidate.worker_id))
    return Switch(worker.worker_id, role)


def used_without_one(figures: Figures, role: WorkerRole) -> float:
    """The share of the role's workers that would be in use with one less of them."""
    count = len(figures.workers[role])
    return figures.used[role] * count / (count - 1) if count > 1 else float("inf")


class RoleSwitcher:
    """Applies the rule to the workers of one model. `run` is its task, on the event loop whose clock is its own.

    `may_act(seconds)` returns True if this router, and no other, may switch a worker for so long. `switch` asks a
    worker; it raises MeshError if the worker refuses or does not answer.
    """

    def __init__(
        self,
        mesh: MeshView,
        adviser: Adviser,
        limits: SwitchLimits,
        *,
        may_act: Callable[[float], Awaitable[bool]],
        switch: Callable[[str, WorkerRole], Awaitable[None]],
    ) -> None:
        self._mesh = mesh
        self._adviser = adviser
        self._limits = limits
        self._may_act = may_act
        self._switch = switch
        self._clock = asyncio.get_running_loop().time
        self._wanted: frozenset[WorkerRole] = frozenset()
        self._serving: frozenset[str] = frozenset()
        self._wanted_since_s = self._settled_since_s = self._clock()
        self._verdict = ""

    async def run(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take the figures, and make the switch that the rule wants, if any."""
        figures = self._figures()
        decision = decide(figures, self._limits)
        if isinstance(decision, str):
            if decision and decision != self._verdict:
                log.info("no worker changes its role", cause=decision, **_described(figures))
            self._verdict = decision
        elif await self._may_act(self._limits.pause_s):
            self._verdict = ""
            await self._make(decision, figures)

    async def _make(self, decision: Switch, figures: Figures) -> None:
        log.warning(
            "a worker changes its role by rule",
            worker=decision.worker_id,
            next_role=decision.role.value,
            cause=figures.wanted[decision.role],
            used_without=round(used_without_one(figures, other(decision.role)), 2),
            **_described(figures),
        )
        self._settled_since_s = self._clock()
        try:
            await self._switch(decision.worker_id, decision.role)
        except MeshError as error:
            log.warning("the worker keeps its role", worker=decision.worker_id, error=str(error))

    def _figures(self) -> Figures:
        now_s, snapshot = self._clock(), self._mesh.snapshot()
        reasons = {advice.role: advice.reason for advice in self._adviser.advice if advice.action is Action.ADD}
        if reasons.keys() != self._wanted:
            self._wanted, self._wanted_since_s = frozenset(reasons), now_s
        serving = self._mesh.serving()
        if serving != self._serving:
            self._serving, self._settled_since_s = serving, now_s
        return Figures(
            reasons,
            wanted_s=now_s - self._wanted_since_s,
            settled_s=now_s - self._settled_since_s,
            workers={role: _candidates(snapshot.roster(role)) for role in WorkerRole},
            used={role: self._adviser.used(role) for role in WorkerRole},
        )


def _candidates(roster: Roster) -> list[Candidate]:
    return [
        Candidate(
            view.info.worker_id,
            view.info.switchable,
            (
                max(view.load.num_running + view.load.num_waiting, int(roster.num_seqs[row])),
                max(view.load.pending_tokens, int(roster.prefill_tokens[row])),
            ),
        )
        for row, view in enumerate(roster.views)
    ]


def _described(figures: Figures) -> dict[str, object]:
    """The figures, for the log."""
    return {
        "wanted": ", ".join(role.value for role in figures.wanted),
        "wanted_s": round(figures.wanted_s),
        "settled_s": round(figures.settled_s),
        **{f"{role.value}_workers": len(figures.workers[role]) for role in WorkerRole},
        **{f"{role.value}_used": round(figures.used[role], 2) for role in WorkerRole},
    }
