"""Reads JSON files of a checkpoint, members of config.json by their types, the text part of a multimodal one, and what
it says of positions. Standard library only.

Each reader of a member raises ConfigurationError, which names the member, for a value of another type. A member that is
null is absent; of flags, null is false, as in transformers.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from checkpoint.multimodal import OTHER_KINDS, TEXT_MODELS, WRAPPERS
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json

RawConfig = Mapping[str, Any]
"""A config.json, or an object in it."""

# Names of the maximum sequence length and of the vocabulary size in different model families.
POSITION_KEYS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "model_max_length",
)
MOST_POSITIONS = 2**31 - 1
"""Files say 10^30 for no limit. What workers tell of themselves has 32 bits."""
VOCAB_KEYS = ("vocab_size", "padded_vocab_size")
_ACTIVATION_KEYS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation", "mamba_hidden_act", "mlp_hidden_act"),
)
_OTHER_ACTIVATIONS: Mapping[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
"""Names that transformers has for a function beside its usual one."""
_TIED, _DTYPE = "tie_word_embeddings", ("dtype", "torch_dtype")
# Members of multimodal models that stand outside of their text_config.
_AROUND_TEXT = ("eos_token_id", "quantization_config", "compression_config", "is_encoder_decoder")
_KEPT_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file. A missing `optional` file gives an empty one. Raises ConfigurationError."""
    if optional and not path.exists():
        return {}
    return parse_json_object(read_bytes(path), path)


