"""Reads facts about a model from its checkpoint folder, for routers and workers. Standard library only.

`config.json` and a tokenizer are required; `generation_config.json` is optional. Settings may replace the checkpoint's
rotary positions, to serve longer sequences.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeGuard

from checkpoint.config_json import (
    MOST_POSITIONS,
    POSITION_KEYS,
    VOCAB_KEYS,
    is_positive,
    kept_rope,
    read_bytes,
    read_config,
    read_json,
    rope_section,
    rope_stretch,
    section,
    stretched_positions,
)
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json

_ROPE_FORM = 'rope_scaling must be a JSON object such as {"rope_type": "linear", "factor": 2.0}'

ALL_IN_ONE = "tokenizer.json"
_GENERATION = "generation_config.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
TEKKEN = "tekken.json"
TIKTOKEN = ("tiktoken.model", "hy.tiktoken")
BYTE_LEVEL = ("vocab.json", "merges.txt")
_VOCABULARIES = (ALL_IN_ONE, *SENTENCEPIECE, TEKKEN, *TIKTOKEN)
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_FINGERPRINT_BYTES = 16
# Older checkpoints of T5 do not name their class.
_T5 = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": 100,
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
# Defaults of mistral-common.
_MISTRAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "add_bos_token": True,
}
_UNSAID: dict[str, dict[str, Any]] = {SENTENCEPIECE[1]: _T5, TEKKEN: _MISTRAL}
"""Settings of tokenizers that often come without tokenizer_config.json, by their vocabulary's file."""


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """Settings that replace the checkpoint's rotary positions. `scaling` is JSON text like `rope_scaling` in
    config.json; `theta` is the base of the frequencies.

    Empty text and 0 keep the checkpoint's value. The constructor validates both.
    """

    scaling: str = ""
    theta: float = 0.0

    def __post_init__(self) -> None:
        if not (self.theta >= 0 and math.isfinite(self.theta)):
            raise ConfigurationError(f"rope_theta must be a number > 0, got {self.theta}")
        scaling = self._parsed()
        if self.scaling and not isinstance(scaling.get("rope_type") or scaling.get("type"), str):
            raise ConfigurationError(f"{_ROPE_FORM}, with a rope_type, got {self.scaling}")
        for key in ("factor", "rope_theta"):
            value = scaling.get(key, 1.0)
            if not is_positive(value):
                raise ConfigurationError(f"rope_scaling: {key} must be a number > 0, got {value!r}")

    @property
    def base(self) -> float:
        """The base of the frequencies, 0 for the checkpoint's. With another base, the maximum length in config.json no
        longer applies.
        """
        return self.theta or float(self._parsed().get("rope_theta") or 0.0)

    def __bool__(self) -> bool:
        return bool(self.scaling) or self.theta > 0

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of config.json with this scaling.

        Gemma 3 has separate angles for sliding-window layers and for full-attention layers; only the latter change.
        """
        if not self.scaling:
            return dict(config)
        stored = rope_section(config)
        nested = section(stored, "full_attention") if "full_attention" in stored else None
        current = stored if nested is None else nested
        scaling = kept_rope(current) | self._parsed()
        changed = {key: value for key, value in config.items() if key != "rope_scaling"}
        if "original_max_position_embeddings" in scaling:
            changed.pop("original_max_position_embeddings", None)
        changed["rope_parameters"] = scaling if nested is None else {**stored, "full_attention": scaling}
        return changed

    def _parsed(self) -> dict[str, Any]:
        if not self.scaling:
            return {}
        try:
            parsed = parse_json(self.scaling)
        except ValueError as error:
            raise ConfigurationError(f"{_ROPE_FORM}, got {self.scaling}: {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigurationError(f"{_ROPE_FORM}, got {self.scaling}")
        return parsed


NO_ROPE_OVERRIDE = RopeOverride()


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


def tokenizer_source(model_dir: Path) -> str:
    """Return the name of the vocabulary file: tokenizer.json or an older format. Raises ConfigurationError."""
    source = _tokenizer_source(model_dir)
    if source is None:
        missing = " nor ".join((*_VOCABULARIES, " with ".join(BYTE_LEVEL)))
        raise ConfigurationError(f"{model_dir} has no tokenizer: neither {missing}")
    return source


def _tokenizer_source(model_dir: Path) -> str | None:
    for name in _VOCABULARIES:
        if (model_dir / name).is_file():
            return name
    return BYTE_LEVEL[0] if all((model_dir / name).is_file() for name in BYTE_LEVEL) else None


def tokenizer_settings(model_dir: Path) -> dict[str, Any]:
    """The members of tokenizer_config.json, with defaults for tokenizers that often come without it. Raises
    ConfigurationError.
    """
    unsaid = _UNSAID.get(_tokenizer_source(model_dir) or "", {})
    return unsaid | read_json(model_dir / _COMPANIONS[0], optional=True)


def tokenizer_fingerprint(model_dir: Path) -> str:
    """Return a hash of the tokenizer's files. Equal hashes mean equal token ids. Raises ConfigurationError."""
    source = tokenizer_source(model_dir)
    other_files = () if source == ALL_IN_ONE else (BYTE_LEVEL[1], *_COMPANIONS)
    digest = blake2b(read_bytes(model_dir / source), digest_size=_FINGERPRINT_BYTES)
    for name in other_files:
        if (model_dir / name).is_file():
            digest.update(read_bytes(model_dir / name))
    if source == ALL_IN_ONE and (lacking := _lacking_tokens(model_dir)):
        digest.update(json.dumps(lacking, sort_keys=True).encode())
    return digest.hexdigest()


def _lacking_tokens(model_dir: Path) -> dict[str, object]:
    """The entries of tokenizer_config.json that `checkpoint.tokenizer_files` adds to tokenizer.json; it refuses those
    of a wrong type.
    """
    listed = read_json(model_dir / _COMPANIONS[0], optional=True).get("added_tokens_decoder")
    if not isinstance(listed, dict) or not listed:
        return {}
    entries = read_json(model_dir / ALL_IN_ONE).get("added_tokens")
    known = [entry.get("content") for entry in entries or () if isinstance(entry, dict)]
    return {
        id_: entry for id_, entry in listed.items() if isinstance(entry, dict) and entry.get("content") not in known
    }


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
