"""Builds a ModelRunner (weights, KV cache, attention, decoder) and a Speculator; the KV layout and its fingerprint."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import blake2b
from math import prod
from pathlib import Path

import structlog
import torch

from checkpoint.grammar import GrammarCompiler
from checkpoint.model_files import NO_ROPE_OVERRIDE, RopeOverride, read_model_facts
from checkpoint.tensors import open_checkpoint, read_sample
from engine.attention.backend import AttentionShape, attention_shape
from engine.attention.cpu import CpuAttention
from engine.attention.select import AttentionTarget, select_backend
from engine.kernels.cpu.machine import KEYS, why_no_loops
from engine.kv_cache import KVCache
from engine.kv_memory import KVReservation
from engine.load_times import load_phase
from engine.masks import TokenMasks
from engine.model import DecoderMemory, Model
from engine.model_runner import ModelRunner
from engine.models.compiled_decoder import CompiledDecoder, why_not_compiled
from engine.models.decoder import Decoder
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encoder_decoder.model import EncoderDecoder, encoder_decoder_specs
from engine.models.linear import Parameters
from engine.models.model_config import ModelConfig
from engine.models.packed_decoder import PackedDecoder, pack_decoder
from engine.models.parameters import ParameterSpec, parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from engine.models.share import ALONE, RankShare, rank_share, share_specs
from engine.partition import read_partition
from engine.runner import Runner
from engine.runner_settings import RunnerSettings
from engine.settings import Speculation
from engine.sharded_kv_cache import AnyKVCache
from engine.speculation.drafters import Drafter, DraftModel, NgramDrafter
from engine.speculation.speculator import Speculator
from engine.weights import Progress, WeightsTarget, dummy_weights, load_weights
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

log = structlog.get_logger(__name__)


def load_model_runner(settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
    """Load weights, allocate the KV cache, choose the attention backend. For one rank: see load_ranked_runner in
    `engine/ranks/launch.py`. Raises ConfigurationError.
    """
    if settings.degrees != ALONE:
        raise ConfigurationError(f"{settings.degrees} ranks are not supported here: use 1")
    settings, config = resolve(settings)
    device = torch.device(settings.device)
    layout = kv_layout(config, settings)
    reservation = reserve_memory(settings, config)
    build = _load_model(settings, config, layout, on_progress)
    with load_phase("kv"), reserve_blocks(layout, settings, reservation) as num_blocks:
        cache = KVCache(layout, num_blocks, device, reservation=reservation)
    with load_phase("build"):
        model = build(cache)
    return assemble_runner(settings, model, cache)


def resolve(settings: RunnerSettings) -> tuple[RunnerSettings, AnyConfig]:
    """The settings with device and dtype in place of "auto", and the model's config. Raises ConfigurationError."""
    config = load_config(settings.model_dir, settings.rope)
    settings = replace(settings, device=str(_device(settings.device)), dtype=_dtype(settings, config))
    if settings.quantize == "int8" and (settings.device, settings.dtype) != ("cpu", "float32"):
        raise ConfigurationError(f"quantize=int8 is for CPU and float32, not {settings.device} and {settings.dtype}")
    if settings.load_format == "dummy" and read_partition(settings.model_dir) is not None:
        raise ConfigurationError(
            f"{settings.model_dir} is partitioned, and load_format=dummy ignores weights: give the original checkpoint"
        )
    return settings, config


def assemble_runner(settings: RunnerSettings, model: Model, cache: AnyKVCache, num_stages: int = 1) -> ModelRunner:
    """Join a model and its cache to a runner."""
    masks = TokenMasks(GrammarCompiler(settings.model_dir), model.config.vocab_size)
    return ModelRunner(
        model,
        cache,
        masks,
        layers_per_group=settings.layers_per_group,
        group_bytes=settings.group_bytes,
        max_in_flight=num_stages,
    )


def _load_model(
    settings: RunnerSettings, config: AnyConfig, layout: KVLayout, on_progress: Progress | None
) -> Callable[[KVCache], Model]:
    """Load the weights. Returns the function that builds the model on its cache."""
    if isinstance(config, EncoderDecoderConfig):
        parameters = load_parameters(settings, config, _parameter_specs(settings, config), on_progress)
        return lambda cache: EncoderDecoder(config, parameters, decoder_memory(settings, config, cache))
    reason = why_eager(settings, config, layout)
    if reason is None:
        packed = load_packed(settings, config, rank_share(config), on_progress)
        return lambda cache: CompiledDecoder(config, packed, cache)
    log.info("decoder not compiled", reason=reason)
    parameters = load_parameters(settings, config, parameter_specs(config), on_progress)
    return lambda cache: Decoder(config, parameters, decoder_memory(settings, config, cache))


