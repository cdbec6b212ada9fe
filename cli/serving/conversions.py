"""Values as LMI and TGI write them, into values of our settings. Each raises ConfigurationError."""

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
    """The service itself checks it."""
    return value


def dtype(value: str) -> str:
    """Short names of types, too."""
    if value.lower() == "int8":
        raise ConfigurationError("int8 is no dtype here: set option.quantize=int8")
    return _DTYPES.get(value.lower(), value)


def kv_dtype(value: str) -> str:
    """TGI's and vLLM's types of KV are mostly fp8."""
    if value.lower().startswith("fp8"):
        raise ConfigurationError("there is no fp8 KV: int8 is as small")
    return _DTYPES.get(value.lower(), value)


def formatter(value: str) -> str:
    """Chat has the formatters of the rest."""
    if value not in _FORMATTERS:
        raise ConfigurationError(f"want one of {', '.join(_FORMATTERS)}, got {value!r}")
    return _FORMATTERS[value]


def one_only(value: str) -> str:
    """A degree of parallelism inside a worker, where there is only one."""
    if value not in ("1", "max"):
        raise ConfigurationError(
            f"a worker runs on one device: want 1 or max, got {value!r}; see --decode and --prefill"
        )
    return value


def megabytes(value: str) -> str:
    """To bytes."""
    return str(round(number(value) * _BYTES_OF_MB))


def number(value: str) -> float:
    """Any number."""
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"want a number, got {value!r}") from None


def lmi_schema(value: str) -> str:
    """LMI's async mode has a wire format of its own."""
    return "async" if flag(value) else "rolling"


def flag(value: str) -> bool:
    """True or false in any of their spellings."""
    if value.lower() not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"want true or false, got {value!r}")
    return value.lower() in _TRUE


def off_only(value: str) -> str:
    """Something that cannot be turned on."""
    if flag(value):
        raise ConfigurationError("this is not supported")
    return value


def handler_file(value: str) -> str:
    """LMI's own entry points are what is done here without a handler; any other is a file of the user's."""
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
    """vLLM's JSON object: {"method": ..., "model": ..., "num_speculative_tokens": ...}."""
    try:
        given = json.loads(value)
    except ValueError as error:
        raise ConfigurationError(f"want a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise ConfigurationError("want a JSON object")
    if unknown := given.keys() - _SPECULATION.keys():
        raise ConfigurationError(f"not supported: {', '.join(sorted(unknown))}; known are {', '.join(_SPECULATION)}")
    method = given.get("method", "draft_model" if "model" in given else "ngram")
    if method not in _METHODS:
        raise ConfigurationError(f"method must be ngram or draft_model, got {method!r}")
    return {_SPECULATION[name]: str(each) for name, each in given.items()} | {"decode.speculative": _METHODS[method]}
