"""Whether workers are trusted: canaries give trust, failures of clients' attempts take it away. No I/O, no clock.

    decode worker   NONE ── canary that it prefills itself ──▶ LOCAL ── canary from a FULL prefill worker ──▶ FULL
    prefill worker  NONE ───────── canary to a decode worker that is LOCAL or FULL ─────────────────────────▶ FULL

    tripped (`trip_after` failures in a row): down to NONE; a decode worker whose transfers failed, to LOCAL

A worker is only ever tried alone or with one that is proven, so one that is sick keeps no other from being proven: a
decode worker needs nobody for its first step, and while one is LOCAL it serves, prefilling by itself; the partner for
each other step changes from try to try. A canary that fails counts against nobody: who is at fault when KV does not
arrive cannot be known, and the partner may be healthy. It only leaves its subject where it was, until the next try.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mesh.domain.errors import LeaseExpired, Replayable, TransferCorrupt, TransferFailed, WorkerLost
from mesh.domain.worker import WorkerInfo, WorkerRole
from router.placement import Placement

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_TRANSFER_ERRORS = (TransferFailed, TransferCorrupt, LeaseExpired)


class Proof(IntEnum):
    """What a worker has shown: nothing, that it generates on its own, or all that its role asks of it."""

    NONE = 0
    LOCAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Canary:
    """A try of `subject` that runs at `placement`. `before` is what the subject had shown when it began."""

    subject: WorkerInfo
    placement: Placement
    before: Proof


@dataclass(frozen=True, slots=True)
class Trip:
    """A worker has lost its trust, down to `proof`, after this many failures."""

    info: WorkerInfo
    proof: Proof
    num_failures: int


@dataclass(slots=True)
class _Record:
    """One run of a worker. `num_failures` of clients' attempts and `num_failed_canaries` are counted in a row.

    `num_trips` counts trips that each came soon after a proof: a worker that canaries do not find out is tried less
    and less often.
    """

    proof: Proof = Proof.NONE
    num_failures: int = 0
    num_failed_canaries: int = 0
    num_trips: int = 0
    is_tried: bool = False
    next_try_s: float = 0.0
    proven_at_s: float = 0.0
    failed_at_s: float = 0.0


class Proving:
    """What this router knows of each run of a worker. `clock` gives the ledger's monotonic seconds."""

    def __init__(self, clock: Callable[[], float], *, trip_after: int) -> None:
        self._clock = clock
        self._trip_after = trip_after
        self._records: dict[str, _Record] = {}

    def proof(self, info: WorkerInfo) -> Proof:
        """What this run of a worker has shown."""
        return self._record(info).proof

    def follow(self, infos: Iterable[WorkerInfo]) -> None:
        """These are all workers there are, also lost ones: know each, and forget others."""
        self._records = {info.incarnation: self._record(info) for info in infos}

    # -- canaries ---------------------------------------------------------------------------------------------------

    def start_due(self, usable: Sequence[WorkerInfo]) -> list[Canary]:
        """Canaries to run now, at most one for each worker; each must be answered by `passed` or `failed`.

        `usable` are those that could get work if they were proven.
        """
        now_s = self._clock()
        due = [(canary, record) for canary, record in self._wanted(usable) if record.next_try_s <= now_s]
        for _, record in due:
            record.is_tried = True
        return [canary for canary, _ in due]

    def next_due_s(self, usable: Sequence[WorkerInfo]) -> float | None:
        """Seconds until a canary is due; None if none is until something changes."""
        now_s = self._clock()
        return min((max(0.0, record.next_try_s - now_s) for _, record in self._wanted(usable)), default=None)

    def passed(self, canary: Canary) -> None:
        """The canary went through. What has been taken away while it ran stays taken."""
        subject, placement = self._record(canary.subject), canary.placement
        subject.is_tried, subject.num_failed_canaries = False, 0
        if subject.proof is canary.before:
            self._raise(subject, Proof.LOCAL if placement.prefill is None else Proof.FULL)
        decode = self._record(placement.decode)
        if placement.prefill is not None and decode.proof is Proof.LOCAL:
            self._raise(decode, Proof.FULL)

    def failed(self, canary: Canary) -> None:
        """The canary did not go through, for whatever reason."""
        subject = self._record(canary.subject)
        subject.is_tried = False
        subject.num_failed_canaries += 1
        subject.next_try_s = self._clock() + backoff_s(subject.num_failed_canaries)

    def _wanted(self, usable: Sequence[WorkerInfo]) -> Iterator[tuple[Canary, _Record]]:
        """The next step of everyone who has one and does not take it already."""
        prefills = [i for i in usable if i.role is WorkerRole.PREFILL and self.proof(i) is Proof.FULL]
        decodes = [i for i in usable if i.role is WorkerRole.DECODE and self.proof(i) is not Proof.NONE]
        for info in usable:
            record = self._record(info)
            placement = _next_step(info, record, prefills, decodes)
            if placement is not None and not record.is_tried:
                yield Canary(info, placement, record.proof), record

    def _raise(self, record: _Record, proof: Proof) -> None:
        record.proof, record.proven_at_s, record.num_failures = proof, self._clock(), 0

    # -- clients' attempts ------------------------------------------------------------------------------------------

    def attempt_finished(self, placement: Placement) -> None:
        """An attempt went well on all its workers."""
        for info in _workers_of(placement):
            self._record(info).num_failures = 0

    def attempt_failed(
        self, placement: Placement, error: Replayable, *, blamed: WorkerInfo | None, begun_s: float
    ) -> list[Trip]:
        """Count a failure in; returns those that it trips.

        No room, preemption and draining are no failures. Neither end of a transfer can say that the other is at fault,
        so a broken one counts against both. An attempt that began before a worker's last proof, or its last failure,
        says nothing new about it: all streams that break with a worker are one event.
        """
        is_transfer = placement.prefill is not None and isinstance(error, _TRANSFER_ERRORS)
        if is_transfer:
            suspects = _workers_of(placement)
        elif isinstance(error, (WorkerLost, *_TRANSFER_ERRORS)):
            suspects = [blamed] if blamed is not None else []
        else:
            suspects = []
        trips = [self._count(info, begun_s, is_transfer=is_transfer) for info in suspects]
        return [trip for trip in trips if trip is not None]

    def _count(self, info: WorkerInfo, begun_s: float, *, is_transfer: bool) -> Trip | None:
        record = self._record(info)
        keeps = Proof.LOCAL if is_transfer and info.role is WorkerRole.DECODE else Proof.NONE
        if record.proof <= keeps or begun_s < max(record.proven_at_s, record.failed_at_s):
            return None
        record.num_failures += 1
        record.failed_at_s = self._clock()
        if record.num_failures < self._trip_after:
            return None
        trip = Trip(info, keeps, record.num_failures)
        now_s = self._clock()
        is_early = now_s - record.proven_at_s < _MAX_BACKOFF_S
        record.num_trips = record.num_trips + 1 if is_early else 1
        record.proof, record.num_failures, record.next_try_s = keeps, 0, now_s + backoff_s(record.num_trips - 1)
        return trip

    def _record(self, info: WorkerInfo) -> _Record:
        """This run's record; a passing one for a run that is gone."""
        return self._records.get(info.incarnation) or _Record()


def backoff_s(num_failures: int) -> float:
    """Seconds to wait after this many failures in a row; none, no wait."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(num_failures - 1, 16)) if num_failures else 0.0


def _workers_of(placement: Placement) -> list[WorkerInfo]:
    return [info for info in (placement.prefill, placement.decode) if info is not None]


def _next_step(
    info: WorkerInfo, record: _Record, prefills: Sequence[WorkerInfo], decodes: Sequence[WorkerInfo]
) -> Placement | None:
    """How a worker shows more than it has; None if there is no more, or nobody to show it with."""
    if record.proof is Proof.FULL:
        return None
    if info.role is WorkerRole.DECODE and record.proof is Proof.NONE:
        return Placement(None, info)
    partners = prefills if info.role is WorkerRole.DECODE else decodes
    if not partners:
        return None
    partner = partners[record.num_failed_canaries % len(partners)]
    return Placement(partner, info) if info.role is WorkerRole.DECODE else Placement(info, partner)