def load_packed(
    settings: RunnerSettings, config: ModelConfig, share: RankShare, on_progress: Progress | None = None
) -> PackedDecoder:
    """The weights of a rank of the compiled decoder: mapped if the model is partitioned, else read and packed one by
    one. Raises ConfigurationError.
    """
    partition = read_partition(settings.model_dir)
    if partition is not None:
        with load_phase("map"):
            return partition.read(share.rank, share.degrees, settings.quantize)
    specs = share_specs(parameter_specs(config), config, share, "outputs")
    return pack_decoder(config, _parameters(settings, config, specs, on_progress), share)


def decoder_memory(settings: RunnerSettings, config: AnyConfig, cache: KVCache) -> DecoderMemory:
    """The cache and the attention backend for its heads, compiled if it is CpuAttention."""
    attention = select_backend(
        _attention_shape(config).shard(cache.span.heads),
        AttentionTarget(cache.tensor.device, getattr(torch, settings.dtype), cache.layout),
        settings.attention,
    )
    if isinstance(attention, CpuAttention):
        attention.compile(cache.layer(cache.span.layers.first))
    return DecoderMemory(cache, attention)


def _attention_shape(config: AnyConfig) -> AttentionShape:
    if isinstance(config, EncoderDecoderConfig):
        return AttentionShape(config.num_heads, config.num_heads, config.head_dim, given_scale=1.0)
    return attention_shape(config)


def why_eager(settings: RunnerSettings, config: ModelConfig, layout: KVLayout) -> str | None:
    """The reason why the decoder is not compiled, or None if it is."""
    if settings.enforce_eager:
        return "enforce_eager is set"
    if settings.attention != "auto":
        return f"attention backend {settings.attention} is requested"
    if (settings.device, settings.dtype) != ("cpu", "float32"):
        return f"{settings.dtype} on {settings.device}"
    return why_not_compiled(config, layout)


def kv_layout(config: AnyConfig, settings: RunnerSettings) -> KVLayout:
    """The KV layout of a runner with these settings. Reads the checkpoint's headers, not its weights."""
    return KVLayout(
        model_fingerprint=fingerprint(
            settings.model_dir, settings.load_format, settings.seed, settings.quantize, settings.rope
        ),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=_kv_dtype(settings, config),
    )


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
    parameters = _parameters(settings, config, specs, on_progress)
    parameters.read_all()
    return parameters


def _parameters(
    settings: RunnerSettings, config: AnyConfig, specs: list[ParameterSpec], on_progress: Progress | None
) -> Parameters:
    """The parameters, read when they are taken."""
    target = WeightsTarget(torch.device(settings.device), getattr(torch, settings.dtype), settings.scheme)
    if settings.load_format == "dummy":
        return dummy_weights(specs, target, settings.seed, on_progress)
    return load_weights(settings.model_dir, specs, target, on_progress, tied=_tied(config))


def _tied(config: AnyConfig) -> tuple[str, str] | None:
    """Names of the output matrix and the embedding if config.json says that they are equal."""
    if isinstance(config, EncoderDecoderConfig) or not config.tied:
        return None
    return f"{config.tensors.lm_head}.weight", f"{config.tensors.embed}.weight"


def _parameter_specs(settings: RunnerSettings, config: AnyConfig) -> list[ParameterSpec]:
    if not isinstance(config, EncoderDecoderConfig):
        return parameter_specs(config)
    # config.json does not state reliably whether the output matrix is tied.
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
    fits = config.head_dim % KEYS == 0 and settings.block_size % KEYS == 0 and why_no_loops() is None
    return "int8" if fits and _attention_shape(config).is_plain else "float16"


def reserve_blocks(
    layout: KVLayout, settings: RunnerSettings, reservation: KVReservation
) -> AbstractContextManager[int]:
    """See KVReservation.blocks."""
    block_bytes = layout.block_bytes + settings.companion_block_bytes
    return reservation.blocks(block_bytes, num_blocks=settings.num_blocks, max_blocks=settings.max_blocks)


