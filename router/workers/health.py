"""The workers that may get requests. No I/O, no clock of its own.

Canaries establish trust in a worker, and a circuit breaker on clients' attempts revokes it (WorkerHealth):

    decode worker   NONE ── canary that it prefills itself ──▶ LOCAL ── canary from a FULL prefill worker ──▶ FULL
    prefill worker  NONE ───────── canary to a decode worker that is LOCAL or FULL ─────────────────────────▶ FULL

    tripped (`trip_after` failures in a row): down to NONE; a decode worker whose transfers failed, to LOCAL

A worker is only tested alone or with a proven partner, so a faulty worker keeps no other from being proven. A decode
worker is first proven alone; from then on it is LOCAL and gets prompts that it prefills itself. Every later canary uses
another partner. When hundreds join at once, a partner is in a few canaries at a time, so that none waits
there until it times out; workers that have been proven are partners of the next. A failed canary is held against no
worker, because it cannot tell which end of a transfer was at fault: the subject merely stays where it was until its
next canary.

MeshView (mesh_view.py) combines that trust with the table of workers, the links and the work in flight.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mesh.domain.errors import LeaseExpired, ReceiverLost, Replayable, TransferCorrupt, TransferFailed, WorkerLost
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.tasks import backoff_s
from router.admission.placement import Placement

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_MAX_CANARIES = 64
"""At a time. When a thousand workers join, canaries that all ran at once would all be late."""
_MAX_CANARIES_OF_PARTNER = 4
TRANSFER_ERRORS = (TransferFailed, TransferCorrupt, LeaseExpired)


class Trust(IntEnum):
    """The proof that a worker has given so far: none, that it generates on its own, or all that its role requires."""

    NONE = 0
    LOCAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Canary:
    """A test of `subject` that runs at `placement`. `before` is the subject's trust when the canary was sent."""

    subject: WorkerInfo
    placement: Placement
    before: Trust


@dataclass(slots=True)
class _Record:
    """One run of a worker. `num_failures` (of clients' attempts) and `num_failed_canaries` count consecutive failures.

    `num_trips` counts trips that each came soon after a successful canary: a worker whose fault canaries do not detect
    is tested less and less often.
    """

    trust: Trust = Trust.NONE
    num_failures: int = 0
    num_failed_canaries: int = 0
    num_trips: int = 0
    canary_error: str = ""
    is_testing: bool = False
    next_try_s: float = 0.0
    proven_at_s: float = 0.0
    failed_at_s: float = 0.0


