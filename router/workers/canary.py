"""Canaries: tiny requests of the router's own that prove workers before clients' requests reach them.

    mesh changed, or a canary is due ─▶ send the due canaries ─▶ success: the worker may get requests
                                                              └▶ failure: sent again after a backoff

A canary runs over the same code as clients' attempts, at a given placement. It does not queue and holds no permit. Its
prefix-cache namespace is used once, so that its KV is computed and moved every time; no tenant's namespace equals it.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from mesh.domain.cache_hints import CacheHints, KeepPriority
from mesh.domain.errors import DeadlineExceeded, MeshError, ModelFailed, WorkerBusy, WorkerLost
from mesh.domain.request import SamplingParams, mint_id
from mesh.tasks import cancel_all, set_within, spawn
from router.admission.in_flight import InFlightTable
from router.admission.placement import Placement
from router.attempt import Attempt, AttemptTimeouts
from router.choice import Choice
from router.served_model import ServedModel
from router.timeline import Timeline
from router.validation import GenerateParams, ValidRequest
from router.workers.decode_link import Links
from router.workers.health import Canary, Trust, WorkerHealth
from router.workers.membership import capacity_tokens
from router.workers.mesh_view import MeshView
from router.workers.prefill_client import PrefillCaller

log = structlog.get_logger(__name__)

NAMESPACE = "\ncanary\n"
"""Part of the namespaces of all canaries. Tenants' names have no line breaks."""
_NO_USE = CacheHints(keep_priority=KeepPriority.LOW)

_NUM_GENERATED = 2
_BUSY_RETRY_S = 0.05


class CanaryRunner:
    """Sends the canaries of one model. A canary without a result after `timeout_s` has failed.

    `on_change` is called when a worker has been proven.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        health: WorkerHealth,
        mesh: MeshView,
        links: Links,
        prefill_client: PrefillCaller,
        timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._model = model
        self._health = health
        self._mesh = mesh
        self._links = links
        self._prefill_client = prefill_client
        self._timeout_s = timeout_s
        self._on_change = on_change
        # Its own table: canaries are too small to delay clients' requests.
        self._in_flight = InFlightTable(asyncio.get_running_loop().time)
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Look for due canaries again: the mesh has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Send canaries when they are due, until cancelled."""
        try:
            while True:
                self._woken.clear()
                views, usable = self._mesh.views(), self._mesh.usable()
                self._health.follow(view.info for view in views)
                self._in_flight.follow(views)
                for canary in self._health.start_due(usable):
                    spawn(self._tasks, self._try(canary))
                await set_within(self._woken, self._health.next_due_s(usable))
        finally:
            await cancel_all(self._tasks)

    async def _try(self, canary: Canary) -> None:
        """Send one canary and record its result."""
        started_s = asyncio.get_running_loop().time()
        prefill = canary.placement.prefill
        names = {"worker": canary.subject.worker_id}
        if prefill is not None:
            names |= {"prefill": prefill.worker_id, "decode": canary.placement.decode.worker_id}
        try:
            await self._send(canary.placement)
        except asyncio.CancelledError:
            self._health.failed(canary)
            raise
        except Exception as error:
            num_failed = self._health.failed(canary, str(error) or type(error).__name__)
            _log_failure(canary, names, error, num_failed)
            self.wake()
            return
        self._health.passed(canary)
        trust = Trust.LOCAL if prefill is None else Trust.FULL
        duration_ms = round(1000 * (asyncio.get_running_loop().time() - started_s), 2)
        log.info("worker proven", **names, proof=trust.name, duration_ms=duration_ms)
        self._on_change()

    async def _send(self, placement: Placement) -> None:
        """Return once both tokens have come. Raises a MeshError; ModelFailed if their log-probs are not finite.

        A busy worker is retried until the timeout, because lack of capacity does not make it unhealthy.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._send_once(placement)
                    except WorkerBusy:
                        await asyncio.sleep(_BUSY_RETRY_S)
        except TimeoutError:
            raise DeadlineExceeded(f"no two tokens within {self._timeout_s:g} s") from None

    async def _send_once(self, placement: Placement) -> None:
        link = self._links.find(placement.decode)
        if link is None:
            raise WorkerLost("the decode worker has just been lost")
        choice = Choice(0, self._request(placement), self._model.tokenizer)
        namespace = f"{self._model.name}{NAMESPACE}{choice.request_id}"
        spec = choice.next_spec(0, eos_token_ids=frozenset(), namespace=namespace)
        timeline = Timeline(asyncio.get_running_loop().time)
        timeline.begin_attempt()
        attempt = Attempt(
            choice,
            replace(spec, time_left_s=self._timeout_s, cache_hints=_NO_USE),
            self._in_flight.claim(placement, choice.num_tokens),
            link=link,
            prefill_client=self._prefill_client,
            timeline=timeline,
            timeouts=AttemptTimeouts(self._timeout_s, self._timeout_s, self._timeout_s),
        )
        await attempt.run()
        if not math.isfinite(choice.mean_logprob):
            raise ModelFailed("log-probs of the canary's tokens are not finite: the worker computes NaN or infinity")

    def _request(self, placement: Placement) -> ValidRequest:
        """Use more than one block of prompt, so that full and partial blocks are moved; less if a worker is tiny."""
        workers = [info for info in (placement.prefill, placement.decode) if info is not None]
        decoder_prompt = self._model.decoder_prompt
        max_tokens = min(map(capacity_tokens, workers)) - _NUM_GENERATED - len(decoder_prompt)
        num_tokens = max(1, min(placement.decode.layout.block_size + 2, max_tokens))
        ids = tuple(position % self._model.facts.vocab_size for position in range(num_tokens))
        sampling = SamplingParams(max_new_tokens=_NUM_GENERATED, seed=0, temperature=0.0, ignore_eos=True)
        return ValidRequest(mint_id(), ids, sampling, GenerateParams(prompt=None), decoder_prompt=decoder_prompt)


def _log_failure(canary: Canary, names: Mapping[str, str], error: Exception, num_failed: int) -> None:
    """The first one that is merely late is no warning: a machine that is busy with a start makes it so."""
    if canary.before is Trust.LOCAL:
        effect = "the worker gets only prompts that it computes itself"
    else:
        effect = "the worker gets no requests"
    log.log(
        logging.INFO if num_failed == 1 and isinstance(error, DeadlineExceeded) else logging.WARNING,
        "canary failed",
        **names,
        error=str(error),
        failed_in_a_row=num_failed,
        effect=f"{effect} until a canary, which is sent again, succeeds",
        exc_info=None if isinstance(error, MeshError) else error,
    )
