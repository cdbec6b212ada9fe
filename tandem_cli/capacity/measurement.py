"""Measures this machine and the engine on it, without a mesh.

Bandwidth is measured by summing a large array, on all requested cores. Arithmetic is measured with the
engine, on a prompt for a small model with wide layers. The rates therefore contain the efficiency of the engine, and
predictions depend only on the shape of a model.

`EngineSteps` times the prefill of a prompt, and decode steps of a given batch. Weights are random if the folder has
none, which does not affect the time. Prompts are distinct, so that no KV is shared.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from decode_worker.settings import DecodeSettings
from engine.compiled_code import noticing_compilation
from engine.cores import threads_born_on
from engine.engine import StepResult
from engine.kernels.cpu.machine import knows_bf16
from engine.kernels.cpu.threads.phases import PHASES, cycles_per_ms
from engine.model_runner import ModelRunner
from engine.models.read_config import load_decoder_config
from engine.sequence import SequenceState
from engine.settings import graph_sizes
from mesh.domain.request import SamplingParams, SequenceSpec, mint_id
from tandem_cli.capacity.model_size import model_size
from tandem_cli.capacity.roofline import Capacity, Device, DeviceRates, Precision
from tandem_cli.model_files.model_folders import load_format_of, write_without_weights
from worker.load_engine import LoadedEngine, load_engine, load_runner_with_ranks
from worker.runner_settings import EngineLimits

_NUM_STEPS = 16
_ARRAY_BYTES = 256 * 2**20  # several times the largest cache
_REPEATS = 5
_PROMPT_TOKENS = 256
_MAX_CHUNK_TOKENS = 2048
_WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}


def clock_for(num_threads: int) -> Callable[[], float]:
    """A clock in seconds. With one thread it is the CPU time of that thread, which other load on the machine disturbs
    less than wall-clock time."""
    return time.thread_time if num_threads == 1 else time.perf_counter


def _tell() -> None:
    sys.stderr.write("tandem: compiles kernels for this arithmetic and CPU, for up to a minute; later runs find them\n")


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """The steps to measure: prompts of `prompt_tokens` tokens, and decode steps of up to `max_batch` sequences, each of
    which starts with `context_tokens` tokens. The engine has `num_threads` threads, in `num_ranks` ranks."""

    model_dir: Path
    quantize: str
    max_batch: int
    prompt_tokens: int = 256
    context_tokens: int = 256
    num_threads: int = 1
    kv_dtype: str = "auto"
    num_ranks: int = 1
    dtype: str = "auto"
    enforce_eager: bool = False

    @property
    def max_context_tokens(self) -> int:
        """Length of the longest sequence. All sequences must run before the first one finishes."""
        return max(self.prompt_tokens, self.context_tokens) + 2 * _NUM_STEPS + self.max_batch


class PhaseClock:
    """Reads the phase times of a compiled runner. Runners that are not compiled have one phase only."""

    def __init__(self, runner: object) -> None:
        self._phase_cycles = runner.phase_cycles if isinstance(runner, ModelRunner) else None
        self._cycles_per_ms = cycles_per_ms() if self._phase_cycles is not None else 0.0

    def start(self) -> None:
        """Reset the phase counters, before the steps to measure."""
        if self._phase_cycles is not None:
            self._phase_cycles[:] = 0

    def phases_ms(self, step_ms: float, num_steps: int) -> dict[str, float]:
        """Milliseconds of each phase of a step. "everything else" is the remainder of `step_ms`."""
        if self._phase_cycles is None:
            return {"everything": step_ms}
        phases = self._phase_cycles[: len(PHASES)] / num_steps / self._cycles_per_ms
        return {**dict(zip(PHASES, phases.tolist(), strict=True)), "everything else": step_ms - float(phases.sum())}


class EngineSteps:
    """One engine, driven step by step. Times come from `clock_for` the number of threads."""

    def __init__(self, workload: StepWorkload) -> None:
        self._workload = workload
        settings = DecodeSettings(
            model=str(workload.model_dir),
            registry_address="none",
            load_format=load_format_of(workload.model_dir),
            dtype=workload.dtype,
            quantize=workload.quantize,
            enforce_eager=workload.enforce_eager,
            prefix_caching=False,
            num_threads=workload.num_threads,
            kv_dtype=workload.kv_dtype,
            tensor_parallel=str(workload.num_ranks),
        )
        kv_tokens = (workload.max_batch + 1) * (workload.max_context_tokens + 2 * settings.block_size)
        max_batch_tokens = max(512, min(workload.prompt_tokens, _MAX_CHUNK_TOKENS) + workload.max_batch)
        graphs = graph_sizes(settings.cuda_graphs, workload.max_batch)
        limits = EngineLimits(max_batch_tokens, workload.max_batch, kv_tokens, graph_sizes=graphs)
        # Several ranks divide the process's cores.
        with noticing_compilation(_tell), threads_born_on(tuple(os.sched_getaffinity(0))):
            self._loaded: LoadedEngine = load_engine(settings, limits, load=load_runner_with_ranks)
            self._cores = tuple(os.sched_getaffinity(0))
        self._engine = self._loaded.engine()
        self._clock = clock_for(workload.num_threads)
        self._rng = random.Random(0)
        self._phases_ms: dict[str, float] = {}
        self._phase_clock = PhaseClock(self._loaded.runner)

    @property
    def kv_bytes_per_token(self) -> int:
        layout = self._loaded.runner.kv_cache.layout
        return layout.groups.count * layout.block_bytes // layout.block_size

    def prompt_ms(self) -> float:
        """Milliseconds of the prefill of one prompt."""
        with threads_born_on(self._cores):
            return self._prompt_ms()

    def decode_ms(self, batch: int) -> float:
        """Median milliseconds of a decode step with `batch` sequences."""
        with threads_born_on(self._cores):
            return self._decode_ms(batch)

    def take_phases_ms(self) -> dict[str, float]:
        """Milliseconds of each phase of the last prompt, or of the mean decode step, since the previous call."""
        self._phases_ms, phases_ms = {}, self._phases_ms
        return phases_ms

    def _prompt_ms(self) -> float:
        self._add(1, self._workload.prompt_tokens, num_new=1)
        self._phase_clock.start()
        total = self._finish()
        self._phases_ms = self._phase_clock.phases_ms(total, 1)
        return total

    def _decode_ms(self, batch: int) -> float:
        started: set[str] = set()
        self._add(batch, self._workload.context_tokens, num_new=2 * _NUM_STEPS + batch)
        while len(started) < batch:
            started |= {output.request_id for output in self._step().outputs}
        self._phase_clock.start()
        times = [self._step_ms() for _ in range(_NUM_STEPS)]
        self._phases_ms = self._phase_clock.phases_ms(statistics.mean(times), _NUM_STEPS)
        self._finish()
        return statistics.median(times)

    def _add(self, count: int, num_tokens: int, *, num_new: int) -> None:
        for _ in range(count):
            prompt = tuple(self._rng.randrange(3, 250) for _ in range(num_tokens))
            sampling = SamplingParams(max_new_tokens=num_new, seed=0, ignore_eos=True)
            self._loaded.scheduler.add(SequenceState(SequenceSpec(mint_id(), 0, prompt, len(prompt), sampling)))

    def _step_ms(self) -> float:
        started = self._clock()
        self._step()
        return 1000 * (self._clock() - started)

    def _step(self) -> StepResult:
        """Raises the error of a sequence that fails: its other steps would never come."""
        result = self._engine.step()
        for _, error in result.failed:
            raise error
        return result

    def _finish(self) -> float:
        total = 0.0
        while self._loaded.scheduler.has_work:
            total += self._step_ms()
        return total


def probe(num_threads: int) -> Device:
    """Measure this machine with `num_threads` threads, as a device to plan for. Takes a few seconds. Its memory is the
    memory that is free now.
    """
    bytes_per_s = read_bytes_per_s(num_threads)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_without_weights(Path(folder), _WIDE)
        float32 = engine_flops_per_s(model_dir, "float32", num_threads)
        rates = {
            "float32": float32,
            "int8": engine_flops_per_s(model_dir, "float32", num_threads, quantize="int8"),
            # CPUs multiply numbers of two bytes as fp32, unless they have instructions for bf16.
            "bfloat16": engine_flops_per_s(model_dir, "bfloat16", num_threads) if knows_bf16() else float32,
            "float16": float32,
        }
    name = f"this machine, {num_threads} thread{'' if num_threads == 1 else 's'}"
    return Device(name, psutil.virtual_memory().available, bytes_per_s, rates, "measured now")


def read_bytes_per_s(num_threads: int) -> float:
    """Memory bandwidth when summing an array: the best of several runs."""
    torch.set_num_threads(num_threads)
    array = torch.ones(_ARRAY_BYTES // 4)
    clock, times_s = clock_for(num_threads), []
    for _ in range(_REPEATS):
        started_s = clock()
        array.sum()
        times_s.append(clock() - started_s)
    return _ARRAY_BYTES / min(times_s)


def engine_flops_per_s(model_dir: Path, dtype: str, num_threads: int, *, quantize: str = "none") -> float:
    """Arithmetic of the engine in the prefill of a prompt: the best of several runs. The first run compiles kernels."""
    steps = EngineSteps(StepWorkload(model_dir, quantize, 1, _PROMPT_TOKENS, num_threads=num_threads, dtype=dtype))
    times_ms = [steps.prompt_ms() for _ in range(1 + _REPEATS)]
    size = model_size(load_decoder_config(model_dir))
    flops = Capacity(size, Precision("float32", "float32"), DeviceRates(0, 1, 1, 1)).prefill_flops(_PROMPT_TOKENS)
    return 1000 * flops / min(times_ms)