class WorkerHealth:
    """The health of each run of a worker. `clock` is the InFlightTable's monotonic clock, in seconds."""

    def __init__(self, clock: Callable[[], float], *, trip_after: int) -> None:
        self._clock = clock
        self._trip_after = trip_after
        self._records: dict[str, _Record] = {}
        self._num_helping: Counter[str] = Counter()  # canaries of others that a partner is in, by incarnation

    def trust(self, info: WorkerInfo) -> Trust:
        """Return the trust in this run of a worker."""
        return self._record(info).trust

    def canary_error(self, info: WorkerInfo) -> str:
        """Return the error of this run's last canary; empty if it succeeded."""
        return self._record(info).canary_error

    def follow(self, infos: Iterable[WorkerInfo]) -> None:
        """Track exactly these runs of workers, lost ones included, and drop the records of others."""
        self._records = {info.incarnation: self._record(info) for info in infos}

    def start_due(self, usable: Sequence[WorkerInfo]) -> list[Canary]:
        """Return the canaries to send now, at most one per worker, and no more than may run at a time. The caller must
        report each by `passed` or `failed`.

        `usable` are the workers that could get requests if they were proven.
        """
        now_s = self._clock()
        due: list[Canary] = []
        capacity = self._capacity
        for canary, record in self._pending(usable):
            if len(due) == capacity:
                break
            if record.next_try_s <= now_s:
                record.is_testing = True
                self._num_helping.update(_partners_of(canary))
                due.append(canary)
        return due

    def next_due_s(self, usable: Sequence[WorkerInfo]) -> float | None:
        """Seconds until the next canary is due; None if none is due before the mesh changes or a canary ends."""
        if not self._capacity:
            return None
        now_s = self._clock()
        return min((max(0.0, record.next_try_s - now_s) for _, record in self._pending(usable)), default=None)

    def passed(self, canary: Canary) -> None:
        """The canary has succeeded. Trust that was revoked while it ran stays revoked."""
        subject, placement = self._record(canary.subject), canary.placement
        self._num_helping -= Counter(_partners_of(canary))
        subject.is_testing, subject.num_failed_canaries, subject.canary_error = False, 0, ""
        if subject.trust is canary.before:
            self._raise(subject, Trust.LOCAL if placement.prefill is None else Trust.FULL)
        decode = self._record(placement.decode)
        if placement.prefill is not None and decode.trust is Trust.LOCAL:
            self._raise(decode, Trust.FULL)

    def failed(self, canary: Canary, error: str = "") -> int:
        """The canary has failed or was cancelled; `error` is shown to operators. Returns how many of its worker have
        failed in a row.
        """
        subject = self._record(canary.subject)
        self._num_helping -= Counter(_partners_of(canary))
        subject.is_testing = False
        subject.num_failed_canaries += 1
        subject.canary_error = error
        subject.next_try_s = self._clock() + _backoff_s(subject.num_failed_canaries)
        return subject.num_failed_canaries

    @property
    def _capacity(self) -> int:
        """Number of canaries that may be sent besides those under way."""
        return max(0, _MAX_CANARIES - sum(record.is_testing for record in self._records.values()))

    def _pending(self, usable: Sequence[WorkerInfo]) -> Iterator[tuple[Canary, _Record]]:
        """Yield the next canary of each worker that needs one, is not being tested, and finds a partner with time."""
        prefills = [i for i in usable if i.role is WorkerRole.PREFILL and self.trust(i) is Trust.FULL]
        decodes = [i for i in usable if i.role is WorkerRole.DECODE and self.trust(i) is not Trust.NONE]
        for info in usable:
            record = self._record(info)
            if record.is_testing or record.trust is Trust.FULL:
                continue
            placement = self._next_place(info, record, decodes if info.role is WorkerRole.PREFILL else prefills)
            if placement is not None:
                yield Canary(info, placement, record.trust), record

    def _next_place(self, info: WorkerInfo, record: _Record, partners: list[WorkerInfo]) -> Placement | None:
        """Return where the worker's next canary runs; None if no partner has time."""
        if info.role is WorkerRole.DECODE and record.trust is Trust.NONE:
            return Placement(None, info)
        partner = self._partner(partners, record)
        if partner is None:
            return None
        return Placement(partner, info) if info.role is WorkerRole.DECODE else Placement(info, partner)

    def _partner(self, proven: list[WorkerInfo], record: _Record) -> WorkerInfo | None:
        """Return a partner that is in few canaries; drops those in many from `proven`. The choice changes with each
        failure."""
        while proven:
            place = record.num_failed_canaries % len(proven)
            if self._num_helping[proven[place].incarnation] < _MAX_CANARIES_OF_PARTNER:
                return proven[place]
            del proven[place]
        return None

    def _raise(self, record: _Record, trust: Trust) -> None:
        record.trust, record.proven_at_s, record.num_failures = trust, self._clock(), 0

    def attempt_finished(self, placement: Placement) -> None:
        """Reset the failure counts of the attempt's workers."""
        for info in _workers_of(placement):
            self._record(info).num_failures = 0

    def attempt_failed(
        self, placement: Placement, error: Replayable, *, blamed: WorkerInfo | None, started_s: float
    ) -> list[WorkerInfo]:
        """Count a failed attempt and return the workers whose circuit breakers have tripped.

        Lack of capacity, preemption and draining are not failures. Neither end of a transfer can tell which end is at
        fault, so a broken transfer counts against both; an end that says of itself that it fails or stops, only against
        that one. An attempt that started before the worker's last successful canary, or before its last failure, is not
        counted: all streams that break with a worker are one event.
        """
        is_transfer = placement.prefill is not None and isinstance(error, TRANSFER_ERRORS)
        if is_transfer:
            suspects = _workers_of(placement)
        elif isinstance(error, (WorkerLost, ReceiverLost, *TRANSFER_ERRORS)):
            suspects = [blamed] if blamed is not None else []
        else:
            suspects = []
        return [info for info in suspects if self._trips(info, started_s, is_transfer=is_transfer)]

    def _trips(self, info: WorkerInfo, started_s: float, *, is_transfer: bool) -> bool:
        """Count a failure; True if it trips the worker's circuit breaker."""
        record = self._record(info)
        floor = Trust.LOCAL if is_transfer and info.role is WorkerRole.DECODE else Trust.NONE
        if record.trust <= floor or started_s < max(record.proven_at_s, record.failed_at_s):
            return False
        now_s = self._clock()
        record.num_failures += 1
        record.failed_at_s = now_s
        if record.num_failures < self._trip_after:
            return False
        is_early = now_s - record.proven_at_s < _MAX_BACKOFF_S
        record.num_trips = record.num_trips + 1 if is_early else 1
        record.trust, record.num_failures, record.next_try_s = floor, 0, now_s + _backoff_s(record.num_trips - 1)
        return True

    def _record(self, info: WorkerInfo) -> _Record:
        """Return the record of this run; a throw-away record for a run that is gone."""
        return self._records.get(info.incarnation) or _Record()


def _backoff_s(num_failures: int) -> float:
    return backoff_s(num_failures, first_s=_FIRST_BACKOFF_S, max_s=_MAX_BACKOFF_S)


def _workers_of(placement: Placement) -> list[WorkerInfo]:
    return [info for info in (placement.prefill, placement.decode) if info is not None]


def _partners_of(canary: Canary) -> list[str]:
    """The proven worker that helps to test the subject, if there is one."""
    return [info.incarnation for info in _workers_of(canary.placement) if info is not canary.subject]
