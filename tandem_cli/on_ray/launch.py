"""Workers on a Ray cluster: divides the cluster among them by their needs, starts them, and follows them. This is the
supervisor's Launcher for `tandem up --on ray`.

Ray starts a worker's actor again whenever it has ended. The supervisor therefore hears of an end only while the mesh
starts, which then fails, and with `--no-restart`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import draft_block_bytes, draft_settings, draft_weights_bytes
from engine.loading.resolve import kv_layout, resolve
from engine.loading.stored_parameters import specs_of
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.runner_settings import RunnerSettings
from engine.settings import NO_SPECULATION
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, Degrees
from mesh.tasks import cancel_all
from prefill_worker.settings import PrefillSettings
from tandem_cli.capacity.ranks import precision_of, rank_memory, total
from tandem_cli.local_mesh.deployment import Deployment, Service
from tandem_cli.local_mesh.display import Display
from tandem_cli.local_mesh.launcher import LocalLauncher, OnEvent, OnWarning, RunningService, ServiceEvent
from tandem_cli.local_mesh.service_log import ServiceLog
from tandem_cli.on_ray.cluster import Placed, RayCluster
from tandem_cli.on_ray.handover import Handover, hand_over
from tandem_cli.on_ray.node import LOG_LINE, News
from tandem_cli.on_ray.resources import WorkerNeed, WorkerResources, divide
from worker.runner_settings import base_runner_settings

_CONFIGURATION_STATUS = 2
_WAIT_HINT_S = 10.0
_RETRY_S, _REFUSED_RETRY_S = 1.0, 5.0
_MAX_DEATHS = 3
"""Calls in a row that fail because the actor has died. If Ray starts it again, only the first call fails like this."""
_STOP_MARGIN_S = 10.0
_NO_PACKAGE = "failed to import on the worker"


def on_ray(deployment: Deployment, environ: Mapping[str, str], cluster: RayCluster, display: Display) -> "OnRay":
    """Divide the cluster among the workers. Raises ConfigurationError for workers that the nodes cannot hold."""
    deployment = replace(deployment, pin=False, core_table=None, registry_host=cluster.own_address())
    largest = _at_its_largest(deployment)
    nodes = cluster.nodes()
    needs = worker_needs(largest, environ, sum(node.gpus for node in nodes))
    requests = divide(needs, nodes, deployment.settings.threads_per_worker)
    resources = {request.name: request for request in requests}
    for service in largest.workers():
        hand_over(service, largest, environ, resources[service.name])  # refuses what would fail later
    for request in requests:
        display.line(f"{request.name} asks Ray for {request}")
    return OnRay(deployment, largest, cluster, resources)


def _at_its_largest(deployment: Deployment) -> Deployment:
    """The deployment with all workers that `max_prefill` and `max_decode` allow."""
    settings = deployment.settings
    if settings.max_prefill is settings.max_decode is None:
        return deployment
    if len(deployment.models) > 1:
        raise ConfigurationError("max_prefill and max_decode are for meshes of one model")
    [model] = deployment.models
    more = replace(
        model.cores,
        prefill=((),) * (settings.max_prefill or settings.num_prefill),
        decode=((),) * (settings.max_decode or settings.decode),
    )
    return replace(deployment, models=(replace(model, cores=more),))


@dataclass(frozen=True, slots=True)
class OnRay:
    """A deployment on a cluster. `largest` has the workers of the start and all that may be added."""

    deployment: Deployment
    largest: Deployment
    cluster: RayCluster
    resources: Mapping[str, WorkerResources]

    def launcher(self, local: LocalLauncher) -> "RayLauncher":
        return RayLauncher(local, self.largest, self.cluster, self.resources)

    def spares(self, registry_address: str) -> list[Service]:
        """The workers that may be added. Their metrics have ports that are free on their node."""
        first = {worker.name for worker in self.deployment.workers()}
        spares = [worker for worker in self.largest.workers(registry_address) if worker.name not in first]
        if self.deployment.settings.metrics_port is None:
            return spares
        return [replace(worker, flags=(*worker.flags, "--metrics-port=0")) for worker in spares]


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Starts workers on the cluster, and router and gateway as `local` does."""

    local: LocalLauncher
    deployment: Deployment
    cluster: RayCluster
    resources: Mapping[str, WorkerResources]

    @property
    def environ(self) -> Mapping[str, str]:
        return self.local.environ

    def end_starts(self) -> None:
        self.local.end_starts()

    async def start(self, service: Service, *, on_event: OnEvent, on_warning: OnWarning) -> RunningService:
        if service.name not in self.resources:
            return await self.local.start(service, on_event=on_event, on_warning=on_warning)
        resources = self.resources[service.name]
        handover = hand_over(service, self.deployment, self.environ, resources)
        restarts = not self.deployment.settings.no_restart
        try:
            placed = self.cluster.place(resources, restarts=restarts)
        except RayError as error:
            raise ConnectionError(f"Ray cannot place it: {error}") from error
        log_path = self.local.log_dir / f"{service.name}.log"
        worker = RayWorker(service, placed, log_path, restarts=restarts, on_event=on_event, on_warning=on_warning)
        worker.follow(handover, waiting_for=str(resources))
        return worker


