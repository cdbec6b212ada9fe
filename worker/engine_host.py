"""Builds a worker's engine from its settings: model, KV cache and scheduler; describes it to the mesh.

A model is loaded by these functions, from the outside in:

    download_and_load_host       downloads it if needed, limits the time, reports progress and memory
      load_engine_host           settings of the runner; then the runner, the drafter, the scheduler       -> EngineHost
        load_runner_with_ranks   ends the process when a rank ends; load tests pass another `LoadRunner` instead
          load_ranked_runner     engine/ranks/launch.py: starts ranks that share memory; goes straight on without
            load_model_runner    engine/load_runner.py: weights, KV cache, attention of one rank          -> ModelRunner
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
from checkpoint.model_files import tokenizer_fingerprint
from checkpoint.partition_manifest import WeightFiles
from engine.block_pool import BlockPool
from engine.devices import find_device, first_device, rank_devices
from engine.kv_disk import BlockFiles, DiskCache, private_folder
from engine.kv_memory import KVMemorySettings
from engine.load_runner import draft_block_bytes, draft_bytes, load_model_runner, load_speculator
from engine.load_times import measured_load, rounded
from engine.loop import Engine
from engine.model_runner import ModelRunner
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.read_config import load_config
from engine.ranks.launch import fitting_ranks, load_ranked_runner
from engine.ranks.remote import load_remote_runner
from engine.resolve import kv_layout
from engine.runner import Runner
from engine.runner_settings import RunnerSettings
from engine.scheduler import Scheduler
from engine.settings import NO_GRAPHS, GraphSettings, SchedulerConfig, Speculation
from engine.sharded_kv_cache import AnyKVCache
from engine.speculation.speculator import Speculator
from engine.weights import Progress
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees, KVLayout
from mesh.domain.request import mint_id
from mesh.domain.worker import Adapter, WorkerInfo, WorkerRole
from mesh.logs import flush_outputs, log_format
from mesh.process import announce
from worker.load_watch import LoadProgress, limited, peak_memory
from worker.ranks.link import RankLink
from worker.ranks.listener import RankListener
from worker.ranks.local import LocalRanks, share_memory
from worker.role import EngineLimits
from worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


class HostedRunner(Runner, Protocol):
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


LoadRunner = Callable[[RunnerSettings, Progress | None], HostedRunner]
"""Loads a runner, and reports the loaded fraction of its weights."""


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A loaded model with its scheduler, ready to run as an Engine."""

    settings: WorkerSettings
    runner: HostedRunner
    scheduler: Scheduler
    speculation: Speculation
    speculator: Speculator | None
    degrees: Degrees = field(default_factory=Degrees)
    kv_disk: DiskCache | None = None
    adapters: tuple[AdapterFiles, ...] = ()
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, see engine.load_times; "other" is what no phase counts."""
    rank_links: tuple[RankLink, ...] = ()
    """To ranks that share no memory with the leader, and move their KV themselves."""

    def engine(self) -> Engine:
        """Scheduler, runner and speculator, joined."""
        return Engine(self.scheduler, self.runner, None, self.settings.compute_cores(), self.speculator)

    def worker_info(self, role: WorkerRole) -> WorkerInfo:
        """Return the worker's registration. Its address is empty until the server listens."""
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
            num_blocks=self.scheduler.pool.num_blocks - self.runner.kv_cache.layout.num_unused,
            max_model_len=config.max_model_len,
            device=str(self.runner.kv_cache.tensor.device),
            pid=os.getpid(),
            speculative=self.speculation.kind,
            tensor_parallel=self.degrees.tensor,
            pipeline_parallel=self.degrees.pipeline,
            adapters=tuple(Adapter(adapter.name, adapter.digest) for adapter in self.adapters),
        )


