"""Many requests at once, each cancelled somewhere on its way through both workers."""

import asyncio
import random
from collections import Counter

from mesh.domain.request import mint_id
from tests.evidence import Evidence
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation
from tests.service.fake_router import FakeRouter, fake_router
from tests.service.worker_rig import EngineRig, worker_rig

NUM_CONCURRENT = 300
NUM_PROBES = 3
PHASES = ("started", "reserved", "prefill called", "prefill began", "first token", "decoding")
WAIT_S = 60.0


async def cancelled(router: FakeRouter, rng: random.Random) -> str:
    """One request, cancelled in a random phase; the phase it got to."""
    request = make_request(mint_id(), rng.choices(range(200), k=rng.randint(1, 24)), max_new_tokens=60)
    last = rng.choice(PHASES)
    call = None
    await router.start(request, request.request_id)
    try:
        if last == "started":
            return "started"
        message = await router.box(request.request_id).get()
        if not message.HasField("reserved"):
            return "refused"
        if last == "reserved":
            return last
        call = router.prefill(request, request.request_id, message.reserved.ready_tokens)
        if last == "prefill called":
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            return last
        await call.read()
        if last == "prefill began":
            return last
        await call.read()
        if last == "decoding":
            for _ in range(rng.randint(1, 5)):
                await router.box(request.request_id).get()
        return last
    finally:
        if call is not None:
            call.cancel()
        await router.abort(request)


async def storm(num_rounds: int, seed: int) -> tuple[list[float], Counter[str], int]:
    """Seconds until all blocks were back after each round, phases reached, and how many probes went right."""
    rng = random.Random(seed)
    clock = asyncio.get_running_loop().time
    prefill = EngineRig.make(num_blocks=6000, max_batch_tokens=256, max_num_seqs=64)
    decode = EngineRig.make(num_blocks=6000, max_batch_tokens=512, max_num_seqs=NUM_CONCURRENT + 20)
    async with worker_rig(prefill=prefill, decode=decode) as rig, fake_router(rig) as router:
        back_s: list[float] = []
        phases: Counter[str] = Counter()
        for _ in range(num_rounds):
            phases.update(await asyncio.gather(*(cancelled(router, rng) for _ in range(NUM_CONCURRENT))))
            ended = clock()
            await rig.wait_whole(WAIT_S)
            back_s.append(clock() - ended)
        prompts = [[seed % 100, i, 5] for i in range(NUM_PROBES)]
        probes = await asyncio.gather(
            *(router.run(make_request(mint_id(), prompt, max_new_tokens=5)) for prompt in prompts)
        )
    right = sum(probe == fake_continuation(prompt, 5) for probe, prompt in zip(probes, prompts, strict=True))
    return back_s, phases, right


async def check_storms(num_runs: int, num_rounds: int, evidence: Evidence) -> None:
    """State what came out of this many runs."""
    worst_s, right = 0.0, 0
    reached: Counter[str] = Counter()
    for seed in range(num_runs):
        back_s, phases, num_right = await storm(num_rounds, seed)
        worst_s = max(worst_s, *back_s)
        right += num_right
        reached += phases
    assert all(reached[phase] for phase in PHASES), reached
    evidence(
        "R4",
        f"free blocks back after {NUM_CONCURRENT} cancelled at once, worst of {num_runs * num_rounds} rounds",
        f"{worst_s:.2f} s",
        target="<= 2 s",
        ok=worst_s <= 2.0,
        is_reported_only=True,
    )
    num_probes = num_runs * NUM_PROBES
    evidence("R4", "probes after the storm", f"{right} of {num_probes}", target="all", ok=right == num_probes)
