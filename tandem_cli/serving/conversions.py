"""Converts values of LMI and TGI to values of Tandem's settings. Every function may raise ConfigurationError."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mesh.domain.errors import ConfigurationError

Convert = Callable[[str], str]

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
)
_FORMATTERS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("json", "jsonlines", "sse")},
        **{f"{name}_chat": name for name in ("json", "jsonlines", "sse")},
    }
)
_BYTES_OF_MB = 1 << 20
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def as_is(value: str) -> str:
    """The unchanged value. The service checks it."""
    return value


def dtype(value: str) -> str:
    """A type name, also from the short names of LMI. int8 is rejected, because it is not a type here."""
    if value.lower() == "int8":
        raise ConfigurationError("int8 is not a dtype: set option.quantize=int8")
    return _DTYPES.get(value.lower(), value)


def kv_dtype(value: str) -> str:
    """A type of KV. fp8, which TGI and vLLM have, is rejected."""
    if value.lower().startswith("fp8"):
        raise ConfigurationError("fp8 KV is not supported: use int8, which is as small")
    return _DTYPES.get(value.lower(), value)


def formatter(value: str) -> str:
    """An output formatter. The variants for chat map to the plain formatters."""
    if value not in _FORMATTERS:
        raise ConfigurationError(f"expected one of {', '.join(_FORMATTERS)}, got {value!r}")
    return _FORMATTERS[value]


def one_only(value: str) -> str:
    """A degree of parallelism inside a worker, which must be 1."""
    if value not in ("1", "max"):
        raise ConfigurationError(
            f"a worker runs on one device: expected 1 or max, got {value!r}; see --decode and --prefill"
        )
    return value


def megabytes(value: str) -> str:
    """Megabytes, converted to bytes."""
    return str(round(number(value) * _BYTES_OF_MB))


def number(value: str, before: str = "") -> float:
    """A number. `before` is a prefix for the error message."""
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"{before}expected a number, got {value!r}") from None


def lmi_schema(value: str) -> str:
    """The wire format for LMI's async_mode: "async" or "rolling"."""
    return "async" if flag(value) else "rolling"


def flag(value: str) -> bool:
    """A boolean in any common spelling."""
    if value.lower() not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"expected true or false, got {value!r}")
    return value.lower() in _TRUE


def off_only(value: str) -> str:
    """A feature that must stay off."""
    if flag(value):
        raise ConfigurationError("this is not supported")
    return value


def unsharded(value: str) -> str:
    """TGI's SHARDED, which must be off, as models are not sharded."""
    return one_only("1" if not flag(value) else value)


def handler_file(value: str) -> str:
    """The file of a handler; empty for LMI's built-in entry points, which need none."""
    return "" if value.startswith("djl_python.") else value


_SPECULATION: Mapping[str, str] = MappingProxyType(
    {
        "method": "decode.speculative",
        "model": "decode.draft_model",
        "num_speculative_tokens": "decode.num_speculative_tokens",
    }
)
_METHODS: Mapping[str, str] = MappingProxyType({"ngram": "ngram", "draft_model": "draft"})


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
    if method not in _METHODS:
        raise ConfigurationError(f"method must be ngram or draft_model, got {method!r}")
    return {_SPECULATION[name]: str(option) for name, option in options.items()} | {
        "decode.speculative": _METHODS[method]
    }
