"""One choice from the queue to its end, with replay, the mesh's only recovery.

queued ─▶ placed (queue, placement) ─▶ attempt 0 ─▶ finished
             ▲                            │ Replayable: worker lost, KV refused, preempted, no capacity, draining
             └ backoff ◀─ FailureHistory ◀┘           next attempt: prompt + tokens so far, same seed, before others
                (and budget)                          the failure counts against the workers that may have caused it
deadline passed ─▶ DeadlineExceeded       too many failures without a token ─▶ AttemptsFailed or Overloaded
cancelled ─▶ the attempt aborts on both workers and releases its claim

FailureHistory decides how often to replay, how soon, and on which workers not. Consecutive attempts without a new token
are counted. So are workers lost under the request, because a request that crashes workers must not be retried forever.

The first replay after progress is free and, unless workers lacked capacity, immediate: all streams of a dead worker
move at once.
Later replays draw on one budget per model and wait for it rather than fail, so that no failure causes a storm.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from mesh.domain.errors import (
    AttemptsFailed,
    DeadlineExceeded,
    MeshError,
    Overloaded,
    Replayable,
    SequencePreempted,
    WorkerBusy,
    WorkerLost,
)
from mesh.domain.request import Fork, SequenceSpec
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.tasks import backoff_s
from router.admission.in_flight import CapacityClaim
from router.admission.placement import Placement, PlacementQuery
from router.admission.prefix_chain import PrefixChain
from router.admission.queue import PlacementQueue
from router.attempt import Attempt, AttemptTimeouts
from router.choice import Choice, WaitingFork
from router.journal import Journal
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.timeline import Timeline
from router.workers.decode_link import Link, Links
from router.workers.health import TRANSFER_ERRORS, Trust, WorkerHealth
from router.workers.prefill_client import PrefillCaller

log = structlog.get_logger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
# After this many failures in a row the decode worker prefills itself: the network between workers may be down.
_PREFILL_LOCALLY_AFTER = 3
_MAX_CONVERSATIONS = 65_536


class FailureHistory:
    """The failures of one choice so far, and what follows from them.

    `avoid` holds incarnations of workers that failed it since its last progress, `cut_off` those of prefill workers
    among them whose KV did not arrive: where packets vanish, each more attempt with them would cost a lease.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.attempt = 0
        self.avoid: frozenset[str] = frozenset()
        self.cut_off: frozenset[str] = frozenset()
        self._max_attempts = settings.max_attempts
        self._max_losses = settings.max_worker_losses
        self._num_tokens = 0
        self._num_failures = 0
        self._num_losses = 0

    @property
    def is_free(self) -> bool:
        """True if the next attempt does not draw on the budget."""
        return self._num_failures <= 1

    @property
    def prefill_locally(self) -> bool:
        """True if the next attempt should use no prefill worker."""
        return self._num_failures >= _PREFILL_LOCALLY_AFTER

    def count(self, error: Replayable, *, num_tokens: int, has_prefill: bool, blamed: WorkerInfo | None) -> float:
        """Count a failure and return the minimum seconds to wait before the next attempt.

        `num_tokens` is the choice's number of tokens by now, `has_prefill` tells whether a prefill worker computed the
        prompt. Raises the final error if there is no next attempt.
        """
        # The first token of an attempt comes from its prefill worker. It says nothing about the decode worker.
        if num_tokens > self._num_tokens + has_prefill:
            self._num_failures, self._num_losses = 0, 0
            self.avoid = self.cut_off = frozenset()
        self._num_tokens = num_tokens
        self.attempt += 1
        self._num_failures += 1
        self._num_losses += isinstance(error, WorkerLost)
        if blamed is not None:
            self.avoid |= {blamed.incarnation}
            if isinstance(error, TRANSFER_ERRORS) and blamed.role is WorkerRole.PREFILL:
                self.cut_off |= {blamed.incarnation}
        if self._num_failures >= self._max_attempts or self._num_losses >= self._max_losses:
            raise self._final(error) from error
        return self._backoff_s(error)

    def _backoff_s(self, error: Replayable) -> float:
        """The first failure is replayed at once, unless workers lacked capacity."""
        num_waits = self._num_failures - (0 if isinstance(error, WorkerBusy | SequencePreempted) else 1)
        return backoff_s(num_waits, first_s=_FIRST_BACKOFF_S, max_s=_MAX_BACKOFF_S)

    def _final(self, error: Replayable) -> MeshError:
        if isinstance(error, WorkerBusy | SequencePreempted):
            return Overloaded(f"no worker had capacity in {self._num_failures} attempts; try again later")
        return AttemptsFailed(f"workers failed this request {self._num_failures} times in a row")


