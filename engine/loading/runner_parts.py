"""The parts of a runner, as every rank loads them: weights, decoder memory, memory for KV; and their assembly."""

import structlog
import torch

from checkpoint.grammar import GrammarCompiler
from checkpoint.partition_manifest import read_partition
from checkpoint.tensors import open_checkpoint
from engine.adapter_slots import AdapterSlots
from engine.attention.backend import AttentionShape, attention_shape
from engine.attention.cpu import CpuAttention
from engine.attention.select import AttentionTarget, select_backend
from engine.attention.triton_paged import TritonAttention
from engine.attention.views import View, parts_of, view_of_layer
from engine.decode_graphs import DecodeGraphs
from engine.kv.cache import KVCache
from engine.kv.scales import NO_SCALES, read_kv_scales, scale_names
from engine.kv.sharded_cache import AnyKVCache
from engine.loading.dummy_values import dummy_values
from engine.loading.load_phases import load_phase
from engine.loading.partition import read_rank
from engine.loading.resolve import kv_layout, why_eager
from engine.loading.weights import Progress, WeightsTarget, held, load_weights, parameters_of, target_of_table
from engine.memory import return_freed_memory
from engine.model import DecoderMemory, Model
from engine.model_runner import ModelRunner
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encodings import Parameters
from engine.models.model_config import ModelConfig
from engine.models.mtp import drafts_by_layer, mtp_tensors, own_specs
from engine.models.packed_decoder import Tables, pack_decoder
from engine.models.packed_weights import PackedDecoder
from engine.models.parameters import ParameterSpec, parameter_specs, tied_names
from engine.models.share import RankShare, share_specs
from engine.runner_settings import RunnerSettings
from engine.sampling.masks import TokenMasks
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Span

log = structlog.get_logger(__name__)


def assemble_runner(
    settings: RunnerSettings,
    model: Model,
    cache: AnyKVCache,
    num_stages: int = 1,
    adapters: AdapterSlots | None = None,
    graphs: DecodeGraphs | None = None,
) -> ModelRunner:
    """Join a model and its cache to a runner."""
    masks = TokenMasks(GrammarCompiler(settings.model_dir), model.config.vocab_size)
    return ModelRunner(
        model,
        cache,
        masks,
        layers_per_group=settings.layers_per_group,
        group_bytes=settings.group_bytes,
        max_in_flight=num_stages,
        adapters=adapters,
        graphs=graphs,
    )


def load_packed(
    settings: RunnerSettings,
    config: ModelConfig,
    share: RankShare,
    on_progress: Progress | None = None,
    tables: Tables | None = None,
) -> PackedDecoder:
    """The weights of a rank of the compiled decoder: mapped if the model is partitioned, else read and packed one by
    one, but for `tables`. Raises ConfigurationError.
    """
    partition = read_partition(settings.model_dir)
    if partition is not None:
        with load_phase("map"):
            return read_rank(partition, share.rank, share.degrees, settings.quantize, settings.dtype)
    specs = share_specs(parameter_specs(config) if tables is None else own_specs(config), config, share, "outputs")
    packed = pack_decoder(config, _parameters(settings, config, specs, on_progress, is_packed=True), share, tables)
    return_freed_memory()
    return packed


def decoder_memory(
    settings: RunnerSettings, config: AnyConfig, cache: KVCache, query_heads: Span | None = None
) -> DecoderMemory:
    """The cache and an attention backend for each shape of its heads, with kernels compiled now. `query_heads`: the
    rank's, by default all that read its KV heads.
    """
    target = AttentionTarget(cache.tensor.device, getattr(torch, settings.dtype), cache.layout)
    if isinstance(config, ModelConfig) and config.per_layer is not None:
        layers, windows = range(config.num_layers), cache.layout.windows
        views = {attention_shape(config.of_layer(layer)): view_of_layer(config, layer, windows) for layer in layers}
    else:
        views = {_heads_of(config).shard(cache.span.heads, query_heads): View(cache.span.layers.first)}
    spans = {None} if isinstance(config, EncoderDecoderConfig) else set(config.windows)
    attentions = {shape: select_backend(shape, target, settings.attention) for shape in views}
    for shape, attention in attentions.items():
        layer_cache = parts_of(cache.layer(views[shape].layer), views[shape].num_parts, shape)
        if isinstance(attention, CpuAttention):
            attention.compile(layer_cache)
        if isinstance(attention, TritonAttention):
            attention.compile(layer_cache, spans, target.dtype)
    scales = read_kv_scales(settings.model_dir) if _scales_kv(settings) else NO_SCALES
    return DecoderMemory(cache, attentions, scales)


