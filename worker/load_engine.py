"""Builds a worker's engine from its settings: model, KV cache and scheduler; describes it to the mesh.

A model is loaded by these functions, from the outside in:

    download_and_load_engine     downloads it if needed, limits the time, reports progress and memory
      load_engine                runner_settings.py; then the runner, the drafter, the scheduler      -> LoadedEngine
        load_runner_with_ranks   ends the process when a rank ends; load tests pass another `LoadRunner` instead
          load_ranked_runner     engine/ranks/launch.py: starts ranks that share memory; goes straight on without
            load_model_runner    engine/loading/load_runner.py: weights, KV cache, attention of one rank  -> ModelRunner
        _load_runner_with_remote_ranks   in place of the former on GPUs and with rank_listen: starts or awaits the ranks
          load_remote_runner             engine/ranks/remote.py: rank 0 of these                          -> ModelRunner
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
import torch

from checkpoint.adapters import AdapterFiles
from checkpoint.partition_manifest import WeightFiles
from checkpoint.tokenizer_fingerprint import tokenizer_fingerprint
from engine.compiled_code import noticing_compilation
from engine.devices import find_device, first_device, rank_devices
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.kv.disk import BlockFiles, DiskCache, private_folder
from engine.kv.page_commits import PageCommitter
from engine.kv.sharded_cache import AnyKVCache
from engine.loading.load_phases import measured_load, rounded
from engine.loading.load_runner import load_model_runner, load_speculator
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.models.read_config import load_config
from engine.ranks.launch import load_ranked_runner
from engine.ranks.remote import load_remote_runner
from engine.runner import Runner
from engine.runner_settings import RunnerSettings
from engine.scheduler import Scheduler
from engine.settings import KVMemorySettings, SchedulerConfig
from engine.speculation.speculator import Speculator
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from mesh.domain.request import mint_id
from mesh.domain.worker import Adapter, WorkerInfo, WorkerRole
from mesh.logs import flush_outputs, log_format
from mesh.process import tell_parent
from worker.load_watch import STALLED_S, LoadProgress, limited, peak_memory
from worker.ranks.connection import RankConnection
from worker.ranks.listener import RankListener
from worker.ranks.local import LocalRanks, share_memory
from worker.runner_settings import EngineLimits, longest_sequence, make_runner_settings
from worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


class LoadedRunner(Runner, Protocol):
    """A runner with its KV cache. Plug point: ModelRunner, and tandem_cli.load_test.paced.PacedRunner."""

    @property
    def kv_cache(self) -> AnyKVCache:
        """The cache that the runner fills."""
        ...

    @property
    def attention_backend(self) -> str:
        """Name of the attention implementation, for the log."""
        ...

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        ...


LoadRunner = Callable[[RunnerSettings, Progress | None], LoadedRunner]
"""Loads a runner, and reports the loaded fraction of its weights."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model with its scheduler, ready to run as an Engine."""

    settings: WorkerSettings
    runner: LoadedRunner
    scheduler: Scheduler
    speculator: Speculator | None
    degrees: Degrees
    kv_disk: DiskCache | None
    adapters: tuple[AdapterFiles, ...]
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, see engine.loading.load_phases; "other" is what no phase counts."""
    rank_connections: tuple[RankConnection, ...] = ()
    """To ranks that share no memory with the leader, and move their KV themselves."""

    def engine(self) -> Engine:
        """Scheduler, runner and speculator, joined."""
        return Engine(self.scheduler, self.runner, cores=self.settings.compute_cores(), speculator=self.speculator)

    def worker_info(self, role: WorkerRole, limits: EngineLimits, *, switchable: bool = False) -> WorkerInfo:
        """The worker's registration in a role with these limits. Its address is empty until the server listens."""
        cache = self.runner.kv_cache
        return WorkerInfo(
            worker_id=self.settings.identity,
            incarnation=mint_id(),
            role=role,
            address="",
            model=self.settings.served_name,
            tokenizer_fingerprint=tokenizer_fingerprint(Path(self.settings.model)),
            layout=cache.layout,
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_num_seqs,
            num_blocks=self.scheduler.pool.num_blocks - cache.layout.num_unused,
            max_model_len=self.scheduler.config.max_model_len,
            device=str(cache.tensor.device),
            pid=os.getpid(),
            speculative=limits.speculation.kind,
            tensor_parallel=self.degrees.tensor,
            pipeline_parallel=self.degrees.pipeline,
            adapters=tuple(Adapter(adapter.name, adapter.digest) for adapter in self.adapters),
            switchable=switchable,
        )


