"""The needs of each worker, from its settings and its model: weights, KV, ranks, GPU."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from decode_worker.settings import DecodeSettings
from engine.load import specs_of
from engine.load_runner import draft_block_bytes
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.read_config import load_config
from engine.resolve import kv_layout, resolve
from engine.runner_settings import RunnerSettings
from engine.settings import NO_SPECULATION
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, Degrees
from prefill_worker.settings import PrefillSettings
from tandem_cli.capacity.ranks import precision_of, rank_memory, total
from tandem_cli.deployment import Deployment
from tandem_cli.on_ray.resources import WorkerNeed


def worker_needs(deployment: Deployment, environ: Mapping[str, str], cluster_gpus: float) -> list[WorkerNeed]:
    """The needs of all workers. Workers with the device "auto" get a GPU for each rank if the cluster has enough for
    all. Raises ConfigurationError.
    """
    workers = deployment.workers("127.0.0.1:1")
    settings_by_name = {worker.name: deployment.resolve(worker, environ) for worker in workers}
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
    runner, config = resolve(
        RunnerSettings(
            Path(settings.model),
            "cpu",
            settings.dtype,
            settings.load_format,
            block_size=settings.block_size,
            quantize=settings.quantize,
            kv_dtype=settings.kv_dtype,
            enforce_eager=settings.enforce_eager,
            attention=settings.attention,
            rope=settings.rope_override(),
            adapters=settings.adapters(),
            max_loaded_adapters=settings.max_loaded_adapters,
        )
    )
    degrees = settings.degrees()
    weights_bytes = _weights_bytes(runner, config, degrees) + degrees.tensor * runner.adapter_bytes
    speculation, slots, tokens = NO_SPECULATION, 0, 0
    if isinstance(settings, DecodeSettings):
        speculation, slots = settings.speculation(), settings.max_rolling_batch_size
        tokens = settings.max_batch_total_tokens
    else:
        slots = settings.prompts_at_once
    if speculation.draft_model is not None:
        draft = replace(runner, model_dir=speculation.draft_model)
        weights_bytes += _weights_bytes(draft, load_config(draft.model_dir), Degrees())
    block_bytes = kv_layout(config, runner).block_bytes + draft_block_bytes(speculation, runner)
    sequence_bytes = ((settings.max_model_len or config.max_model_len) // settings.block_size + 2) * block_bytes
    if fixed := tokens // settings.block_size * block_bytes or settings.kv_cache_bytes:
        return WorkerNeed(name, degrees.num_ranks, weights_bytes, fixed, fixed)
    return WorkerNeed(name, degrees.num_ranks, weights_bytes, sequence_bytes, slots * sequence_bytes)


def _weights_bytes(runner: RunnerSettings, config: AnyConfig, degrees: Degrees) -> float:
    """The weights of all ranks. Raises ConfigurationError for degrees that the engine refuses."""
    if isinstance(config, EncoderDecoderConfig):
        if degrees != Degrees():
            raise ConfigurationError(f"{degrees} ranks do not fit an encoder-decoder model: use 1")
        return float(sum(prod(spec.shape) for spec in specs_of(runner, config)) * DTYPE_BYTES[runner.dtype])
    return total(rank_memory(config, precision_of(runner, config), degrees, degrees.num_ranks))[0]
