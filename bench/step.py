"""How long one engine step takes, without a mesh: a prompt, and decode steps of several batch sizes.

    python -m bench.step [--shape 135m] [--quantize none int8] [--batch 1 8 32] [--repeats 3]

On one core, random weights; kinds of arithmetic by turns, medians. Times are those of the engine's thread on its core,
so that others on the machine disturb them less than a clock on the wall.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.shapes import write_shape
from decode_worker.settings import DecodeSettings
from engine.host import EngineHost, EngineLimits, build_host
from engine.sequence import Sequence
from mesh.domain.request import Request, mint_id
from mesh.domain.sampling import SamplingParams

_PROMPT_TOKENS = 256
_STEPS = 16


class Steps:
    """One engine with a model of random weights."""

    def __init__(self, model_dir: Path, quantize: str, max_batch: int) -> None:
        kv_tokens = 2 * max_batch * (_PROMPT_TOKENS + 2 * _STEPS)
        settings = DecodeSettings(
            model=str(model_dir),
            registry_address="none",
            load_format="dummy",
            quantize=quantize,
            prefix_caching=False,
            num_threads=1,
        )
        self._host: EngineHost = build_host(settings, EngineLimits(512, max_batch, kv_tokens))
        self._engine = self._host.engine()
        self._rng = random.Random(0)
        self._host.runner.prepare_thread()

    def prompt_ms(self) -> float:
        """To compute one prompt."""
        self._add(1, num_new=1)
        return self._finish()

    def decode_ms(self, batch: int) -> float:
        """Of a decode step: the median of some."""
        started: set[str] = set()
        self._add(batch, num_new=2 * _STEPS + batch)
        while len(started) < batch:
            started |= {output.request_id for output in self._engine.step().outputs}
        times = [self._step_ms() for _ in range(_STEPS)]
        self._finish()
        return statistics.median(times)

    def _add(self, count: int, num_new: int) -> None:
        for _ in range(count):
            prompt = tuple(self._rng.randrange(3, 250) for _ in range(_PROMPT_TOKENS))
            sampling = SamplingParams(max_new_tokens=num_new, seed=0, ignore_eos=True)
            self._host.scheduler.add(Sequence(Request(mint_id(), 0, prompt, len(prompt), sampling)))

    def _step_ms(self) -> float:
        begun = time.thread_time()
        self._engine.step()
        return 1000 * (time.thread_time() - begun)

    def _finish(self) -> float:
        total = 0.0
        while self._host.scheduler.has_work:
            total += self._step_ms()
        return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--quantize", nargs="+", default=["none", "int8"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(options.shape, Path(folder))
        engines = {kind: Steps(model_dir, kind, max(options.batch)) for kind in options.quantize}
        for _ in range(options.repeats):
            for kind, steps in engines.items():
                found.setdefault((kind, 0), []).append(steps.prompt_ms())
                for batch in options.batch:
                    found.setdefault((kind, batch), []).append(steps.decode_ms(batch))
    table = Table("arithmetic", f"prompt of {_PROMPT_TOKENS}, ms", *(f"step of {n}, ms" for n in options.batch))
    for kind in options.quantize:
        cells = (found[kind, batch] for batch in (0, *options.batch))
        table.add_row(kind, *(f"{statistics.median(ms):.1f} ({min(ms):.1f}..{max(ms):.1f})" for ms in cells))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