def _heads_of(config: AnyConfig) -> AttentionShape:
    """The heads of all ranks; an encoder-decoder's scores are not scaled."""
    if isinstance(config, EncoderDecoderConfig):
        return AttentionShape(config.num_heads, config.num_heads, config.head_dim, given_scale=1.0)
    return attention_shape(config)


def load_parameters(
    settings: RunnerSettings, config: AnyConfig, specs: list[ParameterSpec], on_progress: Progress | None = None
) -> Parameters:
    """Load these parameters of the model. Raises ConfigurationError."""
    if read_partition(settings.model_dir) is not None and isinstance(config, ModelConfig):
        reason = why_eager(settings, config, kv_layout(config, settings))
        raise ConfigurationError(
            f"{settings.model_dir} is partitioned for the compiled decoder, which cannot run here ({reason}): "
            "serve the original checkpoint"
        )
    # Containers of NVIDIA allow TF32, by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    torch.set_float32_matmul_precision("highest")
    parameters = _parameters(settings, config, specs, on_progress)
    parameters.read_all()
    return parameters


def _parameters(
    settings: RunnerSettings,
    config: AnyConfig,
    specs: list[ParameterSpec],
    on_progress: Progress | None,
    *,
    is_packed: bool = False,
) -> Parameters:
    """The parameters, read when they are taken."""
    dtype = getattr(torch, settings.dtype)
    target = WeightsTarget(torch.device(settings.device), dtype, settings.encoding, is_packed)
    if settings.load_format == "dummy":
        return dummy_weights(specs, target, settings.seed, on_progress, getattr(torch, config.dtype))
    if settings.is_mtp:
        return load_weights(settings.model_dir, specs, target, on_progress, is_part=True)
    tied = None if isinstance(config, EncoderDecoderConfig) else tied_names(config)
    others = [*scale_names(settings.model_dir)] if _scales_kv(settings) else []
    others += _mtp_tensors(settings, config)
    return load_weights(settings.model_dir, specs, target, on_progress, tied=tied, used_elsewhere=others)


def _mtp_tensors(settings: RunnerSettings, config: AnyConfig) -> list[str]:
    names = mtp_tensors(config, open_checkpoint(settings.model_dir)) if isinstance(config, ModelConfig) else []
    if names and isinstance(config, ModelConfig):
        use = "speculative=mtp drafts by it" if drafts_by_layer(config) else f"not read for {config.architecture}"
        log.info(f"the checkpoint has a layer of multi-token prediction: {use}", tensors=len(names))
    return names


def dummy_weights(
    specs: list[ParameterSpec],
    target: WeightsTarget,
    seed: int = 0,
    on_progress: Progress | None = None,
    own_dtype: torch.dtype = torch.float32,
) -> Parameters:
    """Random parameters, see dummy_values. `own_dtype`: that of a checkpoint's numbers."""
    targets = ((spec, target_of_table(spec, own_dtype, target)) for spec in held(specs))
    values = (dummy_values(spec, own.dtype_of(spec), own.device, seed) for spec, own in targets)
    return parameters_of(specs, target.rounding(specs), values, on_progress)


def _scales_kv(settings: RunnerSettings) -> bool:
    """True if the checkpoint's scales of KV are used, if it has any."""
    return settings.kv_dtype == "fp8" and settings.load_format != "dummy"
