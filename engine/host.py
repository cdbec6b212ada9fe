"""Builds the engine of a worker from its settings: model, KV cache, scheduler, and what the mesh is told about them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog
import torch

from engine.batch import LayerHook, Runner
from engine.block_pool import BlockPool
from engine.kv_cache import KVCache
from engine.load import RunnerSettings, kv_layout, load_model_runner
from engine.loop import Engine
from engine.models.config import AnyConfig, load_config
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation.load import draft_block_bytes, load_speculator
from engine.speculation.settings import NO_SPECULATION, Speculation
from engine.speculation.speculator import Speculator
from engine.weights import Progress
from mesh.domain.errors import ConfigurationError
from mesh.domain.request import mint_id
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.model_files import tokenizer_fingerprint
from mesh.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a role asks of its engine: tokens of a step, sequences with a seat, tokens of KV (None: what memory gives),
    and guesses.
    """

    max_batch_tokens: int
    max_num_seqs: int
    max_kv_tokens: int | None = None
    speculation: Speculation = NO_SPECULATION


class HostedRunner(Runner, Protocol):
    """A runner with the cache it fills. Plug point: ModelRunner, and bench.paced.PacedRunner."""

    @property
    def kv_cache(self) -> KVCache:
        """Where KV is."""
        ...

    @property
    def attention_backend(self) -> str:
        """For the log."""
        ...


Load = Callable[[RunnerSettings, Progress | None], HostedRunner]


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A loaded model with its scheduler, ready to be given a thread."""

    settings: WorkerSettings
    runner: HostedRunner
    scheduler: Scheduler
    speculation: Speculation
    speculator: Speculator | None

    def engine(self, on_layers: LayerHook | None = None) -> Engine:
        """Scheduler, runner and guesses, joined."""
        return Engine(self.scheduler, self.runner, on_layers, self.settings.compute_cores(), self.speculator)

    def worker_info(self, role: WorkerRole) -> WorkerInfo:
        """What the mesh is told. The address is known once the server listens."""
        config = self.scheduler.config
        return WorkerInfo(
            worker_id=self.settings.identity,
            incarnation=mint_id(),
            role=role,
            address="",
            model=self.settings.served_name,
            tokenizer_fingerprint=tokenizer_fingerprint(Path(self.settings.model)),
            layout=self.runner.kv_cache.layout,
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
            num_blocks=self.scheduler.pool.num_blocks,
            max_model_len=config.max_model_len,
            device=str(self.runner.kv_cache.tensor.device),
            pid=os.getpid(),
            speculative=self.speculation.kind,
        )


def build_host(
    settings: WorkerSettings,
    limits: EngineLimits,
    on_progress: Progress | None = None,
    load: Load = load_model_runner,
) -> EngineHost:
    """Load the model and size the KV cache. Raises ConfigurationError that says what is wrong."""
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    config = load_config(Path(settings.model))
    max_model_len = _max_model_len(settings, config)
    runner_settings = _runner_settings(settings, limits, max_model_len)
    runner = load(runner_settings, on_progress)
    num_blocks = runner.kv_cache.num_blocks
    speculator = load_speculator(
        limits.speculation,
        replace(runner_settings, num_blocks=num_blocks),
        lambda draft: load(draft, None),
        max_batch_tokens=limits.max_batch_tokens,
    )
    scheduler_config = SchedulerConfig(
        block_size=settings.block_size,
        max_batch_tokens=limits.max_batch_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        # Some position encodings depend on the length of the prompt: then equal prefixes do not have equal KV.
        prefix_caching=settings.prefix_caching and config.shareable_prefixes,
        whole_prompts=config.whole_prompts,
    )
    log.info(
        "engine ready",
        num_blocks=num_blocks,
        kv_tokens=num_blocks * settings.block_size,
        kv_bytes=num_blocks * (runner.kv_cache.layout.block_bytes + runner_settings.companion_block_bytes),
        attention=runner.attention_backend,
        threads=torch.get_num_threads(),
        speculative=limits.speculation.kind,
    )
    scheduler = Scheduler(scheduler_config, BlockPool(num_blocks))
    return EngineHost(settings, runner, scheduler, limits.speculation, speculator)


def _runner_settings(settings: WorkerSettings, limits: EngineLimits, max_model_len: int) -> RunnerSettings:
    wanted = RunnerSettings(
        model_dir=Path(settings.model),
        device=settings.device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        quantize=settings.quantize,
        kv_dtype=settings.kv_dtype,
        enforce_eager=settings.enforce_eager,
        block_size=settings.block_size,
        memory_fraction=settings.kv_memory_fraction,
        layers_per_group=settings.layers_per_group,
        group_bytes=settings.layer_group_bytes,
        # More than full seats could ever use would only be slower to look after.
        max_blocks=limits.max_num_seqs * (max_model_len // settings.block_size + 2),
    )
    wanted = replace(wanted, companion_block_bytes=draft_block_bytes(limits.speculation, wanted))
    return replace(wanted, num_blocks=_asked_blocks(settings, limits, wanted))


def _max_model_len(settings: WorkerSettings, config: AnyConfig) -> int:
    longest = config.max_model_len
    if config.max_position_embeddings is not None and settings.max_model_len > longest:
        raise ConfigurationError(f"max_model_len {settings.max_model_len} is over the model's {longest} positions")
    return settings.max_model_len or longest


def _asked_blocks(settings: WorkerSettings, limits: EngineLimits, wanted: RunnerSettings) -> int | None:
    """KV blocks the operator has asked for, in tokens or bytes; None leaves it to memory."""
    layout = kv_layout(load_config(wanted.model_dir), wanted)
    block_bytes = layout.block_bytes + wanted.companion_block_bytes
    if limits.max_kv_tokens:
        num_blocks = limits.max_kv_tokens // layout.block_size
    elif settings.kv_cache_bytes:
        num_blocks = settings.kv_cache_bytes // block_bytes
    else:
        return None
    if num_blocks < 2:
        raise ConfigurationError(f"the KV cache would have {num_blocks} blocks of {block_bytes} bytes: give it more")
    return num_blocks