def load_engine(
    settings: WorkerSettings,
    limits: EngineLimits,
    on_progress: Progress | None = None,
    load: LoadRunner = load_model_runner,
) -> LoadedEngine:
    """Load the model and size the KV cache. Raises ConfigurationError."""
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    config = load_config(Path(settings.model), settings.rope_override())
    max_model_len = longest_sequence(settings, config)
    runner_settings = make_runner_settings(settings, limits, max_model_len)
    adapters, weights = runner_settings.adapters, _weights_of_kv(settings)
    runner = load(runner_settings, on_progress)
    num_blocks, layout = runner.kv_cache.num_blocks, runner.kv_cache.layout
    speculator = load_speculator(
        limits.speculation,
        # No memory of its own: its KV is already part of companion_block_bytes.
        replace(runner_settings, num_blocks=num_blocks, kv_memory=KVMemorySettings()),
        runner,
        lambda draft: load(draft, None),
        max_batch_tokens=limits.max_batch_tokens,
    )
    scheduler_config = SchedulerConfig(
        block_size=settings.block_size,
        max_batch_tokens=limits.max_batch_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=settings.prefix_caching and config.shareable_prefixes,
        whole_prompts=config.whole_prompts,
        max_in_flight=runner_settings.pipeline_parallel,
        max_step_stretch=limits.max_step_stretch,
        adapters=frozenset(adapter.digest for adapter in adapters),
        state_blocks=layout.state_blocks,
        windows=layout.windows,
        windows_are_chunks=layout.windows_are_chunks,
    )
    _announce_adapters(settings, adapters)
    log.info(
        "engine ready",
        num_blocks=num_blocks,
        kv_tokens=layout.max_tokens_in(num_blocks, limits.max_batch_tokens, num_blocks * settings.block_size),
        kv_bytes=num_blocks * (layout.block_bytes + runner_settings.companion_block_bytes),
        attention=runner.attention_backend,
        threads=torch.get_num_threads(),
        ranks=str(runner_settings.degrees),
        speculative=limits.speculation.kind,
    )
    disk = None if weights is None else _kv_disk(settings, scheduler_config, runner, weights)
    scheduler = _scheduler(scheduler_config, runner.kv_cache, disk)
    return LoadedEngine(settings, runner, scheduler, speculator, runner_settings.degrees, disk, adapters)


def _scheduler(config: SchedulerConfig, cache: AnyKVCache, disk: DiskCache | None) -> Scheduler:
    on_first_use = PageCommitter(cache).use if cache.tensor.is_cpu else None
    pool = BlockPool(cache.num_blocks, None if disk is None else disk.evicted, on_first_use)
    return Scheduler(config, pool, disk)


def _announce_adapters(settings: WorkerSettings, adapters: Sequence[AdapterFiles]) -> None:
    """Log the adapters. A base model of another name is no proof of a mistake: folders are renamed."""
    folders = (part.removeprefix("models--") for part in settings.model.lower().split("/"))
    names = {settings.served_name.lower(), *folders}
    for adapter in adapters:
        facts = {"rank": adapter.rank, "digest": adapter.digest, "parts_not_served": adapter.other_parts}
        log.info("adapter known", name=adapter.name, **facts)
        base = adapter.base.lower().rstrip("/")
        if base and not {base.rpartition("/")[2], base.replace("/", "--")} & names:
            log.warning(
                "an adapter names another base model", name=adapter.name, base=adapter.base, model=settings.model
            )


def _weights_of_kv(settings: WorkerSettings) -> WeightFiles | None:
    """The weights that decide which KV on disk is this model's; None without `kv_disk`. Called before the model is
    loaded, which may take minutes. Raises ConfigurationError, also if the folder cannot be used.
    """
    if not settings.kv_disk:
        return None
    private_folder(Path(settings.kv_disk))
    return WeightFiles.read(Path(settings.model))


def _kv_disk(
    settings: WorkerSettings, config: SchedulerConfig, runner: LoadedRunner, weights: WeightFiles
) -> DiskCache | None:
    """None for models whose prompts share no KV. Raises ConfigurationError.

    The layout's fingerprint has a sample of the weights, which serves to compare workers of one time. A folder outlives
    many changes of a model, so its name has all bytes.
    """
    if config.whole_prompts or not config.prefix_caching:
        log.warning("kv_disk is not used: prompts of this model share no KV", model=settings.model)
        return None
    weights.require_unchanged()
    layout, max_bytes = runner.kv_cache.layout, int(settings.kv_disk_gib * (1 << 30))
    planes = ":keys are values" if layout.keys_are_values else ""
    kind = f"{layout!r}{planes}{layout.windows or ''}:{weights.digest}:{runner.attention_backend}"
    return DiskCache(BlockFiles(Path(settings.kv_disk), kind, layout.block_bytes, max_bytes), runner.kv_cache)