class ReplayBudget:
    """A token bucket for replays without progress, shared by all requests of a model.

    `clock` returns monotonic seconds. `burst` is the capacity of the bucket, `per_s` its refill rate.
    """

    def __init__(self, clock: Callable[[], float], *, burst: int, per_s: float) -> None:
        self._clock = clock
        self._burst = burst
        self._per_s = per_s
        self._level = float(burst)  # below zero: tokens promised to waiting replays
        self._counted_at_s = clock()

    async def draw(self) -> None:
        """Wait for a token, first come, first served. A cancelled caller returns its token."""
        try:
            await asyncio.sleep(self.take_s())
        except asyncio.CancelledError:
            self.give_back()
            raise

    def take_s(self) -> float:
        """Take a token and return the seconds until it is available."""
        now_s = self._clock()
        refilled = self._level + (now_s - self._counted_at_s) * self._per_s
        self._level, self._counted_at_s = min(self._burst, refilled) - 1, now_s
        return max(0.0, -self._level / self._per_s)

    def give_back(self) -> None:
        """Return a token that was taken and not used."""
        self._level += 1


class Dispatcher:
    """Runs all choices of one model. `on_trip` is called when a circuit breaker has tripped."""

    def __init__(
        self,
        model: ServedModel,
        settings: RouterSettings,
        *,
        queue: PlacementQueue,
        links: Links,
        prefill_client: PrefillCaller,
        health: WorkerHealth,
        journal: Journal,
        on_trip: Callable[[], None],
    ) -> None:
        self._model = model
        self._settings = settings
        self._queue = queue
        self._links = links
        self._health = health
        self._journal = journal
        self._on_trip = on_trip
        self._homes = ConversationHomes()
        # In the worst case every choice in service needs a second replay at the same moment.
        clock = asyncio.get_running_loop().time
        self._budget = ReplayBudget(clock, burst=settings.max_concurrent_requests, per_s=settings.max_replays_per_s)
        self._attempt = partial(
            Attempt,
            prefill_client=prefill_client,
            timeouts=AttemptTimeouts(settings.reserve_timeout_s, settings.prefill_timeout_s, settings.stall_timeout_s),
        )

    async def run(self, choice: Choice, timeline: Timeline, deadline_s: float | None) -> None:
        """Return when the choice is finished; raise the error it ends with.

        `deadline_s` is on the event loop's clock.
        """
        failures = FailureHistory(self._settings)
        try:
            async with asyncio.timeout_at(deadline_s):
                while choice.finish_reason is None:
                    await self._try_once(choice, failures, timeline, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline has passed") from None

    async def _try_once(
        self, choice: Choice, failures: FailureHistory, timeline: Timeline, deadline_s: float | None
    ) -> None:
        """Run one attempt; if it fails, wait for the backoff and the replay budget."""
        attempt: Attempt | None = None
        try:
            attempt = await self._dispatch(choice, failures, timeline, deadline_s)
            await attempt.run()
            self._health.attempt_finished(attempt.placement)
        except Replayable as error:
            timeline.end_attempt(type(error).__name__)
            if attempt is not None:
                self._count_failure(attempt, error)
            blamed = None if attempt is None else attempt.blamed
            failure = {
                "request_id": choice.request_id,
                "attempt": failures.attempt,
                "num_tokens": len(choice.token_ids),
                "worker": blamed and blamed.worker_id,
                "cause": type(error).__name__,
                "error": str(error),
            }
            has_prefill = attempt is not None and attempt.placement.prefill is not None
            try:
                delay_s = failures.count(
                    error, num_tokens=len(choice.token_ids), has_prefill=has_prefill, blamed=blamed
                )
            except MeshError:
                log.info("no replay: too many failures", **failure)
                raise
            self._journal.replayed(choice, error, blamed)
            log.info("replay", **failure)
            await asyncio.sleep(delay_s)
            if not failures.is_free:
                await self._budget.draw()

    def _count_failure(self, attempt: Attempt, error: Replayable) -> None:
        """Count the failure against its workers. A worker that trips gets no requests until a canary succeeds."""
        tripped = self._health.attempt_failed(
            attempt.placement, error, blamed=attempt.blamed, started_s=attempt.started_s
        )
        for info in tripped:
            self._journal.tripped(info, self._settings.trip_after)
            log.warning(
                "worker tripped",
                worker=info.worker_id,
                num_failures=self._settings.trip_after,
                trusted_with="local prompts" if self._health.trust(info) is Trust.LOCAL else "nothing",
                error=str(error),
            )
        if tripped:
            self._on_trip()

    async def _dispatch(
        self, choice: Choice, failures: FailureHistory, timeline: Timeline, deadline_s: float | None
    ) -> Attempt:
        """Return an attempt: forked from the first choice's, or placed through the queue."""
        spec = choice.next_spec(
            failures.attempt,
            eos_token_ids=self._model.facts.eos_token_ids,
            namespace=choice.tenant.cache_namespace(self._model.name),
        )
        timeline.begin_attempt()
        siblings = choice.siblings
        if siblings is not None and choice.index > 0:
            attempt = await siblings.wait_for_fork(WaitingFork(choice, spec, timeline))
            if attempt is not None:
                return attempt
        elif siblings is not None:
            await siblings.wait_for_all()
        query = self._query(choice, spec, failures)
        claim = await self._queue.place(query, choice.queue_entry, is_replay=failures.attempt > 0)
        _note_placed(timeline, claim.placement)
        self._homes.note(spec, claim.placement.decode.incarnation)
        link = self._links.find(claim.placement.decode)
        if link is None:
            claim.release()
            raise WorkerLost("the decode worker has just been lost")
        if deadline_s is not None:
            spec = replace(spec, time_left_s=max(0.0, deadline_s - asyncio.get_running_loop().time()))
        forks: list[Attempt] = []
        if siblings is not None and choice.index == 0:
            # A fork that has joined since, in a replay, was not counted: it waits for the first token, and goes alone.
            waiting = siblings.take_forks(query.num_seqs - 1)
            forks = [self._fork(fork, claim, link) for fork in waiting]
            spec = replace(spec, forks=tuple(_fork_of(fork.spec) for fork in waiting))
        return self._attempt(choice, spec, claim, link=link, timeline=timeline, forks=forks)

    def _fork(self, fork: WaitingFork, claim: CapacityClaim, link: Link) -> Attempt:
        """Give a sibling an attempt that forks from the one with this claim."""
        _note_placed(fork.timeline, claim.placement)
        fork.timeline.mark("prefill_started")
        attempt = self._attempt(fork.choice, fork.spec, claim.fork(), link=link, timeline=fork.timeline)
        fork.attempt.set_result(attempt)
        return attempt

    def _query(self, choice: Choice, spec: SequenceSpec, failures: FailureHistory) -> PlacementQuery:
        return PlacementQuery(
            num_tokens=len(spec.token_ids),
            max_total_tokens=spec.max_total_tokens,
            chain=PrefixChain(spec.token_ids, spec.kv_scope, self._model.whole_prompt(spec)),
            num_seqs=choice.siblings.num_seqs if choice.siblings is not None and choice.index == 0 else 1,
            avoid=failures.avoid,
            cut_off=failures.cut_off,
            prefill_locally=failures.prefill_locally,
            adapter=spec.adapter,
            home=self._homes.find(spec),
        )


def _fork_of(spec: SequenceSpec) -> Fork:
    return Fork(spec.request_id, spec.attempt, spec.sampling.seed or 0, spec.traceparent)


def _note_placed(timeline: Timeline, placement: Placement) -> None:
    timeline.mark("placed")
    timeline.note_workers(placement.prefill.worker_id if placement.prefill else "", placement.decode.worker_id)


class ConversationHomes:
    """The decode worker that each conversation used last, for the latest ones of one model at this router."""

    def __init__(self) -> None:
        self._incarnations: OrderedDict[tuple[str, str], str] = OrderedDict()

    def find(self, spec: SequenceSpec) -> str:
        """The incarnation of the worker; empty if the request belongs to no conversation, or to a new one."""
        return self._incarnations.get(_conversation_of(spec), "")

    def note(self, spec: SequenceSpec, incarnation: str) -> None:
        if spec.cache_hints.session_id:
            self._incarnations[_conversation_of(spec)] = incarnation
            self._incarnations.move_to_end(_conversation_of(spec))
            if len(self._incarnations) > _MAX_CONVERSATIONS:
                self._incarnations.popitem(last=False)


def _conversation_of(spec: SequenceSpec) -> tuple[str, str]:
    return spec.cache_namespace, spec.cache_hints.session_id
