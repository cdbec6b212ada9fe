"""A router and real workers in this process, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import decode_worker.__main__
import prefill_worker.__main__
import tandem
from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from prefill_worker.settings import PrefillSettings
from router.__main__ import RouterProcess
from router.settings import RouterSettings


@asynccontextmanager
async def mesh_in_process(
    model_dir: Path,
    *,
    colocated: bool,
    load: Callable[..., ModelRunner] = load_model_runner,
    router: Mapping[str, Any],
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
) -> AsyncIterator[tandem.AsyncClient]:
    """Colocated, the decode worker is alone; else the prefill worker computes prompts from the first request on.
    `router`, `prefill` and `decode`: settings besides those that all such meshes have.
    """
    served = RouterProcess(RouterSettings(model=str(model_dir), port=0, registry_port=0, **router))
    await served.start()
    own: dict[str, Any] = {"model": str(model_dir), "registry_address": served.coordination.address, "device": "cpu"}
    own |= {"num_threads": 1, "kv_cache_bytes": 2**24, "drain_grace_s": 1.0}
    serving: list[Coroutine[Any, Any, None]] = [
        decode_worker.__main__.serve(DecodeSettings(worker_id="decode-0", **own, **decode), load)
    ]
    if not colocated:
        settings = PrefillSettings(worker_id="prefill-0", **own, **prefill)
        serving.append(prefill_worker.__main__.serve(settings, load))
    workers = [asyncio.create_task(each) for each in serving]
    try:
        async with tandem.AsyncClient(served.public.address) as client:
            await client.wait_ready()
            while not colocated and not await moves_kv(client):
                pass  # until the prefill worker is proven, the decode worker computes prompts itself
            yield client
    finally:
        await served.stop(0)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def moves_kv(client: tandem.AsyncClient) -> bool:
    """True if a tiny prompt is computed by the prefill worker."""
    return moved_kv([await client.generate(token_ids=[1], max_new_tokens=2, ignore_eos=True)])


def moved_kv(results: Sequence[tandem.Result]) -> bool:
    """KV moved for all of them, and none was replayed."""
    attempts = [result.timing.attempts for result in results]
    return all(len(each) == 1 and each[0].kv_transfer_ms is not None for each in attempts)
