"""Drives the engine without a mesh, step by step: how long a prompt takes, and a decode step of a given batch.

The weights are random where the folder has none: that changes no time. Prompts are distinct, so that no KV is shared.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decode_worker.settings import DecodeSettings
from engine.host import EngineHost, EngineLimits, build_host
from engine.sequence import Sequence
from mesh.domain.request import Request, mint_id
from mesh.domain.sampling import SamplingParams

_NUM_STEPS = 16


def clock_for(num_threads: int) -> Callable[[], float]:
    """Seconds. With one thread those of that thread on its core, which others on the machine disturb less than a clock
    on the wall."""
    return time.thread_time if num_threads == 1 else time.perf_counter


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What will be run: prompts of `prompt_tokens`, decode steps of at most `max_batch` sequences that have
    `context_tokens` tokens when they begin, on `num_threads` threads."""

    model_dir: Path
    quantize: str
    max_batch: int
    prompt_tokens: int = 256
    context_tokens: int = 256
    num_threads: int = 1

    @property
    def max_context_tokens(self) -> int:
        """Of the longest sequence: all are there before the first is finished."""
        return max(self.prompt_tokens, self.context_tokens) + 2 * _NUM_STEPS + self.max_batch


class EngineSteps:
    """One engine. Times are those of `clock_for` its number of threads."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        has_weights = any(plan.model_dir.glob("*.safetensors"))
        settings = DecodeSettings(
            model=str(plan.model_dir),
            registry_address="none",
            load_format="auto" if has_weights else "dummy",
            quantize=plan.quantize,
            prefix_caching=False,
            num_threads=plan.num_threads,
        )
        kv_tokens = (plan.max_batch + 1) * (plan.max_context_tokens + 2 * settings.block_size)
        max_batch_tokens = max(512, plan.prompt_tokens + plan.max_batch)
        self._host: EngineHost = build_host(settings, EngineLimits(max_batch_tokens, plan.max_batch, kv_tokens))
        self._engine = self._host.engine()
        self._clock = clock_for(plan.num_threads)
        self._rng = random.Random(0)
        self._host.runner.prepare_thread()

    def prompt_ms(self) -> float:
        """To compute one prompt."""
        self._add(1, self._plan.prompt_tokens, num_new=1)
        return self._finish()

    def decode_ms(self, batch: int) -> float:
        """Of a decode step: the median of some."""
        started: set[str] = set()
        self._add(batch, self._plan.context_tokens, num_new=2 * _NUM_STEPS + batch)
        while len(started) < batch:
            started |= {output.request_id for output in self._engine.step().outputs}
        times = [self._step_ms() for _ in range(_NUM_STEPS)]
        self._finish()
        return statistics.median(times)

    def _add(self, count: int, num_tokens: int, *, num_new: int) -> None:
        for _ in range(count):
            prompt = tuple(self._rng.randrange(3, 250) for _ in range(num_tokens))
            sampling = SamplingParams(max_new_tokens=num_new, seed=0, ignore_eos=True)
            self._host.scheduler.add(Sequence(Request(mint_id(), 0, prompt, len(prompt), sampling)))

    def _step_ms(self) -> float:
        begun = self._clock()
        self._engine.step()
        return 1000 * (self._clock() - begun)

    def _finish(self) -> float:
        total = 0.0
        while self._host.scheduler.has_work:
            total += self._step_ms()
        return total