class RayWorker:
    """A worker on the cluster, whichever node it is on. `follow` starts it."""

    def __init__(
        self,
        service: Service,
        placed: Placed,
        log_path: Path,
        *,
        restarts: bool,
        on_event: OnEvent,
        on_warning: OnWarning,
    ) -> None:
        self.service = service
        self.log_path = log_path
        self.pid = 0
        self.address = ""
        self.metrics_address = ""
        self._placed = placed
        self._restarts = restarts
        self._on_event = on_event
        self._warn: Callable[[str], None] = partial(on_warning, service.name)
        self._log = ServiceLog(log_path, self._warn)
        self.tail = self._log.tail
        self._was_ready = False
        self._is_up = False
        self._has_ended = False
        self._is_stopping = False
        self._following: asyncio.Task[None] | None = None

    def follow(self, handover: Handover, *, waiting_for: str) -> None:
        """Start the worker as soon as Ray has placed its actor, and again after that has ended, until `stop`."""
        timer = asyncio.get_running_loop().call_later(_WAIT_HINT_S, self._hint, waiting_for)
        self._following = asyncio.create_task(self._follow(handover, timer))

    async def stop(self, limit_s: float) -> None:
        self._is_stopping = True
        is_up = self._is_up
        if is_up:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(limit_s + _STOP_MARGIN_S):
                    last = await _call(self._placed.actor.stop, limit_s)
                self._on_news(last)
        if self._following is not None:  # a call that is cancelled makes Ray Client write a traceback
            await asyncio.wait([self._following], timeout=_STOP_MARGIN_S if is_up else 0)
            await cancel_all([self._following])
        self.kill()

    def kill(self) -> None:
        self._placed.remove()
        if self._following is not None:
            self._following.cancel()
        self._log.close()

    def _hint(self, waiting_for: str) -> None:
        if self._placed.is_waiting():
            self._warn(f"Ray has found no place for it yet: it waits for {waiting_for} on one node")

    async def _follow(self, handover: Handover, hint: asyncio.TimerHandle) -> None:
        num_deaths = 0
        while num_deaths < _MAX_DEATHS and not self._is_stopping:
            try:
                news = await _call(self._placed.actor.follow, handover)
                hint.cancel()
                self._is_up, num_deaths = True, 0
                self._on_news(news)
            except RayError as error:
                if self._is_up and not self._is_stopping:
                    self._warn("its actor or its node is gone; Ray places it anew")
                self._is_up = False
                num_deaths = num_deaths + 1 if isinstance(error, ActorDiedError) else 0
                if is_refusal := not isinstance(error, ActorDiedError | ActorUnavailableError):
                    self._refused(_explain(error))
                await asyncio.sleep(_REFUSED_RETRY_S if is_refusal else _RETRY_S)
        if not self._is_stopping:
            self._end(1)

    def _on_news(self, news: News) -> None:
        self.pid = news.pid
        for kind, fields in news.events:
            if kind == LOG_LINE:
                self._log.write(fields["line"])
            elif kind == "exited":
                self._on_exit(fields["status"])
            else:
                self.address = fields["address"] if kind == "listening" else self.address
                self.metrics_address = fields["address"] if kind == "metrics" else self.metrics_address
                self._was_ready = self._was_ready or kind == "ready"
                self._on_event(ServiceEvent(self, kind, fields))

    def _on_exit(self, status: int) -> None:
        self._is_up = False
        if self._was_ready and self._restarts and not self._is_stopping:
            self._warn(f"ended with status {status}; Ray starts it again")
        else:
            self._end(status)

    def _refused(self, reason: str) -> None:
        """The node cannot start the worker."""
        self.tail.append(reason)
        if self._was_ready and self._restarts:
            self._warn(reason)
        else:
            self._end(_CONFIGURATION_STATUS)

    def _end(self, status: int) -> None:
        """Report the end, once."""
        if not self._has_ended:
            self._has_ended = True
            self._on_event(ServiceEvent(self, "exited", {"status": status}))