def download_and_load_engine(settings: WorkerSettings, limits: EngineLimits, load: LoadRunner) -> LoadedEngine:
    """Find or download the model's folder and build the engine. Raises ConfigurationError.

    Ends the process if loading takes longer than `model_loading_timeout`, or, without that, makes no progress. The
    download does not count.
    """
    located = settings.located(lambda fraction: tell_parent("downloading", fraction=fraction))
    begun_s = time.monotonic()
    progress = LoadProgress()
    waiting_s = settings.rank_timeout_s if settings.rank_listen else 0.0
    listeners: list[RankListener] = []
    if settings.rank_listen or _have_own_memory(settings):
        load = partial(_load_runner_with_remote_ranks, settings, listeners, progress, load)
    with (
        limited(settings.model_loading_timeout, progress, waiting_s=waiting_s),
        measured_load() as phases,
        noticing_compilation(lambda: tell_parent("compiling")),
    ):
        loaded = load_engine(located, limits, progress, load)
    seconds = time.monotonic() - begun_s
    phases["other"] = max(0.0, seconds - sum(phases.values()))
    memory_share = loaded.runner.kv_cache.memory_share
    if memory_share is not None:
        log.info("KV memory", summary=memory_share.summary)
        tell_parent("kv_memory", summary=memory_share.summary)
    about = {"folder": located.model, "seconds": round(seconds, 2), "phases": rounded(phases)}
    log.info("model loaded", **about, **peak_memory(loaded.runner.kv_cache.tensor.device))
    connections = tuple(connection for listener in listeners for connection in listener.connections)
    return replace(loaded, load_seconds=phases, rank_connections=connections)


def load_runner_with_ranks(settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
    """Load a model into this process and its other ranks. From then on the process ends when one of them ends."""
    level, is_json = log_format()
    return load_ranked_runner(settings, on_progress, on_lost=_end, log_level=level, log_json=is_json)


def _have_own_memory(settings: WorkerSettings) -> bool:
    """True if ranks of this machine share no memory."""
    is_shared = {"shared": True, "own": False}.get(settings.rank_memory)
    return find_device(first_device(settings.device)).type != "cpu" if is_shared is None else not is_shared


def _load_runner_with_remote_ranks(
    settings: WorkerSettings,
    listeners: list[RankListener],
    progress: LoadProgress,
    load: LoadRunner,
    runner_settings: RunnerSettings,
    on_progress: Progress | None = None,
) -> LoadedRunner:
    """As `load`, which loads models of one rank, such as a draft model. Other ranks dial in to a listener, which is
    added to `listeners`: processes that it starts on this machine's devices, or, with rank_listen, from other machines.
    """
    degrees = runner_settings.degrees
    if degrees.num_ranks == 1:
        return load(runner_settings, on_progress)
    local, listen, timeout_s = None, None, settings.rank_timeout_s
    if settings.kv_disk:
        raise ConfigurationError("kv_disk does not work with several ranks here: the KV lies in several processes")
    if not settings.rank_listen:
        devices = rank_devices(settings.device, degrees)
        memory = share_memory(runner_settings.kv_memory, devices)
        runner_settings = replace(runner_settings, device=devices[0], kv_memory=memory)
        local = LocalRanks(settings, runner_settings.model_dir, memory, devices)
        listen, timeout_s = local.listen, settings.model_loading_timeout or STALLED_S
    ranks = RankListener(
        listen or settings.listen_for_ranks(),
        degrees,
        timeout_s=timeout_s,
        on_leaving=lambda: os.kill(os.getpid(), signal.SIGTERM),
        on_progress=progress.note_rank,
        local=local,
    )
    listeners.append(ranks)
    if local is None:
        tell_parent("waiting_for_ranks", port=ranks.port)
    runner = load_remote_runner(runner_settings, ranks, on_progress, on_lost=_end)
    runner.rank_pids = () if local is None else local.pids
    return runner


def _end(reason: str) -> None:
    log.critical("a rank is lost, exiting", reason=reason)
    flush_outputs()
    os._exit(1)
