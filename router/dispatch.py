"""One choice from the queue to its end.

queued ─▶ placed (queue, placement) ─▶ attempt 0 ─▶ finished
             ▲                            │ Replayable: worker lost, KV refused, preempted, no room, draining
             └── backoff ◀── Replay ◀─────┘           next attempt: prompt + tokens so far, same seed, to the front
                (and budget)                          the failure counts against the workers that may be at fault
out of time ─▶ DeadlineExceeded          too many failures without a token ─▶ NoWorkers or Overloaded
cancelled ─▶ the attempt aborts on both workers and gives its booking back
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from mesh.domain.errors import DeadlineExceeded, Replayable, WorkerLost
from mesh.domain.request import Fork, Request
from router.attempt import Attempt, Dispatched, Patience
from router.choice import Choice
from router.decode_links import DecodeLinks
from router.journal import Journal
from router.placement import Placement, PlacementQuery, PrefixChain
from router.prefill_call import PrefillClient
from router.proving import Proof, Proving
from router.queue import PlacementQueue
from router.replay import Replay, ReplayBudget
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.siblings import Rider
from router.timeline import Timeline

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Paths:
    """The ways to workers."""

    queue: PlacementQueue
    links: DecodeLinks
    prefills: PrefillClient
    proving: Proving
    journal: Journal


class Dispatcher:
    """Runs choices; one for all requests of a router. `on_trip` is called when a worker has lost its trust."""

    def __init__(self, model: ServedModel, settings: RouterSettings, paths: Paths, on_trip: Callable[[], None]) -> None:
        self._model = model
        self._settings = settings
        self._paths = paths
        self._on_trip = on_trip
        # Whoever is in service may once need a second replay at once.
        self._budget = ReplayBudget(
            time.monotonic, burst=settings.max_concurrent_requests, per_s=settings.max_replays_per_s
        )
        self._patience = Patience(settings.reserve_timeout_s, settings.prefill_timeout_s, settings.stall_timeout_s)

    async def run(self, choice: Choice, timeline: Timeline, deadline_s: float | None) -> None:
        """Until the choice is finished. Raises the error it ends with. `deadline_s` is in the event loop's time."""
        replay = Replay(self._settings)
        try:
            async with asyncio.timeout_at(deadline_s):
                while choice.finish_reason is None:
                    await self._try_once(choice, replay, timeline, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline has passed") from None

    async def _try_once(self, choice: Choice, replay: Replay, timeline: Timeline, deadline_s: float | None) -> None:
        """One attempt, and the wait after it if it fails."""
        attempt: Attempt | None = None
        try:
            attempt = await self._dispatch(choice, replay, timeline, deadline_s)
            await attempt.run()
            self._paths.proving.attempt_finished(attempt.placement)
        except Replayable as error:
            timeline.end_attempt(type(error).__name__)
            if attempt is not None:
                self._count(attempt, error)
            blamed = None if attempt is None else attempt.blamed
            self._paths.journal.replayed(choice, error, blamed)
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

    def _count(self, attempt: Attempt, error: Replayable) -> None:
        """Workers that fail again and again get no more until they are proven again."""
        trips = self._paths.proving.attempt_failed(
            attempt.placement, error, blamed=attempt.blamed, begun_s=attempt.begun_s
        )
        for trip in trips:
            self._paths.journal.tripped(trip)
            log.warning(
                "worker tripped",
                worker=trip.info.worker_id,
                num_failures=trip.num_failures,
                trusted_with="local prompts" if trip.proof is Proof.LOCAL else "nothing",
                error=str(error),
            )
        if trips:
            self._on_trip()

    async def _dispatch(self, choice: Choice, replay: Replay, timeline: Timeline, deadline_s: float | None) -> Attempt:
        """Wait for a place, or for the first choice to take this one along."""
        request = choice.next_request(
            replay.attempt,
            eos_token_ids=self._model.facts.eos_token_ids,
            namespace=choice.tenant.cache_namespace(self._model.name),
        )
        timeline.begin_attempt()
        if choice.siblings is not None and choice.index > 0:
            attempt = await choice.siblings.board(Rider(choice, request, timeline))
            if attempt is not None:
                return attempt
        elif choice.siblings is not None:
            await choice.siblings.gathered()
        query, is_replay = self._query(choice, request, replay), replay.attempt > 0
        booking = await self._paths.queue.place(query, choice.claim, is_replay=is_replay)
        _note_placed(timeline, booking.placement)
        link = self._paths.links.find(booking.placement.decode)
        if link is None:
            booking.release()
            raise WorkerLost("the decode worker has just been lost")
        if deadline_s is not None:
            request = replace(request, time_left_s=max(0.0, deadline_s - asyncio.get_running_loop().time()))
        dispatched = Dispatched(request, booking, link, timeline)
        if choice.siblings is not None and choice.index == 0:
            dispatched = self._take_along(dispatched, choice.siblings.take())
        return Attempt(choice, dispatched, self._paths.prefills, self._patience)

    def _take_along(self, dispatched: Dispatched, riders: list[Rider]) -> Dispatched:
        """Give each rider an attempt that forks from the one dispatched."""
        placement, attempts = dispatched.booking.placement, list[Attempt]()
        for rider in riders:
            _note_placed(rider.timeline, placement)
            rider.timeline.mark("prefill_started")
            fork = Dispatched(rider.request, dispatched.booking.fork(), dispatched.link, rider.timeline, is_fork=True)
            attempts.append(Attempt(rider.choice, fork, self._paths.prefills, self._patience))
            rider.boarded.set_result(attempts[-1])
        request = replace(dispatched.request, forks=tuple(_fork(rider.request) for rider in riders))
        return replace(dispatched, request=request, forks=tuple(attempts))

    def _query(self, choice: Choice, request: Request, replay: Replay) -> PlacementQuery:
        return PlacementQuery(
            num_tokens=len(request.token_ids),
            max_total_tokens=request.max_total_tokens,
            chain=PrefixChain(request.token_ids, request.cache_namespace, self._model.whole_prompt(request)),
            num_seqs=choice.siblings.num_seqs if choice.siblings is not None and choice.index == 0 else 1,
            avoid=replay.avoid,
            prefill_locally=replay.prefill_locally,
        )


def _fork(request: Request) -> Fork:
    return Fork(request.request_id, request.attempt, request.sampling.seed or 0, request.traceparent)


def _note_placed(timeline: Timeline, placement: Placement) -> None:
    timeline.mark("placed")
    timeline.note_workers(placement.prefill.worker_id if placement.prefill else "", placement.decode.worker_id)
