"""Converts values of LMI's and TGI's keys to those of settings. Every conversion may raise ConfigurationError."""

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mesh.domain.errors import ConfigurationError

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
)
_FP8 = ("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn")
_FORMATTERS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("json", "jsonlines", "sse")},
        **{f"{name}_chat": name for name in ("json", "jsonlines", "sse")},
    }
)
_BYTES_OF_MB = 1 << 20
_ONE = ("1", "max")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_SPECULATION: Mapping[str, str] = MappingProxyType(
    {
        "method": "decode.speculative",
        "model": "decode.draft_model",
        "num_speculative_tokens": "decode.num_speculative_tokens",
    }
)
_CHECKPOINT_FORMATS = (
    "awq",
    "auto-round",
    "awq_marlin",
    "bitnet",
    "compressed-tensors",
    "gptq",
    "gptq_marlin",
    "hqq",
    "marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "mxfp4",
    "quark",
    "torchao",
)
_UNSUPPORTED_QUANTIZATIONS = ("bitsandbytes", "bitsandbytes-fp4", "bitsandbytes-nf4", "eetq", "smoothquant")
_FILE_FORMATS = ("safetensors", "pt")
_METHODS: Mapping[str, str] = MappingProxyType({"ngram": "ngram", "draft_model": "draft", "mtp": "mtp"})
ONE_DRAFT_RANK = "one process of a worker runs the draft model"

Convert = Callable[[str], str]


def as_is(value: str) -> str:
    """The unchanged value. The service checks it."""
    return value


def dtype(value: str) -> str:
    """A type name, also from the short names of LMI. int8 is rejected, because it is not a type here."""
    if value.lower() == "int8":
        raise ConfigurationError("int8 is not a dtype: set option.quantize=int8")
    return _DTYPES.get(value.lower(), value)


def kv_dtype(value: str) -> str:
    """A type of KV. Other types of fp8 than e4m3, which TGI and vLLM have, are rejected."""
    name = value.lower()
    if name.startswith("fp8_") and name not in _FP8:
        raise ConfigurationError(f"KV in {name} is not supported: use fp8, which is e4m3")
    return "fp8" if name in _FP8 else _DTYPES.get(name, value)


def formatter(value: str) -> str:
    """An output formatter. The variants for chat map to the plain formatters."""
    if value not in _FORMATTERS:
        raise ConfigurationError(f"expected one of {', '.join(_FORMATTERS)}, got {value!r}")
    return _FORMATTERS[value]


def one_draft_rank(value: str) -> str:
    """The number of ranks of the draft model, which must be 1."""
    if value not in _ONE:
        raise ConfigurationError(f"{ONE_DRAFT_RANK}: expected 1, got {value!r}")
    return value


def megabytes(value: str) -> str:
    """Convert a number of megabytes to bytes."""
    return str(round(number(value) * _BYTES_OF_MB))


def number(value: str, before: str = "") -> float:
    """A finite number. `before` is a prefix for the error message."""
    try:
        if math.isfinite(result := float(value)):
            return result
    except ValueError:
        pass
    raise ConfigurationError(f"{before}expected a number, got {value!r}")


def lmi_schema(value: str) -> str:
    """The wire format for LMI's async_mode: "async" or "rolling"."""
    return "async" if flag(value) else "rolling"


def flag(value: str) -> bool:
    """A boolean in any common spelling."""
    if value.lower() not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"expected true or false, got {value!r}")
    return value.lower() in _TRUE


def quantization(value: str) -> str:
    """A quantisation that workers make. Checkpoints in the formats of others are recognised without being named."""
    if value.lower() in _UNSUPPORTED_QUANTIZATIONS:
        raise ConfigurationError("this is not supported: use int8 or int4")
    return "none" if value.lower() in _CHECKPOINT_FORMATS else value


def load_format(value: str) -> str:
    """The formats of files are recognised without being named."""
    return "auto" if value.lower() in _FILE_FORMATS else value


def off_only(value: str) -> str:
    """A feature that must stay off."""
    if flag(value):
        raise ConfigurationError("this is not supported")
    return value


def sharded(value: str) -> str:
    """The degree that TGI's SHARDED means: as many ranks as the machine has places for, or one."""
    return "max" if flag(value) else "1"


def degree(value: str) -> str:
    """A degree of tensor parallelism. SageMaker sets SM_NUM_GPUS=0 where there is no GPU: one rank, on CPU."""
    return "1" if value.strip() == "0" else value


def all_graphs(value: str) -> str:
    """The sizes of batches that ENABLE_CUDA_GRAPHS, a boolean, means."""
    return "auto" if flag(value) else "0"


def handler_file(value: str) -> str:
    """The file of a handler; empty for LMI's built-in entry points, which need none."""
    return "" if value.startswith("djl_python.") else value


def speculation(value: str) -> dict[str, str]:
    """Settings from vLLM's JSON object {"method": ..., "model": ..., "num_speculative_tokens": ...}."""
    try:
        options = json.loads(value)
    except ValueError as error:
        raise ConfigurationError(f"expected a JSON object: {error}") from None
    if not isinstance(options, dict):
        raise ConfigurationError("expected a JSON object")
    if unknown := options.keys() - _SPECULATION.keys():
        raise ConfigurationError(f"not supported: {', '.join(sorted(unknown))}; known are {', '.join(_SPECULATION)}")
    method = options.get("method", "draft_model" if "model" in options else "ngram")
    if str(method).endswith("_mtp"):  # older names have the model's type in front
        method = "mtp"
    if method not in _METHODS:
        raise ConfigurationError(f"method must be ngram, mtp or draft_model, got {method!r}")
    return {_SPECULATION[name]: str(option) for name, option in options.items()} | {
        "decode.speculative": _METHODS[method]
    }
