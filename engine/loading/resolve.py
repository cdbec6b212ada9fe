"""Resolves the settings of a runner against its model: device, dtypes, ranks, KV layout, fingerprint, and which decoder
runs.

Only config.json and headers of the checkpoint are read, no weights.
"""

from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path

from checkpoint.partition_manifest import read_partition
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from checkpoint.tensors import open_checkpoint, read_sample
from engine.devices import find_device, num_devices
from engine.kernels.cpu.machine import KEYS, MAX_SHORTS, knows_bf16, knows_vnni, why_no_loops
from engine.loading.stored_parameters import (
    is_exact,
    read_modules,
    rounds_to_steps,
    stored_in_fp8,
    stored_in_int4,
    stored_name,
)
from engine.loading.ternary import all_ternary
from engine.models.adapters import change_experts
from engine.models.cpu_support import why_not_compiled
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encodings import IN_STEPS, PACKED
from engine.models.kv_groups import group_windows, num_kv_layers
from engine.models.model_config import ModelConfig
from engine.models.mtp import input_specs, mtp_config, own_specs
from engine.models.packed_weights import stores_steps
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config
from engine.models.recurrent.rows import state_rows
from engine.quantized_formats.config import read_quantization
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout


def resolve(settings: RunnerSettings) -> tuple[RunnerSettings, AnyConfig]:
    """The settings with device and dtype in place of "auto", the arithmetic that the checkpoint asks for, and the
    model's config. Raises ConfigurationError.
    """
    config = config_of(settings)
    device, dtype, quantize = str(find_device(settings.device)), _dtype(settings, config), _quantize(settings, config)
    settings = replace(settings, device=device, dtype=dtype, quantize=quantize)
    if quantize != "none" and (device, dtype) != ("cpu", "float32"):
        raise ConfigurationError(f"quantize={quantize} is for CPU and float32, not {device} and {dtype}")
    if quantize in ("int4", "fp8") and (reason := _why_not_packed(settings, config, quantize)) is not None:
        raise ConfigurationError(
            f"quantize={quantize} is for the compiled decoder, which cannot run here ({reason}): use int8"
        )
    if settings.load_format == "dummy" and read_partition(settings.model_dir) is not None:
        raise ConfigurationError(
            f"{settings.model_dir} is partitioned, and load_format=dummy ignores weights: give the original checkpoint"
        )
    return settings, config


def config_of(settings: RunnerSettings) -> AnyConfig:
    """The config of what is loaded. Raises ConfigurationError."""
    config = load_config(settings.model_dir, settings.rope)
    if not settings.is_mtp:
        return config
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(f"speculative=mtp is for decoder-only models, not for {config.architecture}")
    return mtp_config(config)


def require_mtp(settings: RunnerSettings) -> None:
    """Raise ConfigurationError if the checkpoint has no layer of multi-token prediction."""
    config_of(replace(settings, is_mtp=True))
    if read_partition(settings.model_dir) is not None:
        raise ConfigurationError(
            f"{settings.model_dir} is partitioned, and partitions have no layer of multi-token prediction: serve the "
            "original checkpoint, or leave speculative=mtp out"
        )
    config = load_config(settings.model_dir, settings.rope)
    assert isinstance(config, ModelConfig)
    if settings.load_format == "dummy":
        return
    needed = [source.name for spec in input_specs(config) for source in spec.sources]
    stored = open_checkpoint(settings.model_dir)
    if missing := [name for name in sorted(needed) if stored_name(name, stored) not in stored]:
        raise ConfigurationError(
            f"{settings.model_dir} has no layer of multi-token prediction: {missing[0]} is missing; leave "
            "speculative=mtp out (speculative=ngram needs no weights)"
        )


def why_eager(settings: RunnerSettings, config: ModelConfig, layout: KVLayout) -> str | None:
    """The reason why the decoder is not compiled, or None if it is."""
    if settings.enforce_eager:
        return "enforce_eager is set"
    if settings.encoding not in PACKED:
        return f"encoding {settings.encoding}"
    if settings.attention != "auto":
        return f"attention backend {settings.attention} is requested"
    if settings.device != "cpu":
        return f"{settings.dtype} on {settings.device}"
    if settings.adapters and config.latent is not None:
        return "adapters of a model with latent attention"
    if settings.adapters and config.experts is not None and change_experts(settings.adapters, parameter_specs(config)):
        return "adapters of experts"
    return why_not_compiled(config, layout, settings.degrees.num_ranks)


