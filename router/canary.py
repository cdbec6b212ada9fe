"""A canary: a tiny request of the router's own, over the same code as clients' attempts, at a given place.

It waits for no queue and holds no permit. Its prefix-cache namespace is used once, so that its KV is computed and moved
every time; no tenant's namespace can be equal to it.
"""

import asyncio
import time
from dataclasses import replace

from mesh.domain.errors import DeadlineExceeded, WorkerBusy, WorkerLost
from mesh.domain.request import mint_id
from mesh.domain.sampling import SamplingParams
from router.attempt import Attempt, Dispatched, Patience
from router.choice import Choice
from router.dispatch import Paths
from router.ledger import Ledger
from router.limits import capacity_tokens
from router.placement import Placement
from router.served_model import ServedModel
from router.timeline import Timeline
from router.validation import GenerateInput, ValidRequest

NAMESPACE = "\ncanary\n"
"""Part of the namespaces of all canaries. Tenants' names have no line breaks."""

_NUM_GENERATED = 2
_ROOM_AGAIN_S = 0.05


class CanaryRunner:
    """Runs canaries of one model, past the queue. One that takes longer than `timeout_s` has failed."""

    def __init__(self, model: ServedModel, paths: Paths, *, timeout_s: float) -> None:
        self._model = model
        self._ledger = Ledger(time.monotonic)  # its own: canaries are too small to keep clients waiting
        self._paths = paths
        self._timeout_s = timeout_s

    async def run(self, placement: Placement) -> None:
        """Until both tokens are there. Raises a MeshError if they do not come. Want of room is waited out: a worker
        that is full of work is not a bad one.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._try_once(placement)
                    except WorkerBusy:
                        await asyncio.sleep(_ROOM_AGAIN_S)
        except TimeoutError:
            raise DeadlineExceeded(f"no two tokens within {self._timeout_s:g} s") from None

    async def _try_once(self, placement: Placement) -> None:
        link = self._paths.links.find(placement.decode)
        if link is None:
            raise WorkerLost("the decode worker has just been lost")
        choice = Choice(0, self._request(placement), self._model.tokenizer)
        namespace = f"{self._model.name}{NAMESPACE}{choice.request_id}"
        request = choice.next_request(0, eos_token_ids=frozenset(), namespace=namespace)
        timeline = Timeline(asyncio.get_running_loop().time)
        timeline.begin_attempt()
        dispatched = Dispatched(
            replace(request, time_left_s=self._timeout_s),
            self._ledger.book(placement, choice.num_tokens),
            link,
            timeline,
        )
        patience = Patience(self._timeout_s, self._timeout_s, self._timeout_s)
        await Attempt(choice, dispatched, self._paths.prefills, patience).run()

    def _request(self, placement: Placement) -> ValidRequest:
        """More than a block of prompt, so that whole and partly filled blocks move; less where a worker is tiny."""
        workers = [info for info in (placement.prefill, placement.decode) if info is not None]
        decoder_prompt = self._model.decoder_prompt
        most = min(map(capacity_tokens, workers)) - _NUM_GENERATED - len(decoder_prompt)
        num_tokens = max(1, min(placement.decode.layout.block_size + 2, most))
        ids = tuple(place % self._model.facts.vocab_size for place in range(num_tokens))
        sampling = SamplingParams(max_new_tokens=_NUM_GENERATED, seed=0, temperature=0.0, ignore_eos=True)
        return ValidRequest(mint_id(), ids, sampling, GenerateInput(prompt=None), decoder_prompt=decoder_prompt)
