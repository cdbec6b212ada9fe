"""Reads the sampling and the stop strings that a model's generation_config.json recommends. Standard library only."""

from pathlib import Path
from typing import Any

from checkpoint.config_json import read_json
from mesh.domain.errors import ConfigurationError, InvalidRequest
from mesh.domain.request import SamplingParams

_NAME = "generation_config.json"
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX = (1 << 32) - 1
_HINT = "correct it, or set generation_config to none"


def read_sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """Return the sampling that generation_config.json recommends. As in vLLM, its `do_sample` does not matter. Raises
    ConfigurationError for values that no request may have.
    """
    path = model_dir / _NAME
    raw = read_json(path, optional=True)
    given = {key: raw[key] for key in _KEYS if raw.get(key) is not None}
    for key, value in given.items():
        types, kind = ((int,), "a whole number") if key == "top_k" else ((int, float), "a number")
        if type(value) not in types or abs(value) > _MAX:
            raise ConfigurationError(f"{path}: {key} must be {kind} of at most {_MAX}, got {value!r:.100}; {_HINT}")
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])  # -1 is off, too
    _validate(path, SamplingParams(**given))
    return given


def read_stop_strings(model_dir: Path) -> tuple[str, ...]:
    """Return the stop strings that generation_config.json names, as one text or a list. Raises ConfigurationError for
    those that no request may have.
    """
    path = model_dir / _NAME
    value = read_json(path, optional=True).get("stop_strings")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise ConfigurationError(f"{path}: stop_strings must be a text or a list of texts, got {value!r:.100}; {_HINT}")
    _validate(path, SamplingParams(stop=tuple(stops)))
    return tuple(stops)


def _validate(path: Path, sampling: SamplingParams) -> None:
    try:
        sampling.validate(vocab_size=1)
    except InvalidRequest as error:
        raise ConfigurationError(f"{path}: {error}; {_HINT}") from error
