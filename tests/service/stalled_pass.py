"""Prefill's forward pass stalls while transfers are open."""

import asyncio

from kvtransfer import TransferSettings
from tests.evidence import Evidence
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation
from tests.service.fake_router import fake_router
from tests.service.worker_rig import until, worker_rig

NUM_TRANSFERS = 3


async def check_stalled_pass(lease_s: float, stall_s: float, evidence: Evidence) -> None:
    """State how many transfers lost their lease in a stall, and hold the tokens against what they must be."""
    settings = TransferSettings(transports=("grpc",), lease_s=lease_s)
    async with worker_rig(settings=settings) as rig, fake_router(rig) as router:
        rig.prefill.runner.close_gate_after = 1  # with the first chunks, the transfers are open
        prompts = [[i, *range(1, 40)] for i in range(NUM_TRANSFERS)]
        running = [
            asyncio.create_task(router.run(make_request(f"r{i}", prompt, max_new_tokens=6)))
            for i, prompt in enumerate(prompts)
        ]
        await until(lambda: not rig.prefill.runner.gate.is_set())
        done, _ = await asyncio.wait(running, timeout=stall_s)
        num_early = NUM_TRANSFERS - rig.decode_service.num_sequences + len(done)
        rig.prefill.runner.gate.set()
        results = await asyncio.gather(*running)
        assert results == [fake_continuation(prompt, 6) for prompt in prompts]
    evidence(
        "R8",
        f"early frees in a forward pass stalled for {stall_s:g} s",
        f"{num_early} of {NUM_TRANSFERS} (lease {lease_s:g} s)",
        target="0",
        ok=num_early == 0,
    )