async def _call(method: object, *arguments: object) -> News:
    """Call a method of an actor."""
    news: News = await method.remote(*arguments)  # type: ignore[attr-defined]
    return news


def _explain(error: RayError) -> str:
    """The error that an actor's method has raised, without Ray's traceback."""
    reason = str(getattr(error, "cause", error)).strip().splitlines()[-1]
    if _NO_PACKAGE in str(error):
        return f"a Ray node cannot import tandem-serve ({reason}): install the same version on all nodes"
    return reason


def worker_needs(deployment: Deployment, environ: Mapping[str, str], cluster_gpus: float) -> list[WorkerNeed]:
    """The needs of all workers. Workers with the device "auto" get a GPU for each rank if the cluster has enough for
    all. Raises ConfigurationError.
    """
    settings_by_name = {worker.name: settings for worker, settings in deployment.worker_settings(environ)}
    num_on_gpu = sum(settings.num_local_ranks for settings in settings_by_name.values() if settings.device != "cpu")
    auto_is_gpu = cluster_gpus >= num_on_gpu > 0
    return [_need(name, settings, auto_is_gpu=auto_is_gpu) for name, settings in settings_by_name.items()]


def _need(name: str, settings: Any, *, auto_is_gpu: bool) -> WorkerNeed:
    if settings.rank_listen:
        raise ConfigurationError("rank_listen does not work with --on ray, where all ranks of a worker are on one node")
    if "max" in (settings.tensor_parallel, settings.pipeline_parallel):
        raise ConfigurationError("with --on ray, tensor_parallel and pipeline_parallel must be numbers, not max")
    if settings.device.startswith("cuda") or (settings.device == "auto" and auto_is_gpu):
        files_bytes = sum(file.stat().st_size for file in Path(settings.model).glob("*.safetensors"))
        num_ranks = settings.num_local_ranks
        return WorkerNeed(name, num_ranks, files_bytes, 0, 0, num_gpus=num_ranks)
    return _cpu_need(name, settings)


def _cpu_need(name: str, settings: PrefillSettings | DecodeSettings) -> WorkerNeed:
    model = replace(base_runner_settings(settings), device="cpu", tensor_parallel=1, pipeline_parallel=1)
    runner, config = resolve(model)
    degrees = settings.degrees()
    weights_bytes = _weights_bytes(runner, config, degrees) + degrees.tensor * runner.adapter_bytes
    speculation, slots, tokens = NO_SPECULATION, 0, 0
    if isinstance(settings, DecodeSettings):
        speculation, slots = settings.speculation(), settings.max_rolling_batch_size
        tokens = settings.max_batch_total_tokens
    else:
        slots = settings.prompts_at_once
    if (draft := draft_settings(speculation, model)) is not None:
        weights_bytes += draft_weights_bytes(draft) if draft.is_mtp else _weights_bytes(*resolve(draft), Degrees())
    layout = kv_layout(config, runner)
    block_bytes = layout.block_bytes + draft_block_bytes(speculation, runner)
    count, most_tokens = layout.groups.count, settings.max_model_len or config.max_model_len
    sequence_bytes = (layout.num_entries_for(most_tokens) + 2 * count) * block_bytes
    state_bytes = slots * layout.state_blocks * block_bytes
    token_bytes = tokens // settings.block_size * count * block_bytes
    if fixed := (tokens and token_bytes + state_bytes) or settings.kv_cache_bytes:
        return WorkerNeed(name, degrees.num_ranks, weights_bytes, fixed, fixed)
    return WorkerNeed(name, degrees.num_ranks, weights_bytes, sequence_bytes, slots * sequence_bytes)


def _weights_bytes(runner: RunnerSettings, config: AnyConfig, degrees: Degrees) -> float:
    """The weights of all ranks. Raises ConfigurationError for degrees that the engine refuses."""
    if isinstance(config, EncoderDecoderConfig):
        if degrees != Degrees():
            raise ConfigurationError(f"{degrees} ranks do not fit an encoder-decoder model: use 1")
        return float(sum(prod(spec.shape) for spec in specs_of(runner, config)) * DTYPE_BYTES[runner.dtype])
    return total(rank_memory(config, precision_of(runner, config), degrees, degrees.num_ranks))[0]
