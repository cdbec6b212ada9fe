"""Reads ModelFacts from a checkpoint folder, for routers and workers. Standard library only.

`config.json` and a tokenizer are required; `generation_config.json` is optional.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from checkpoint.config_json import (
    MOST_POSITIONS,
    POSITION_KEYS,
    VOCAB_KEYS,
    read_config,
    read_json,
    rope_section,
    rope_stretch,
    section,
    stretched_positions,
)
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from checkpoint.tokenizer_fingerprint import tokenizer_fingerprint
from mesh.domain.errors import ConfigurationError

_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts on which router and workers must agree. `max_positions` is None if only the workers know the maximum
    length. `decoder_start_token_id` is the decoder's first token in an encoder-decoder model, None in other models.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_positions: int | None
    tokenizer_fingerprint: str
    decoder_start_token_id: int | None = None


def read_model_facts(model_dir: Path, rope: RopeOverride = NO_ROPE_OVERRIDE) -> ModelFacts:
    """Read a checkpoint folder; `rope` replaces its rotary positions. Raises ConfigurationError, which names the bad
    file.
    """
    path = model_dir / "config.json"
    config = read_config(model_dir)
    generation = read_json(model_dir / _GENERATION, optional=True)
    vocab_size = _integer(config, VOCAB_KEYS, path)
    if vocab_size is None:
        raise ConfigurationError(f"{path} has no vocab_size")
    decoder_start = _decoder_start(config, generation, path)
    return ModelFacts(
        vocab_size=vocab_size,
        eos_token_ids=_eos_ids(config, path) | _eos_ids(generation, model_dir / _GENERATION),
        # Encoder-decoder models have relative positions; their n_positions is the training length, not a limit.
        max_positions=None if decoder_start is not None else _max_positions(config, path, rope),
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        decoder_start_token_id=decoder_start,
    )


def require_generation_config(model_dir: Path) -> None:
    """Raise ConfigurationError for a generation_config.json that `read_model_facts` refuses."""
    path = model_dir / _GENERATION
    _eos_ids(read_json(path, optional=True), path)


def _max_positions(config: Mapping[str, Any], path: Path, override: RopeOverride) -> int | None:
    positions = _integer(config, POSITION_KEYS, path)
    if positions is None or override.base:
        return None
    counts_scaled = str(config.get("model_type")).startswith("gemma3")
    positions = min(positions, MOST_POSITIONS)
    if counts_scaled and not override.scaling:
        return positions
    rope = rope_section(override.apply(config))
    rope = section(rope, "full_attention") or rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original, factor = rope_stretch(config, rope, str(kind), positions)
    return stretched_positions(str(kind), positions, original, factor)


def _decoder_start(config: Mapping[str, object], generation: Mapping[str, object], path: Path) -> int | None:
    if not config.get("is_encoder_decoder"):
        return None
    key = "decoder_start_token_id"
    token_id = config.get(key) if generation.get(key) is None else generation[key]
    if token_id is None or not _is_index(token_id):
        raise ConfigurationError(f"{path}: an encoder-decoder model needs {key}, got {token_id!r}")
    return int(token_id)


def _eos_ids(config: Mapping[str, object], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_index(token_id) for token_id in ids):
        raise ConfigurationError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _integer(config: Mapping[str, object], keys: Iterable[str], path: Path) -> int | None:
    """Return the value of the first of `keys` that is set, None if none is. Raises ConfigurationError."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not _is_index(value) or value == 0:
            raise ConfigurationError(f"{path}: {key} must be a positive integer, got {value!r}")
        return int(value)
    return None


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
