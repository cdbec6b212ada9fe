"""Measures the engine without a mesh, in its own process on chosen cores, for comparison with a mesh.

    python -m bench.engine_alone MODEL_DIR CORES none|int8 NUM_CLIENTS...

Prints one line of JSON per number of clients.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from decode_worker.settings import DecodeSettings
from engine.loop import EngineLoop, LoopCallbacks, StepResult
from engine.sequence import SequenceState
from mesh.domain.request import Request, SamplingParams, mint_id
from tandem_cli.load_test.load import Measured, Workload, run_closed_loop
from worker.engine_host import EngineLimits, build_host


class EngineAlone:
    """Sends requests directly to an EngineLoop. Call `stop` at the end."""

    def __init__(self, model_dir: Path, quantize: str) -> None:
        settings = DecodeSettings(model=str(model_dir), registry_address="none", load_format="dummy", quantize=quantize)
        host = build_host(settings, EngineLimits(settings.step_tokens, settings.max_rolling_batch_size))
        self._engine = EngineLoop(host.engine(), LoopCallbacks(self._on_step, self._on_death))
        self._streams: dict[str, tuple[Callable[[], None], asyncio.Future[None]]] = {}
        self._engine.start()

    async def send(self, prompt: list[int], max_new_tokens: int, on_token: Callable[[], None]) -> int:
        """Run one request. Implements tandem_cli.load_test.load.Send."""
        sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0, ignore_eos=True)
        request = Request(mint_id(), 0, tuple(prompt), len(prompt), sampling)
        done = asyncio.get_running_loop().create_future()
        self._streams[request.request_id] = (on_token, done)
        await self._engine.call(lambda scheduler: scheduler.add(SequenceState(request)))
        await done
        return max_new_tokens

    def _on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            on_token, done = self._streams[output.request_id]
            on_token()
            if output.finish_reason is not None:
                done.set_result(None)

    def _on_death(self, error: BaseException) -> None:
        for _, done in self._streams.values():
            if not done.done():
                done.set_exception(error)

    async def stop(self) -> None:
        await self._engine.stop()


async def main(model_dir: Path, quantize: str, clients: list[int]) -> None:
    """Measure, and print one line per number of clients."""
    alone = EngineAlone(model_dir, quantize)
    await run_closed_loop(Workload(1, 1, 32, 8), alone.send)  # warm-up: compiles kernels, touches memory
    for num_clients in clients:
        print(to_json(await run_closed_loop(Workload(num_clients), alone.send)), flush=True)
    await alone.stop()


def to_json(measured: Measured) -> str:
    """A run as a line of JSON."""
    return json.dumps({name: getattr(measured, name) for name in ("duration_s", "num_tokens", "ttft_s", "gaps_s")})


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(core) for core in sys.argv[2].split(",")})
    asyncio.run(main(Path(sys.argv[1]), sys.argv[3], [int(number) for number in sys.argv[4:]]))
