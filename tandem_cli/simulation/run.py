"""Runs a trace through a simulated mesh, and records what it observes."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mesh.domain.errors import MeshError, Overloaded
from mesh.domain.request import SamplingParams
from mesh.domain.worker import WorkerRole
from mesh.tasks import cancel
from router.settings import RouterSettings
from router.text.chat import TokenPrompt
from router.validation import GenerateParams
from tandem_cli.load_test.figures import Outcome, Record
from tandem_cli.simulation.mesh import SimulatedMesh, simulated_mesh, write_model
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.profile import MeshProfile
from tandem_cli.simulation.trace import Arrival
from tandem_cli.simulation.virtual_time import run_in_virtual_time
from tandem_cli.simulation.workers import hop_s

_NUM_SAMPLES = 500
_MIN_SAMPLE_S, _MAX_SAMPLE_S = 1.0, 60.0
_FIRST_ID, _NUM_IDS = 3, 250
_GAP_DIGITS = 5  # gaps are counted in steps of 0.01 ms

Watch = Callable[[SimulatedMesh, Observed], "asyncio.Task[None]"]
"""Starts a task beside the trace, such as a scaling rule. It is cancelled at the end; an error of its own is raised."""


class TraceRun:
    """One trace on one mesh."""

    def __init__(
        self, mesh: SimulatedMesh, arrivals: Sequence[Arrival], min_duration_s: float, on_done: Callable[[Record], None]
    ) -> None:
        self.observed = Observed()
        self._mesh = mesh
        self._arrivals = arrivals
        self._min_duration_s = min_duration_s
        self._on_done = on_done
        self._hop_s = hop_s(mesh.profile)
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        # All prompts are beginnings of one: nothing is found in prefix caches, which are off.
        num_ids = min(max(arrival.input_tokens for arrival in arrivals), mesh.profile.decode.max_model_len)
        self._ids = tuple(_FIRST_ID + number % _NUM_IDS for number in range(num_ids))

    async def run(self) -> Observed:
        """Send every request when it is due; return when all have ended, but not before the least duration."""
        sampling = asyncio.create_task(self._sample())
        try:
            async with asyncio.TaskGroup() as requests:
                for arrival in self._arrivals:
                    await asyncio.sleep(self._started_s + arrival.at_s - self._loop.time())
                    requests.create_task(self._send(arrival))
            await asyncio.sleep(self._min_duration_s - self._now_s())
        finally:
            sampling.cancel()
        self.observed.duration_s = self._now_s()
        self.observed.samples.append(self._mesh.sample(self._now_s()))
        self.observed.num_replays = self._mesh.journal.num_replays
        self.observed.num_switches = self._mesh.num_switches
        return self.observed

    def _now_s(self) -> float:
        return self._loop.time() - self._started_s

    async def _send(self, arrival: Arrival) -> None:
        record = Record(arrival.at_s, arrival.output_tokens, input_tokens=arrival.input_tokens)
        self.observed.records.append(record)
        try:
            await self._read_answer(arrival, record)
            record.outcome = Outcome.OK
        except Overloaded as error:
            record.outcome, record.error = Outcome.REFUSED, type(error).__name__
        except MeshError as error:
            record.outcome, record.error = Outcome.ERROR, f"{type(error).__name__}: {error}"
        record.end_s = self._now_s()
        self._on_done(record)

    async def _read_answer(self, arrival: Arrival, record: Record) -> None:
        await asyncio.sleep(self._hop_s)
        sampling = SamplingParams(max_new_tokens=arrival.output_tokens, seed=0, ignore_eos=True)
        num_ids = arrival.input_tokens
        ids = self._ids[:num_ids] if num_ids <= len(self._ids) else range(num_ids)  # too many: refused
        params = GenerateParams(TokenPrompt(ids), sampling)
        answer = await self._mesh.router.service.generate(params, None)
        async for delta in answer.deltas():
            if delta.events is not None and delta.events.tokens:
                self._count(record, len(delta.events.tokens))

    def _count(self, record: Record, num_tokens: int) -> None:
        """Tokens of equal steps come at once: their gaps are the mean since the last ones."""
        now_s = self._now_s()
        if record.token_s:
            gap_s = (now_s - record.token_s[-1]) / num_tokens
            self.observed.gaps[round(gap_s, _GAP_DIGITS)] += num_tokens
            record.token_s = [record.token_s[0], now_s]
        else:
            record.token_s = [now_s]
        record.num_tokens += num_tokens

    async def _sample(self) -> None:
        sample_s = min(max(self._arrivals[-1].at_s / _NUM_SAMPLES, _MIN_SAMPLE_S), _MAX_SAMPLE_S)
        while True:
            self.observed.samples.append(self._mesh.sample(self._now_s()))
            await asyncio.sleep(sample_s)


def simulate(
    profile: MeshProfile,
    settings: RouterSettings,
    arrivals: Sequence[Arrival],
    num_workers: tuple[int, int],
    *,
    min_duration_s: float = 0.0,
    watch: Watch | None = None,
    on_done: Callable[[Record], None] = lambda _: None,
) -> Observed:
    """Run the trace on prefill and decode workers, `num_workers` of each at the start. The result is the same for equal
    arguments. Raises ConfigurationError.
    """

    async def main(model_dir: str) -> Observed:
        async with simulated_mesh(profile, replace(settings, model=model_dir), *num_workers) as mesh:
            run = TraceRun(mesh, arrivals, min_duration_s, on_done)
            beside = watch(mesh, run.observed) if watch is not None else None
            try:
                observed = await run.run()
            finally:
                if beside is not None:
                    await cancel(beside)
        if watch is None:
            for role, count in zip((WorkerRole.PREFILL, WorkerRole.DECODE), num_workers, strict=True):
                observed.paid_worker_s[role] = count * observed.duration_s
        return observed

    with tempfile.TemporaryDirectory(prefix="tandem-simulate-") as folder:
        write_model(Path(folder), min(profile.prefill.max_model_len, profile.decode.max_model_len))
        return run_in_virtual_time(main(folder))