def fitting_ranks(settings: RunnerSettings, devices: str = "cpu") -> int:
    """The largest useful number of ranks in a stage. On GPUs, which `devices` lists or names the first of: one for
    each, as far as the model allows. On CPU: up to `settings.tensor_parallel`, and 1 if the decoder is not compiled. A
    partitioned model has the ranks that it was partitioned for. Raises ConfigurationError.
    """
    if (partition := read_partition(settings.model_dir)) is not None:
        return partition.degrees.tensor
    num_gpus = num_devices(devices) // settings.pipeline_parallel
    size = max(settings.tensor_parallel, num_gpus)
    if size == 1:
        return 1
    settings, config = resolve(settings)
    if not isinstance(config, ModelConfig) or config.recurrent is not None or config.per_layer is not None:
        return 1
    if not num_gpus and why_eager(settings, config, kv_layout(config, settings)) is not None:
        return 1
    return min(num_gpus or size, config.num_kv_heads)


def kv_layout(config: AnyConfig, settings: RunnerSettings) -> KVLayout:
    """The KV layout of a runner with these settings. Reads the checkpoint's headers, not its weights."""
    arithmetic = _arithmetic(settings, config)
    model_fingerprint = fingerprint(
        settings.model_dir,
        settings.load_format,
        settings.seed,
        arithmetic,
        settings.rope,
        rounded_to(settings, config),
    )
    return _layout(config, settings, model_fingerprint, _kv_dtype(settings, config, arithmetic))


def _layout(config: AnyConfig, settings: RunnerSettings, model_fingerprint: str, dtype: str) -> KVLayout:
    chunks = config.windows if isinstance(config, ModelConfig) and config.windows_are_chunks else ()
    if any(chunk is not None and chunk % settings.block_size for chunk in chunks):
        raise ConfigurationError(
            f"block_size {settings.block_size} does not divide the {max(filter(None, chunks))} tokens of the chunks in "
            f"which {config.architecture} attends: use a divisor of that"
        )
    windows = freed_windows(config, settings)
    layout = KVLayout(
        model_fingerprint=model_fingerprint,
        num_layers=num_kv_layers(config, windows) if isinstance(config, ModelConfig) else config.num_kv_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=dtype,
        windows=windows,
    )
    if isinstance(config, EncoderDecoderConfig):
        return layout
    layout = replace(
        layout,
        keys_are_values=config.kv_planes == 1,
        windows_are_chunks=bool(windows) and config.windows_are_chunks,
    )
    if config.recurrent is None:
        return layout
    return replace(layout, state_blocks=state_rows(config.recurrent, layout).num_blocks)


def freed_windows(config: AnyConfig, settings: RunnerSettings) -> tuple[int, ...]:
    """The windows of the groups of layers whose KV is freed behind them."""
    if isinstance(config, EncoderDecoderConfig) or settings.keep_all_kv:
        return ()
    return group_windows(config, settings.pipeline_parallel)


def fingerprint(
    model_dir: Path,
    load_format: str = "auto",
    seed: int = 0,
    arithmetic: str = "none",
    rope: RopeOverride = NO_ROPE_OVERRIDE,
    rounded: str = "",
) -> str:
    """Stable hash of the configuration and the weights, independent of how the checkpoint is sharded.

    It covers the name, dtype and shape of each tensor and a sample from its middle, so it takes milliseconds; and the
    formats of quantised matrices, which tensors alone do not tell. `arithmetic`: how activations are rounded for
    products, "none" if they are not. `rounded`: see `rounded_to`.
    """
    config, is_dummy = load_config(model_dir, rope), load_format == "dummy"
    weights = f"dummy:{seed}{rounded}".encode() if is_dummy else weights_digest(model_dir, rounded)
    quantization = read_quantization(model_dir)
    digest = _digest(config, weights if quantization is None else weights + repr(quantization).encode())
    return digest if arithmetic == "none" else f"{digest}-{arithmetic}"  # readable in messages about differing workers


def _digest(config: AnyConfig, weights: bytes) -> str:
    return blake2b(facts_of(config).encode() + weights, digest_size=16, person=b"tandem-model").hexdigest()