def load_engine_host(
    settings: WorkerSettings,
    limits: EngineLimits,
    on_progress: Progress | None = None,
    load: LoadRunner = load_model_runner,
) -> EngineHost:
    """Load the model and size the KV cache. Raises ConfigurationError."""
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    config = load_config(Path(settings.model), settings.rope_override())
    max_model_len = _max_model_len(settings, config)
    runner_settings = _runner_settings(settings, limits, max_model_len)
    adapters, weights = runner_settings.adapters, _weights_of_kv(settings)
    runner = load(runner_settings, on_progress)
    num_blocks, layout = runner.kv_cache.num_blocks, runner.kv_cache.layout
    speculator = load_speculator(
        limits.speculation,
        # No memory of its own: its KV is already part of companion_block_bytes.
        replace(runner_settings, num_blocks=num_blocks, kv_memory=KVMemorySettings()),
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
    scheduler = Scheduler(scheduler_config, BlockPool(num_blocks, None if disk is None else disk.evicted), disk)
    degrees = runner_settings.degrees
    return EngineHost(settings, runner, scheduler, limits.speculation, speculator, degrees, disk, adapters)


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
    settings: WorkerSettings, config: SchedulerConfig, runner: HostedRunner, weights: WeightFiles
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


def model_settings(settings: WorkerSettings) -> RunnerSettings:
    """The model and its arithmetic, without memory and limits. Raises ConfigurationError."""
    degrees = settings.degrees()
    return RunnerSettings(
        model_dir=Path(settings.model),
        device=first_device(settings.device),
        dtype=settings.dtype,
        load_format=settings.load_format,
        quantize=settings.quantize,
        kv_dtype=settings.kv_dtype,
        enforce_eager=settings.enforce_eager,
        attention=settings.attention,
        tensor_parallel=degrees.tensor,
        pipeline_parallel=degrees.pipeline,
        rope=settings.rope_override(),
        adapters=settings.adapters(),
        max_loaded_adapters=settings.max_loaded_adapters,
        block_size=settings.block_size,
    )


def _runner_settings(settings: WorkerSettings, limits: EngineLimits, max_model_len: int) -> RunnerSettings:
    runner_settings = replace(
        model_settings(settings),
        max_batch_tokens=limits.max_batch_tokens,
        max_sampled_rows=min(limits.max_num_seqs * (1 + limits.speculation.max_drafts), limits.max_batch_tokens),
        kv_memory=KVMemorySettings(
            settings.kv_memory_fraction,
            settings.memory_utilization,
            settings.kv_memory_shares,
            settings.kv_memory_ledger,
            settings.identity,
        ),
        layers_per_group=settings.layers_per_group,
        group_bytes=settings.layer_group_bytes,
        graphs=_graph_settings(settings, limits, max_model_len),
    )
    if settings.tensor_parallel == "max":
        runner_settings = replace(runner_settings, tensor_parallel=fitting_ranks(runner_settings, settings.device))
    if "," in settings.device:
        rank_devices(settings.device, runner_settings.degrees)
    runner_settings = replace(
        runner_settings,
        companion_block_bytes=draft_block_bytes(limits.speculation, runner_settings),
        companion_bytes=draft_bytes(limits.speculation, runner_settings),
    )
    layout = kv_layout(load_config(runner_settings.model_dir, runner_settings.rope), runner_settings)
    most_tokens = (max_model_len // settings.block_size + 2) * settings.block_size
    most_blocks = layout.groups.num_blocks_at_once(most_tokens, limits.max_batch_tokens) + layout.state_blocks
    return replace(
        runner_settings,
        num_blocks=_configured_blocks(limits, settings.kv_cache_bytes, layout, runner_settings.companion_block_bytes),
        # Enough for all slots at full length: more blocks would never be used.
        max_blocks=limits.max_num_seqs * most_blocks + layout.num_unused,
    )


def _graph_settings(settings: WorkerSettings, limits: EngineLimits, max_model_len: int) -> GraphSettings:
    if settings.enforce_eager:
        return NO_GRAPHS
    return GraphSettings(limits.graph_sizes, max_model_len, limits.speculation.max_drafts)


def _max_model_len(settings: WorkerSettings, config: AnyConfig) -> int:
    """Return the maximum length of a sequence, hidden tokens included. Raises ConfigurationError."""
    model_limit = config.max_model_len
    is_bounded = config.max_position_embeddings is not None and not settings.rope_override().base
    if is_bounded and settings.max_model_len > model_limit:
        raise ConfigurationError(
            f"max_model_len {settings.max_model_len} is over the model's {model_limit} positions; "
            "if positions are rotary, rope_scaling or rope_theta can extend them"
        )
    # The decoder's start token follows an encoder's prompt; it occupies KV, but clients do not count it.
    num_hidden = 1 if isinstance(config, EncoderDecoderConfig) else 0
    return (settings.max_model_len or model_limit) + num_hidden


def _configured_blocks(
    limits: EngineLimits, kv_cache_bytes: int, layout: KVLayout, companion_block_bytes: int
) -> int | None:
    """Return the number of KV blocks that the settings give in tokens or bytes; None: as memory allows."""
    block_bytes, count = layout.block_bytes + companion_block_bytes, layout.groups.count
    if limits.max_kv_tokens:
        num_blocks = limits.max_kv_tokens // layout.block_size * count + layout.num_unused
        num_blocks += limits.max_num_seqs * layout.state_blocks
    elif kv_cache_bytes:
        num_blocks = kv_cache_bytes // block_bytes
    else:
        return None
    if num_blocks < 2 * count + layout.state_blocks + layout.num_unused:
        raise ConfigurationError(f"the KV cache would have {num_blocks} blocks of {block_bytes} bytes: give it more")
    return num_blocks


def download_and_load_host(settings: WorkerSettings, limits: EngineLimits, load: LoadRunner) -> EngineHost:
    """Find or download the model's folder and build the engine. Raises ConfigurationError.

    Ends the process if loading takes longer than `model_loading_timeout`; the download does not count.
    """
    located = settings.located(lambda fraction: announce("downloading", fraction=fraction))
    begun_s = time.monotonic()
    progress = LoadProgress()
    limit_s = settings.model_loading_timeout + (settings.rank_timeout_s if settings.rank_listen else 0.0)
    listeners: list[RankListener] = []
    if settings.rank_listen or _have_own_memory(settings):
        load = partial(_load_runner_with_remote_ranks, settings, listeners, load)
    with limited(limit_s, progress), measured_load() as phases:
        host = load_engine_host(located, limits, progress, load)
    seconds = time.monotonic() - begun_s
    phases["other"] = max(0.0, seconds - sum(phases.values()))
    reservation = host.runner.kv_cache.reservation
    if reservation is not None:
        log.info("KV memory", summary=reservation.summary)
        announce("kv_memory", summary=reservation.summary)
    about = {"folder": located.model, "seconds": round(seconds, 2), "phases": rounded(phases)}
    log.info("model loaded", **about, **peak_memory(host.runner.kv_cache.tensor.device))
    links = tuple(link for listener in listeners for link in listener.links)
    return replace(host, load_seconds=phases, rank_links=links)


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
    load: LoadRunner,
    runner_settings: RunnerSettings,
    on_progress: Progress | None = None,
) -> HostedRunner:
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
        listen, timeout_s = local.listen, settings.model_loading_timeout
    ranks = RankListener(
        listen or settings.listen_for_ranks(),
        degrees,
        timeout_s=timeout_s,
        on_leaving=lambda: os.kill(os.getpid(), signal.SIGTERM),
        local=local,
    )
    listeners.append(ranks)
    if local is None:
        announce("waiting_for_ranks", port=ranks.port)
    runner = load_remote_runner(runner_settings, ranks, on_progress, on_lost=_end)
    runner.rank_pids = () if local is None else local.pids
    return runner


def _end(reason: str) -> None:
    log.critical("a rank is lost, exiting", reason=reason)
    flush_outputs()
    os._exit(1)