def parse_json_object(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object that a file contains. Raises ConfigurationError with the file's name."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return content


def read_bytes(path: Path) -> bytes:
    """Read a file. Raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error


def require_searchable(folder: Path) -> None:
    """Raise ConfigurationError if this user may not look for files in a folder, because the folder, or one above it,
    lacks the permission x. A folder that is not there raises nothing.
    """
    try:
        os.stat(f"{folder}/.")
    except PermissionError as error:
        raise ConfigurationError(
            f"cannot read {folder}: {error.strerror}: this user needs x on it and on the folders above it"
        ) from error
    except OSError:
        return


def first_of(raw: RawConfig, keys: tuple[str, ...], default: Any = None) -> Any:
    """The value of the first of these keys that is present and not null."""
    return next((raw[key] for key in keys if raw.get(key) is not None), default)


def usual_activation(name: str) -> str:
    """The usual name of an activation that transformers knows by several."""
    return _OTHER_ACTIVATIONS.get(name, name)


def with_usual_activations(raw: RawConfig) -> RawConfig:
    """The config.json with the usual names of its activations."""
    named = {key: raw[key] for key in _ACTIVATION_KEYS if isinstance(raw.get(key), str)}
    return {**raw, **{key: usual_activation(name) for key, name in named.items()}}


def integer(raw: RawConfig, *keys: str, default: int | None = None, least: int = 1) -> int:
    """The value of the first present key, an integer from `least` on."""
    value = first_of(raw, keys, default)
    if type(value) is not int or value < least:
        _refuse_type(_present(raw, keys), "a positive integer" if least == 1 else f"an integer from {least} on", value)
    return value


def number(raw: RawConfig, *keys: str, default: float, may_be_zero: bool = False) -> float:
    """The value of the first present key, a finite number above 0, or 0 if it may be."""
    value = first_of(raw, keys, default)
    if not (is_positive(value) or (may_be_zero and type(value) in (int, float) and value == 0)):
        _refuse_type(_present(raw, keys), "a number from 0 on" if may_be_zero else "a number above 0", value)
    return float(value)


def optional_number(raw: RawConfig, key: str) -> float | None:
    """A finite number above 0, as it is in the file, or None."""
    value = raw.get(key)
    if value is not None and not is_positive(value):
        _refuse_type(key, "a number above 0", value)
    return value


def numbers(raw: RawConfig, key: str, *, may_be_zero: bool = False) -> tuple[float, ...]:
    """A list of finite numbers above 0, or from 0 on, or an empty one."""
    value = first_of(raw, (key,), [])
    if not isinstance(value, list) or not all(is_positive(each) or (may_be_zero and each == 0) for each in value):
        _refuse_type(key, f"a list of numbers {'from 0 on' if may_be_zero else 'above 0'}", value)
    return tuple(value)


def integers(raw: RawConfig, key: str) -> tuple[int, ...]:
    """A list of integers from 0 on, or an empty one."""
    value = first_of(raw, (key,), [])
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        _refuse_type(key, "a list of integers from 0 on", value)
    return tuple(value)


def text(raw: RawConfig, *keys: str, default: str) -> str:
    """The value of the first present key, a string."""
    value = first_of(raw, keys, default)
    if not isinstance(value, str):
        _refuse_type(_present(raw, keys), "a string", value)
    return value


def texts(raw: RawConfig, key: str) -> tuple[str, ...]:
    """A list of strings, or an empty one."""
    value = first_of(raw, (key,), [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        _refuse_type(key, "a list of strings", value)
    return tuple(value)


def layer_windows(raw: RawConfig, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """The window per layer: `window` for layers that `layer_types` marks as sliding, or for all layers without it."""
    if raw.get("layer_types") is None:
        return (window,) * num_layers
    types = texts(raw, "layer_types")
    if other := sorted(set(types) - {"sliding_attention", "full_attention"}):
        raise ConfigurationError(
            f"config.json: layer_types may name full_attention and sliding_attention, not {other[0]!r:.100}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def flag(raw: RawConfig, key: str, *, default: bool) -> bool:
    """True or false; 1 and 0 are, too."""
    value = raw.get(key, default)
    if value is not None and not (isinstance(value, int) and value in (0, 1)):
        _refuse_type(key, "true or false", value)
    return bool(value)


def section(raw: RawConfig, *keys: str) -> RawConfig:
    """The first of these objects that is present and has members, or an empty one."""
    for key in keys:
        value = raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            _refuse_type(key, "an object", value)
        if value:
            return dict(value)
    return {}


def refuse(raw: RawConfig, **unsupported: bool | str) -> None:
    """Raise ConfigurationError if config.json has one of these keys with the unsupported value."""
    for key, value in unsupported.items():
        given = raw.get(key)
        if isinstance(value, bool) and given is not None:
            given = flag(raw, key, default=False)
        if given is not None and not isinstance(given, type(value)):
            _refuse_type(key, "a string", given)
        if given == value:
            raise ConfigurationError(f"config.json: {key} {value!r} is not supported")


def read_config(model_dir: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint; of a multimodal one, its text part. All code that needs facts of a model calls
    this. Raises ConfigurationError.
    """
    return text_part(read_json(model_dir / "config.json"))


def text_part(raw: RawConfig) -> dict[str, Any]:
    """A config.json as it is, or its text part if its architecture is in WRAPPERS. Raises ConfigurationError."""
    wrapper = next((name for name in texts(raw, "architectures") if name in WRAPPERS), None)
    if wrapper is None:
        nested = raw.get("text_config")
        return {**nested, **raw} if isinstance(nested, Mapping) else dict(raw)  # workers refuse unknown architectures
    stated = section(raw, "text_config") or raw
    kind = text(stated, "model_type", default=WRAPPERS[wrapper])
    model = TEXT_MODELS.get(OTHER_KINDS.get(kind, kind))
    if model is None:
        raise ConfigurationError(
            f"{wrapper} with a text_config of model_type {kind!r} is not supported; supported: {', '.join(TEXT_MODELS)}"
        )
    part = {**model.defaults, **stated, "architectures": [model.architecture]}
    part |= {key: raw[key] for key in _AROUND_TEXT if raw.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if "mrope" in ((rope := section(stated, key)).get("rope_type"), rope.get("type")):
            part[key] = {**rope, "rope_type": "default"}  # a token of text has the same position on all axes
    if section(stated, "rope_parameters").get("rope_theta") is not None:
        part["rope_theta"] = stated.get("rope_theta")
    # Where both say so, transformers 4 takes what text_config says.
    if part.get(_TIED) is None:
        part.pop(_TIED, None)
        part |= {_TIED: raw[_TIED]} if raw.get(_TIED) is not None else {}
    return part | {"dtype": first_of(raw, _DTYPE, first_of(stated, _DTYPE))}


def rope_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of config.json for rotary positions. As in transformers, `rope_scaling`, which users add, overrides
    `rope_parameters`. If these have separate angles, it changes those of full attention only.
    """
    parameters, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    if not scaling:
        return parameters
    if own := section(parameters, "full_attention"):
        return {**parameters, "full_attention": {**kept_rope(own), **scaling}}
    kept = {key: value for key, value in kept_rope(parameters).items() if config.get(key) is None}
    return {**kept, **scaling}


def kept_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The members of rotary positions that a new scaling does not replace."""
    return {key: rope[key] for key in _KEPT_ROPE_KEYS if key in rope}


def rope_stretch(config: Mapping[str, Any], scaling: Mapping[str, Any], kind: str, positions: int) -> tuple[int, float]:
    """The context length of the first training, and by how much `kind` stretches it. `positions` is
    max_position_embeddings of config.json; `scaling` its entry for rotary positions.
    """
    key = "original_max_position_embeddings"
    original = integer(config, key, default=integer(scaling, key, default=positions))
    stretch = positions / original if kind in ("yarn", "longrope") else 1.0
    return original, number(scaling, "factor", default=stretch)


def stretched_positions(kind: str, positions: int, original: int, factor: float) -> int:
    """Return the maximum length that a scaling of rotary positions supports. `positions` is max_position_embeddings of
    config.json, which some kinds of scaling include and others do not.
    """
    if kind in ("linear", "dynamic"):
        positions = int(positions * factor)
    if kind == "yarn":
        positions = max(positions, int(original * factor))
    return min(positions, MOST_POSITIONS)


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's factor of queries and keys, for contexts that are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _present(raw: RawConfig, keys: tuple[str, ...]) -> str:
    return next((key for key in keys if raw.get(key) is not None), keys[0])


def is_positive(value: object) -> TypeGuard[float]:
    """True for a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _refuse_type(key: str, needed: str, value: object) -> NoReturn:
    raise ConfigurationError(f"config.json: {key} must be {needed}, got {value!r:.100}")