def facts_of(config: AnyConfig) -> str:
    """The config as text. A fact that a later version has added, which is one with `repr=False`, appears only if it is
    not the default: workers of both versions must agree on a model that they compute alike.
    """
    parts = [config, *(part for fact in fields(config) if is_dataclass(part := getattr(config, fact.name)))]
    later = [(part, fact) for part in parts for fact in fields(part) if not fact.repr]
    added = [f", {fact.name}={value!r}" for part, fact in later if (value := getattr(part, fact.name)) != fact.default]
    return repr(config) + "".join(added)


def weights_digest(model_dir: Path, rounded: str) -> bytes:
    """A digest of a checkpoint's weights; a partition knows that of its own. Raises ConfigurationError.

    `rounded`: see `rounded_to`.
    """
    if (partition := read_partition(model_dir)) is not None:
        return bytes.fromhex(partition.weights_digest)
    stored, digest = open_checkpoint(model_dir), blake2b(digest_size=16)
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name}:{tensor.dtype}:{tensor.shape}".encode())
        digest.update(read_sample(tensor))
    digest.update(rounded.encode())
    return digest.digest()


def _dtype(settings: RunnerSettings, config: AnyConfig) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    if find_device(settings.device).type != "cpu":
        return config.dtype
    if settings.quantize != "none":
        return "float32"
    if (partition := read_partition(settings.model_dir)) is not None:
        return partition.dtype
    quantization, is_kept = read_quantization(settings.model_dir), settings.load_format == "dummy"
    if quantization is not None and not quantization.is_mxfp4 and _is_quantized(settings, config):
        if not quantization.is_bitsandbytes:
            return "float32"
        is_kept = True  # dequantised to that dtype, as its authors and transformers do
    in_own_dtype = replace(settings, dtype=config.dtype)
    is_kept = is_kept or not rounded_to(in_own_dtype, config)
    return config.dtype if is_kept and _is_compiled(in_own_dtype, config) else "float32"


def _is_quantized(settings: RunnerSettings, config: AnyConfig) -> bool:
    """False for a layer of multi-token prediction in floating point, beside a model that is quantised."""
    return not settings.is_mtp or (
        isinstance(config, ModelConfig) and bool(read_modules(settings.model_dir, own_specs(config)))
    )


def rounded_to(settings: RunnerSettings, config: AnyConfig) -> str:
    """The dtype that matrices of the compiled decoder are rounded to; empty if they are exactly those in the
    checkpoint. Raises ConfigurationError.
    """
    dtype = _dtype(settings, config)
    if dtype == "float32" or isinstance(config, EncoderDecoderConfig) or not _is_compiled(settings, config):
        return ""
    if read_partition(settings.model_dir) is not None:
        return ""  # its digest tells
    is_kept = settings.load_format != "dummy" and is_exact(settings.model_dir, parameter_specs(config), dtype)
    return "" if is_kept else dtype


def _is_compiled(settings: RunnerSettings, config: AnyConfig) -> bool:
    """True if the compiled decoder can run the model, with KV in fp32 if its dtype is "auto"."""
    return _why_eager_unresolved(settings, config) is None


def _why_not_packed(settings: RunnerSettings, config: AnyConfig, quantize: str) -> str | None:
    """The reason why matrices in int4 or fp8 cannot be multiplied as such, or None."""
    if quantize == "fp8" and read_partition(settings.model_dir) is None and not _has_fp8(settings, config):
        return "the matrices of the checkpoint are not in fp8 (e4m3) with scales for whole outputs, groups or blocks"
    return _why_eager_unresolved(replace(settings, quantize=quantize), config)


def _has_fp8(settings: RunnerSettings, config: AnyConfig) -> bool:
    if settings.load_format == "dummy" or isinstance(config, EncoderDecoderConfig):
        return False
    return stored_in_fp8(settings.model_dir, parameter_specs(config)) is not None


def _why_eager_unresolved(settings: RunnerSettings, config: AnyConfig) -> str | None:
    """See `why_eager`: for settings that are not resolved yet, with KV in fp32 if its dtype is "auto"."""
    if isinstance(config, EncoderDecoderConfig):
        return "an encoder-decoder model"
    dtype = "float32" if settings.kv_dtype == "auto" else settings.kv_dtype
    settings = replace(settings, device=str(find_device(settings.device)))
    return why_eager(settings, config, _layout(config, settings, "", dtype))