def reserve_memory(settings: RunnerSettings, config: AnyConfig) -> KVReservation:
    """Announce a worker that loads the model."""
    device = torch.device(settings.device)
    if (partition := read_partition(settings.model_dir)) is not None:
        mapped_bytes = {partition.identity: partition.num_bytes}
        return KVReservation.enter(device, settings.kv_memory, partition.num_bytes, mapped_bytes)
    num_bytes = weights_bytes(settings, _parameter_specs(settings, config))
    return KVReservation.enter(device, settings.kv_memory, num_bytes)


def weights_bytes(settings: RunnerSettings, specs: Sequence[ParameterSpec]) -> int:
    """Memory of the parts that are held, in the dtype of the model, before quantisation."""
    itemsize = getattr(torch, settings.dtype).itemsize
    return sum(prod(spec.held_shape) for spec in specs if spec.is_held) * int(itemsize)


def fingerprint(
    model_dir: Path,
    load_format: str = "auto",
    seed: int = 0,
    quantize: str = "none",
    rope: RopeOverride = NO_ROPE_OVERRIDE,
) -> str:
    """Stable hash of the configuration and the weights, independent of how the checkpoint is sharded.

    It covers the name, dtype and shape of each tensor and a sample from its middle, so it takes milliseconds.
    """
    config = load_config(model_dir, rope)
    digest = _digest(config, f"dummy:{seed}".encode() if load_format == "dummy" else weights_digest(model_dir))
    return digest if quantize == "none" else f"{digest}-{quantize}"  # readable in messages about differing workers


def _digest(config: AnyConfig, weights: bytes) -> str:
    return blake2b(repr(config).encode() + weights, digest_size=16, person=b"tandem-model").hexdigest()


def weights_digest(model_dir: Path) -> bytes:
    """A digest of a checkpoint's weights; a partition knows that of its checkpoint. Raises ConfigurationError."""
    if (partition := read_partition(model_dir)) is not None:
        return bytes.fromhex(partition.weights_digest)
    stored, digest = open_checkpoint(model_dir), blake2b(digest_size=16)
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name}:{tensor.dtype}:{tensor.shape}".encode())
        digest.update(read_sample(tensor))
    return digest.digest()


def draft_block_bytes(speculation: Speculation, model: RunnerSettings) -> int:
    """Bytes of a KV block in the draft model's cache; 0 without one. ConfigurationError if the models do not match."""
    settings = _draft_settings(speculation, model)
    return 0 if settings is None else kv_layout(load_decoder_config(settings.model_dir), settings).block_bytes


def load_speculator(
    speculation: Speculation,
    model: RunnerSettings,
    load_draft: Callable[[RunnerSettings], Runner],
    *,
    max_batch_tokens: int,
) -> Speculator | None:
    """Build the speculator; None if speculation is off.

    `model`: settings of the large model, with `num_blocks` set. `load_draft` loads the draft model, if there is one.
    """
    if speculation.kind == "none":
        return None
    settings = _draft_settings(speculation, model)
    drafter: Drafter = NgramDrafter()
    if settings is not None:
        max_model_len = load_decoder_config(settings.model_dir).max_model_len
        drafter = DraftModel(load_draft(settings), max_model_len=max_model_len, max_batch_tokens=max_batch_tokens)
    return Speculator(drafter, speculation.max_drafts)


def _draft_settings(speculation: Speculation, model: RunnerSettings) -> RunnerSettings | None:
    """Settings of the draft model beside `model`; None without one. ConfigurationError if the models do not match."""
    if speculation.draft_model is None:
        return None
    for model_dir in (model.model_dir, speculation.draft_model):
        load_decoder_config(model_dir)
    facts, draft_facts = read_model_facts(model.model_dir), read_model_facts(speculation.draft_model)
    for name in ("vocab_size", "tokenizer_fingerprint"):
        actual, expected = getattr(draft_facts, name), getattr(facts, name)
        if actual != expected:
            raise ConfigurationError(
                f"draft_model {speculation.draft_model} does not fit {model.model_dir}: {name} {actual}, not {expected}"
            )
    if facts.eos_token_ids and not draft_facts.eos_token_ids:
        raise ConfigurationError(f"draft_model {speculation.draft_model} names no eos_token_id; {model.model_dir} does")
    # It is small: one rank computes it.
    return replace(
        model, model_dir=speculation.draft_model, rope=NO_ROPE_OVERRIDE, tensor_parallel=1, pipeline_parallel=1
    )
