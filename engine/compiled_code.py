"""Machine code of the CPU kernels: the key of what a model needs, how much of it was on disk, and compiling it ahead of
time.

`engine/kernels/cpu/compilation/compiler.py` keeps the code. Code depends on versions and the CPU (`code_version`) and
on the arithmetic of the model, not on sizes and the number of ranks, which are values at run time. Nothing is kept for
GPUs, where torch's own kernels run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import structlog
from numba.core import event

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.kernels.cpu.compilation.code_cache import CodeCache
from engine.kernels.cpu.compilation.compiler import code_folder, code_version, dispatchers
from engine.kernels.cpu.compilation.stored import JOB_NUMBERS
from engine.kernels.cpu.threads.mailbox import follow, mailboxes, post
from engine.loading.resolve import kv_layout, resolve, why_eager
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.model_config import ModelConfig
from engine.runner import Runner
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.kv import KVLayout
from mesh.domain.request import SamplingParams, SequenceSpec

log = structlog.get_logger(__name__)
_event: Any = event  # numba does not annotate it
_Listener: Any = _event.Listener

COMBINATIONS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"quantize": "int8", "kv_dtype": "float16"},
    {"quantize": "int8", "kv_dtype": "int8"},
    {"quantize": "int4", "kv_dtype": "int8"},
)
"""The types of weights and KV that workers have by default, and int8 KV. Others, such as int8 weights with fp32 KV, or
fp8, which dummy weights cannot have, are compiled when a worker needs them.
"""
_PROMPT_TOKENS = 20


@dataclass(frozen=True, slots=True)
class CodeCounts:
    """Functions whose machine code was read from disk, and those that were compiled, once per combination of types."""

    num_loaded: int
    num_compiled: int

    def since(self, before: "CodeCounts") -> "CodeCounts":
        return CodeCounts(self.num_loaded - before.num_loaded, self.num_compiled - before.num_compiled)


def code_counts() -> CodeCounts:
    """Count the functions that this process has loaded and compiled so far. Those that only compiled code calls are
    part of their callers.
    """
    stats = [dispatcher.stats for dispatcher in dispatchers]
    return CodeCounts(
        sum(sum(stat.cache_hits.values()) for stat in stats), sum(sum(stat.cache_misses.values()) for stat in stats)
    )


def why_not_kept() -> str | None:
    """The reason why some code that this process has compiled is not on disk, or None if all is."""
    if (folder := code_folder()) is None:
        return (
            "there is no folder for machine code, and none can be made: set NUMBA_CACHE_DIR to one that can be written"
        )
    failures = (dispatcher._cache.failure for dispatcher in dispatchers if isinstance(dispatcher._cache, CodeCache))
    return next((f"machine code cannot be kept in {folder}: {failure}" for failure in failures if failure), None)


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """Functions that were read from disk and that were compiled, and the seconds of both."""

    key: str
    num_loaded: int
    num_compiled: int
    seconds: float

    @property
    def is_hit(self) -> bool:
        return self.num_compiled == 0


def code_key(settings: RunnerSettings, config: AnyConfig, layout: KVLayout) -> str:
    """The key of the code that a model needs, but for its kinds of numbers in int4. `settings` are resolved."""
    if settings.device != "cpu":
        return settings.device.partition(":")[0]
    decoder = "encoder-decoder" if isinstance(config, EncoderDecoderConfig) else _decoder(settings, config, layout)
    arithmetic = (decoder, settings.encoding, settings.dtype, layout.dtype, bool(settings.adapters))
    return blake2b(f"{code_version()}:{arithmetic}".encode(), digest_size=8).hexdigest()


def _decoder(settings: RunnerSettings, config: ModelConfig, layout: KVLayout) -> str:
    decoder = "compiled" if why_eager(settings, config, layout) is None else "eager"
    recurrent = [] if config.recurrent is None else [config.recurrent.kind]
    special = {"experts": config.experts, "latent": config.latent, "per-layer": config.per_layer}
    return ", ".join([decoder, *recurrent, *(name for name, facts in special.items() if facts is not None)])


def compile_helpers() -> None:
    """Compile the functions that threads on lent cores call, or load them from disk. These threads start while requests
    are served, which must not wait for a compilation.
    """
    [box] = mailboxes(1)
    follow(box)  # returns, since nothing is posted
    post(np.zeros(JOB_NUMBERS, np.int64), box)


@contextmanager
def reported_code(settings: RunnerSettings, config: AnyConfig, layout: KVLayout) -> Iterator[None]:
    """Log what the block, which builds a decoder, has loaded from disk and compiled."""
    before, begun_s = code_counts(), time.perf_counter()
    yield
    counts, seconds = code_counts().since(before), time.perf_counter() - begun_s
    code = CompiledCode(code_key(settings, config, layout), counts.num_loaded, counts.num_compiled, seconds)
    about = {"loaded": code.num_loaded, "compiled": code.num_compiled, "seconds": round(seconds, 2)}
    log.info("compiled code", cache="hit" if code.is_hit else "miss", key=code.key, **about)
    if not code.is_hit and code_folder() is None:
        log.warning("compiled code cannot be kept", error=why_not_kept())


class _CompilationListener(_Listener):
    """Calls `tell` when the first function is about to be compiled."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: object) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, event: object) -> None:
        pass


@contextmanager
def noticing_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once, when the block begins to compile code that is not on disk."""
    with _event.install_listener("numba:compile", _CompilationListener(tell)):
        yield


def compile_code(settings: RunnerSettings, load: Callable[[RunnerSettings], Runner]) -> CompiledCode:
    """Compile all that a worker with these settings needs, or load it from disk: load the model, and run a prompt and a
    decode step, with KV for no more. Raises ConfigurationError.
    """
    before, begun_s = code_counts(), time.perf_counter()
    resolved, config = resolve(settings)
    layout = kv_layout(config, resolved)
    num_blocks = layout.num_entries_for(_PROMPT_TOKENS + 1)
    runner = load(replace(settings, num_blocks=num_blocks))
    try:
        _run(runner, num_blocks)
    finally:
        runner.close()
    counts = code_counts().since(before)
    key = code_key(resolved, config, layout)
    return CompiledCode(key, counts.num_loaded, counts.num_compiled, time.perf_counter() - begun_s)


def _run(runner: Runner, num_blocks: int) -> None:
    sampling = SamplingParams(max_new_tokens=2, seed=0, ignore_eos=True)
    sequence = SequenceState(SequenceSpec("compile", 0, tuple(range(1, _PROMPT_TOKENS + 1)), _PROMPT_TOKENS, sampling))
    sequence.block_table = list(range(num_blocks))
    for count in (_PROMPT_TOKENS, 1):
        batch = ScheduledBatch((ScheduledSequence(sequence, sequence.num_computed_tokens, count),))
        tokens = runner.begin(batch)()[0].tokens
        sequence.num_computed_tokens += count
        sequence.token_ids += [token.id for token in tokens]