def _quantize(settings: RunnerSettings, config: AnyConfig) -> str:
    """The arithmetic of linear layers. A checkpoint in int8 (W8A8) is computed in int8 where that is possible; one in
    int4 or fp8 is computed in that, unless the settings name a dtype.
    """
    computes_bytes = (find_device(settings.device).type, _dtype(settings, config)) == ("cpu", "float32")
    if settings.quantize != "none" or not computes_bytes:
        return settings.quantize
    if (quantization := read_quantization(settings.model_dir)) is None:
        return "none"
    if quantization.is_ternary:
        return _ternary(settings, config)
    if quantization.is_w8a8:
        return "int8"
    if quantization.is_bitsandbytes and read_partition(settings.model_dir) is None:
        return "none"  # levels of NF4 would be rounded, and int8 was made for rows some of whose numbers are not
    if settings.dtype != "auto" or settings.load_format == "dummy" or isinstance(config, EncoderDecoderConfig):
        return "none"
    if (partition := read_partition(settings.model_dir)) is not None:
        return partition.quantize
    if stored_in_int4(settings.model_dir, parameter_specs(config)) is not None:
        return "int4" if _why_not_packed(settings, config, "int4") is None else "none"
    return "fp8" if _why_not_packed(settings, config, "fp8") is None else "none"


def _ternary(settings: RunnerSettings, config: AnyConfig) -> str:
    """The encoding of a checkpoint with ternary matrices, see engine/loading/ternary.py."""
    if (partition := read_partition(settings.model_dir)) is not None:
        return partition.quantize
    if settings.load_format == "dummy" or isinstance(config, EncoderDecoderConfig):
        return "int8"
    specs = parameter_specs(config)
    modules = read_modules(settings.model_dir, specs)
    in_steps = all_ternary(specs, modules) and rounds_to_steps(specs, modules)
    return "int4" if in_steps and _why_not_packed(settings, config, "int4") is None else "int8"


def keeps_output(settings: RunnerSettings) -> bool:
    """True if the output matrix is not rounded beside matrices that are."""
    if settings.quantize == "none" or settings.load_format == "dummy":
        return False
    quantization = read_quantization(settings.model_dir)
    return quantization is not None and quantization.is_ternary


def _arithmetic(settings: RunnerSettings, config: AnyConfig) -> str:
    """How products of linear layers differ from those in fp32: the encoding, "bf16" or "none". fp8 is exact."""
    if (quantize := _quantize(settings, config)) not in ("none", "fp8"):
        return IN_STEPS if quantize == "int4" and is_in_steps(settings, config) else quantize
    has_bf16_products = _dtype(settings, config) == "bfloat16" and _is_compiled(settings, config) and knows_bf16()
    return "bf16" if has_bf16_products else "none"


def is_in_steps(settings: RunnerSettings, config: AnyConfig) -> bool:
    """Whether int4 means steps of int8, see rounds_to_steps. A partition has what it was made with."""
    if isinstance(config, EncoderDecoderConfig):
        return False
    if (partition := read_partition(settings.model_dir)) is not None:
        partition.require_file(partition.files[0])
        return stores_steps(partition.folder / partition.files[0].name)
    specs = parameter_specs(config)
    is_plain = settings.load_format == "dummy" or read_quantization(settings.model_dir) is None
    return rounds_to_steps(specs, {} if is_plain else read_modules(settings.model_dir, specs))


def _kv_dtype(settings: RunnerSettings, config: AnyConfig, arithmetic: str) -> str:
    if settings.kv_dtype != "auto":
        return settings.kv_dtype
    if arithmetic == "bf16":
        return "float16"  # finer than bf16, and half of what fp32 takes
    quantization = read_quantization(settings.model_dir)
    if arithmetic != "none" and quantization is not None and quantization.is_ternary:
        return "float16"  # finer than what such models were trained with
    if arithmetic == "none":
        dtype = _dtype(settings, config)
        return "float32" if _is_compiled(replace(settings, dtype=dtype), config) else dtype
    can_multiply = config.head_dim % KEYS == 0 and (config.head_dim <= MAX_SHORTS or knows_vnni())
    if isinstance(config, ModelConfig) and config.latent is not None:
        return "float16"  # one scale for rotated keys and latents, which differ in size, is coarse
    fits = can_multiply and settings.block_size % KEYS == 0 and why_no_loops() is None
    return "int8" if fits else "float16"
