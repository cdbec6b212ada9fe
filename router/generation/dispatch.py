"""One choice from the queue to its end.

queued ─▶ placed (queue, placement) ─▶ attempt 0 ─▶ finished
             ▲                            │ Replayable: worker lost, KV refused, preempted, no capacity, draining
             └── backoff ◀── Replay ◀─────┘           next attempt: prompt + tokens so far, same seed, front of queue
                (and budget)                          the failure counts against the workers that may have caused it
deadline passed ─▶ DeadlineExceeded       too many failures without a token ─▶ NoWorkers or Overloaded
cancelled ─▶ the attempt aborts on both workers and releases its reservation
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from mesh.domain.errors import DeadlineExceeded, Replayable, WorkerLost
from mesh.domain.request import Fork, Request
from router.admission.queue import PlacementQueue
from router.generation.attempt import Attempt, AttemptTimeouts
from router.generation.choice import Choice
from router.generation.replay import Replay, ReplayBudget
from router.generation.siblings import WaitingFork
from router.observe.journal import Journal
from router.observe.timeline import Timeline
from router.placement.in_flight import Reservation
from router.placement.policy import Placement, PlacementQuery, PrefixChain
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.workers.decode_link import DecodeLink, DecodeLinks
from router.workers.health import Trust, WorkerHealth
from router.workers.prefill_call import PrefillClient

log = structlog.get_logger(__name__)


class Dispatcher:
    """Runs all choices of one model. `on_trip` is called when a circuit breaker has tripped."""

    def __init__(
        self,
        model: ServedModel,
        settings: RouterSettings,
        *,
        queue: PlacementQueue,
        links: DecodeLinks,
        prefills: PrefillClient,
        health: WorkerHealth,
        journal: Journal,
        on_trip: Callable[[], None],
    ) -> None:
        self._model = model
        self._settings = settings
        self._queue = queue
        self._links = links
        self._prefills = prefills
        self._health = health
        self._journal = journal
        self._on_trip = on_trip
        # In the worst case every choice in service needs a second replay at the same moment.
        self._budget = ReplayBudget(
            time.monotonic, burst=settings.max_concurrent_requests, per_s=settings.max_replays_per_s
        )
        self._timeouts = AttemptTimeouts(
            settings.reserve_timeout_s, settings.prefill_timeout_s, settings.stall_timeout_s
        )

    async def run(self, choice: Choice, timeline: Timeline, deadline_s: float | None) -> None:
        """Return when the choice is finished; raise the error it ends with.

        `deadline_s` is on the event loop's clock.
        """
        replay = Replay(self._settings)
        try:
            async with asyncio.timeout_at(deadline_s):
                while choice.finish_reason is None:
                    await self._try_once(choice, replay, timeline, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline has passed") from None

    async def _try_once(self, choice: Choice, replay: Replay, timeline: Timeline, deadline_s: float | None) -> None:
        """Run one attempt; if it fails, wait for the backoff and the replay budget."""
        attempt: Attempt | None = None
        try:
            attempt = await self._dispatch(choice, replay, timeline, deadline_s)
            await attempt.run()
            self._health.attempt_finished(attempt.placement)
        except Replayable as error:
            timeline.end_attempt(type(error).__name__)
            if attempt is not None:
                self._count_failure(attempt, error)
            blamed = None if attempt is None else attempt.blamed
            self._journal.replayed(choice, error, blamed)
            log.info(
                "replay",
                request_id=choice.request_id,
                attempt=replay.attempt,
                num_tokens=len(choice.token_ids),
                worker=blamed and blamed.worker_id,
                cause=type(error).__name__,
                error=str(error),
            )
            await asyncio.sleep(replay.after(error, num_tokens=len(choice.token_ids), blamed=blamed))
            if not replay.is_free:
                await self._budget.draw()

    def _count_failure(self, attempt: Attempt, error: Replayable) -> None:
        """Count the failure against its workers. A worker that trips gets no requests until a canary succeeds."""
        trips = self._health.attempt_failed(
            attempt.placement, error, blamed=attempt.blamed, started_s=attempt.started_s
        )
        for trip in trips:
            self._journal.tripped(trip)
            log.warning(
                "worker tripped",
                worker=trip.info.worker_id,
                num_failures=trip.num_failures,
                trusted_with="local prompts" if trip.trust is Trust.LOCAL else "nothing",
                error=str(error),
            )
        if trips:
            self._on_trip()

    async def _dispatch(self, choice: Choice, replay: Replay, timeline: Timeline, deadline_s: float | None) -> Attempt:
        """Return an attempt: forked from the first choice's, or placed through the queue."""
        request = choice.next_request(
            replay.attempt,
            eos_token_ids=self._model.facts.eos_token_ids,
            namespace=choice.tenant.cache_namespace(self._model.name),
        )
        timeline.begin_attempt()
        siblings = choice.siblings
        if siblings is not None and choice.index > 0:
            attempt = await siblings.wait_for_fork(WaitingFork(choice, request, timeline))
            if attempt is not None:
                return attempt
        elif siblings is not None:
            await siblings.wait_for_all()
        query = self._query(choice, request, replay)
        reservation = await self._queue.place(query, choice.queue_entry, is_replay=replay.attempt > 0)
        _note_placed(timeline, reservation.placement)
        link = self._links.find(reservation.placement.decode)
        if link is None:
            reservation.release()
            raise WorkerLost("the decode worker has just been lost")
        if deadline_s is not None:
            request = replace(request, time_left_s=max(0.0, deadline_s - asyncio.get_running_loop().time()))
        forks: list[Attempt] = []
        if siblings is not None and choice.index == 0:
            waiting = siblings.take_forks()
            forks = [self._fork(fork, reservation, link) for fork in waiting]
            request = replace(request, forks=tuple(_fork_of(fork.request) for fork in waiting))
        return Attempt(
            choice,
            request,
            reservation,
            link=link,
            prefills=self._prefills,
            timeline=timeline,
            timeouts=self._timeouts,
            forks=forks,
        )

    def _fork(self, fork: WaitingFork, reservation: Reservation, link: DecodeLink) -> Attempt:
        """Give a sibling an attempt that forks from the one with this reservation."""
        _note_placed(fork.timeline, reservation.placement)
        fork.timeline.mark("prefill_started")
        attempt = Attempt(
            fork.choice,
            fork.request,
            reservation.fork(),
            link=link,
            prefills=self._prefills,
            timeline=fork.timeline,
            timeouts=self._timeouts,
        )
        fork.attempt.set_result(attempt)
        return attempt

    def _query(self, choice: Choice, request: Request, replay: Replay) -> PlacementQuery:
        return PlacementQuery(
            num_tokens=len(request.token_ids),
            max_total_tokens=request.max_total_tokens,
            chain=PrefixChain(request.token_ids, request.cache_namespace, self._model.whole_prompt(request)),
            num_seqs=choice.siblings.num_seqs if choice.siblings is not None and choice.index == 0 else 1,
            avoid=replay.avoid,
            prefill_locally=replay.prefill_locally,
        )


def _fork_of(request: Request) -> Fork:
    return Fork(request.request_id, request.attempt, request.sampling.seed or 0, request.traceparent)


def _note_placed(timeline: Timeline, placement: Placement) -> None:
    timeline.mark("placed")
    timeline.note_workers(placement.prefill.worker_id if placement.prefill else "", placement.decode.worker_id)
