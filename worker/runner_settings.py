"""The settings of a worker's model runner: those of the worker, within the limits of its roles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.devices import first_device, rank_devices
from engine.loading.load_runner import draft_block_bytes, draft_bytes
from engine.loading.resolve import fitting_ranks, kv_layout
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.read_config import load_config
from engine.runner_settings import RunnerSettings
from engine.settings import NO_GRAPHS, NO_SPECULATION, GraphSettings, Speculation
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """A role's limits on its engine. `max_kv_tokens` 0: as memory allows. `max_step_stretch` is SchedulerConfig's.
    Decode steps of the sizes in `graph_sizes` are captured as CUDA graphs.
    """

    max_batch_tokens: int
    max_num_seqs: int
    max_kv_tokens: int = 0
    speculation: Speculation = NO_SPECULATION
    max_step_stretch: float = 0.0
    graph_sizes: tuple[int, ...] = ()


def widest(limits: Sequence[EngineLimits]) -> EngineLimits:
    """The limits of an engine that can serve within each of `limits`: the largest of each. At most one of them has
    speculative decoding."""
    speculations = (limit.speculation for limit in limits if limit.speculation != NO_SPECULATION)
    return EngineLimits(
        max(limit.max_batch_tokens for limit in limits),
        max(limit.max_num_seqs for limit in limits),
        max(limit.max_kv_tokens for limit in limits),
        next(speculations, NO_SPECULATION),
        max(limit.max_step_stretch for limit in limits),
        max((limit.graph_sizes for limit in limits), key=len),
    )


def base_runner_settings(settings: WorkerSettings) -> RunnerSettings:
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


def make_runner_settings(settings: WorkerSettings, limits: EngineLimits, max_model_len: int) -> RunnerSettings:
    """The model, with memory and limits. Raises ConfigurationError."""
    model = base_runner_settings(settings)
    if settings.tensor_parallel == "max":
        model = replace(model, tensor_parallel=fitting_ranks(model, settings.device))
    if "," in settings.device:
        rank_devices(settings.device, model.degrees)
    model = replace(
        model,
        max_batch_tokens=limits.max_batch_tokens,
        max_sampled_rows=min(limits.max_num_seqs * (1 + limits.speculation.max_drafts), limits.max_batch_tokens),
        kv_memory=settings.kv_memory(),
        layers_per_group=settings.layers_per_group,
        group_bytes=settings.layer_group_bytes,
        graphs=_graph_settings(settings, limits, max_model_len),
    )
    model = replace(
        model,
        companion_block_bytes=draft_block_bytes(limits.speculation, model),
        companion_bytes=draft_bytes(limits.speculation, model),
    )
    layout = kv_layout(load_config(model.model_dir, model.rope), model)
    most_tokens = (max_model_len // settings.block_size + 2) * settings.block_size
    most_blocks = layout.groups.num_blocks_at_once(most_tokens, limits.max_batch_tokens) + layout.state_blocks
    return replace(
        model,
        num_blocks=_configured_blocks(limits, settings.kv_cache_bytes, layout, model.companion_block_bytes),
        # Enough for all slots at full length: more blocks would never be used.
        max_blocks=limits.max_num_seqs * most_blocks + layout.num_unused,
    )


def longest_sequence(settings: WorkerSettings, config: AnyConfig) -> int:
    """The maximum length of a sequence, hidden tokens included. Raises ConfigurationError."""
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


def _graph_settings(settings: WorkerSettings, limits: EngineLimits, max_model_len: int) -> GraphSettings:
    if settings.enforce_eager:
        return NO_GRAPHS
    return GraphSettings(limits.graph_sizes, max_model_len, limits.speculation.max_drafts)


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
        name = "max_batch_total_tokens" if limits.max_kv_tokens else "kv_cache_bytes"
        raise ConfigurationError(
            f"the KV cache would have {num_blocks} blocks of {block_bytes} bytes: set a larger {name}"
        )
    return num_blocks
