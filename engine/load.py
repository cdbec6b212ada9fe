"""Composition of a ModelRunner from a checkpoint folder."""

from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, attention_shape
from engine.attention.cpu import CpuAttention
from engine.attention.select import AttentionPlace, select_backend
from engine.checkpoint import open_checkpoint
from engine.cpu.decoder import CompiledDecoder, why_not_compiled
from engine.cpu.features import why_no_loops
from engine.cpu.vectors import KEYS
from engine.kv_cache import KVCache, num_blocks_for_memory
from engine.masks import TokenMasks
from engine.memory import available_bytes
from engine.model_runner import Model, ModelRunner
from engine.models.config import AnyConfig, EncoderDecoderConfig, ModelConfig, load_config
from engine.models.decoder import Decoder, DecoderMemory
from engine.models.encoder_decoder.model import EncoderDecoder
from engine.models.encoder_decoder.parameters import encoder_decoder_specs
from engine.models.fingerprint import fingerprint
from engine.models.int8 import Int8Ops
from engine.models.layers import FloatOps
from engine.models.ops import Ops
from engine.models.parameters import ParameterSpec, parameter_specs
from engine.weights import Progress, WeightsTarget, dummy_weights, load_weights
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout
from mesh.grammar import GrammarCompiler
from mesh.worker.settings import require_known

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How a model is loaded and run.

    Without `num_blocks` the KV cache takes `memory_fraction` of the memory that is free once the weights are loaded,
    but no more than `max_blocks`; `companion_block_bytes` is what each block takes in another cache. `device` "auto" is
    CUDA where it is there; `dtype` "auto" is the checkpoint's own, or fp32 on CPU. `layers_per_group`, `group_bytes`:
    see ModelRunner.
    """

    model_dir: Path
    device: str = "cpu"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    block_size: int = 16
    num_blocks: int | None = None
    max_blocks: int | None = None
    companion_block_bytes: int = 0
    memory_fraction: float = 0.5
    attention: str = "auto"
    layers_per_group: int = 4
    group_bytes: int = 0
    quantize: str = "none"
    kv_dtype: str = "auto"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        require_known(self)
        if self.block_size < 1 or self.layers_per_group < 1:
            raise ConfigurationError("block_size and layers_per_group must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigurationError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigurationError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")


def load_model_runner(settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
    """Load weights, allocate the KV cache, choose the attention backend. ConfigurationError says what is wrong."""
    device = _device(settings.device)
    config = load_config(settings.model_dir)
    settings = replace(settings, device=str(device), dtype=_dtype(settings, config))
    if settings.quantize == "int8" and (settings.device, settings.dtype) != ("cpu", "float32"):
        raise ConfigurationError(f"quantize=int8 is for CPU and float32, not {settings.device} and {settings.dtype}")
    if isinstance(config, EncoderDecoderConfig) and settings.dtype == "float16":
        raise ConfigurationError(f"{config.architecture} overflows in float16: use bfloat16 or float32")
    layout = kv_layout(config, settings)
    parameters = _parameters(settings, config, device, on_progress)
    cache = KVCache(layout, settings.num_blocks or _default_blocks(layout, settings, device), device)
    model = _model(settings, config, parameters, cache)
    masks = TokenMasks(GrammarCompiler(settings.model_dir), config.vocab_size)
    return ModelRunner(
        model, cache, masks, layers_per_group=settings.layers_per_group, group_bytes=settings.group_bytes
    )


def _model(settings: RunnerSettings, config: AnyConfig, parameters: dict[str, Tensor], cache: KVCache) -> Model:
    if isinstance(config, EncoderDecoderConfig):
        return EncoderDecoder(config, parameters, _ops(settings), _memory(settings, config, cache))
    int8 = settings.quantize == "int8"
    reason = _why_eager(settings, config, cache.layout, int8=int8)
    if reason is None:
        return CompiledDecoder(config, parameters, cache, int8=int8)
    log.info("decoder not compiled", reason=reason)
    return Decoder(config, parameters, _ops(settings), _memory(settings, config, cache))


def _memory(settings: RunnerSettings, config: AnyConfig, cache: KVCache) -> DecoderMemory:
    """The cache, with what attends to it, compiled."""
    attention = select_backend(
        _attention_shape(config),
        AttentionPlace(cache.tensor.device, getattr(torch, settings.dtype), cache.layout),
        settings.attention,
    )
    if isinstance(attention, CpuAttention):
        attention.compile(cache.layer(0))
    return DecoderMemory(cache, attention)


def _attention_shape(config: AnyConfig) -> AttentionShape:
    if isinstance(config, EncoderDecoderConfig):
        return AttentionShape(config.num_heads, config.num_heads, config.head_dim, given_scale=1.0)
    return attention_shape(config)


def _why_eager(settings: RunnerSettings, config: ModelConfig, layout: KVLayout, *, int8: bool) -> str | None:
    if settings.enforce_eager:
        return "enforce_eager is set"
    if settings.attention != "auto":
        return f"attention backend {settings.attention} is asked for"
    if (settings.device, settings.dtype) != ("cpu", "float32"):
        return f"{settings.dtype} on {settings.device}"
    return why_not_compiled(config, layout, int8=int8)


def kv_layout(config: AnyConfig, settings: RunnerSettings) -> KVLayout:
    """The KV layout that a runner with these settings will have."""
    return KVLayout(
        model_fingerprint=fingerprint(settings.model_dir, settings.load_format, settings.seed, settings.quantize),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=_kv_dtype(settings, config),
    )


def _ops(settings: RunnerSettings) -> Ops:
    if settings.quantize == "none":
        return FloatOps()
    return Int8Ops()


def _parameters(
    settings: RunnerSettings, config: AnyConfig, device: torch.device, on_progress: Progress | None
) -> dict[str, Tensor]:
    specs = _parameter_specs(settings, config)
    target = WeightsTarget(device, getattr(torch, settings.dtype))
    if settings.load_format == "dummy":
        return dummy_weights(specs, target, settings.seed, on_progress)
    return load_weights(settings.model_dir, specs, target, on_progress)


def _parameter_specs(settings: RunnerSettings, config: AnyConfig) -> list[ParameterSpec]:
    if not isinstance(config, EncoderDecoderConfig):
        return parameter_specs(config)
    # config.json does not say it reliably.
    own_lm_head = settings.load_format != "dummy" and "lm_head.weight" in open_checkpoint(settings.model_dir)
    return encoder_decoder_specs(config, own_lm_head=own_lm_head)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device {name!r} is not known: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {name!r} is not available: no CUDA device, or torch was built without CUDA")
    return device


def _dtype(settings: RunnerSettings, config: AnyConfig) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if _device(settings.device).type == "cpu" else config.dtype


def _kv_dtype(settings: RunnerSettings, config: AnyConfig) -> str:
    if settings.kv_dtype != "auto":
        return settings.kv_dtype
    if settings.quantize != "int8":
        return _dtype(settings, config)
    fits = config.head_dim % KEYS == 0 and settings.block_size % KEYS == 0 and why_no_loops(int8=True) is None
    return "int8" if fits and _attention_shape(config).is_plain else "float16"


def _default_blocks(layout: KVLayout, settings: RunnerSettings, device: torch.device) -> int:
    num_bytes = int(available_bytes(device) * settings.memory_fraction)
    num_blocks = num_blocks_for_memory(layout, num_bytes, settings.companion_block_bytes)
    if num_blocks < 1:
        raise ConfigurationError(
            f"no memory for the KV cache: one block takes {layout.block_bytes} bytes; lower block_size, or free memory"
        )
    return min(num_blocks, settings.max_blocks or num_blocks)
