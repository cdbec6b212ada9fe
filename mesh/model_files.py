"""Facts that a checkpoint folder states about its model, for routers and workers alike. Standard library only.

`config.json` and a tokenizer must be there; `generation_config.json` may be missing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError

ALL_IN_ONE = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
BYTE_LEVEL = ("vocab.json", "merges.txt")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_FINGERPRINT_BYTES = 16

# What different model families call the longest sequence they were made for, and the number of their tokens.
POSITION_KEYS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "model_max_length",
)
VOCAB_KEYS = ("vocab_size", "padded_vocab_size")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What router and workers must agree on. `max_positions` is None where the model sets no limit,
    `decoder_start_token_id` unless the model is an encoder-decoder: then its decoder begins with that token.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_positions: int | None
    tokenizer_fingerprint: str
    decoder_start_token_id: int | None = None


def read_model_facts(model_dir: Path) -> ModelFacts:
    """Read a checkpoint folder. Raises ConfigurationError that names the file at fault."""
    path = model_dir / "config.json"
    config = read_json(path)
    text_config = config.get("text_config")  # multimodal checkpoints keep the decoder's facts there
    if isinstance(text_config, dict):
        config = text_config | config
    generation = read_json(model_dir / "generation_config.json", optional=True)
    vocab_size = _integer(config, VOCAB_KEYS, path)
    if vocab_size is None:
        raise ConfigurationError(f"{path} has no vocab_size")
    decoder_start = _decoder_start(config, generation, path)
    return ModelFacts(
        vocab_size=vocab_size,
        eos_token_ids=_eos_ids(config, path) | _eos_ids(generation, model_dir / "generation_config.json"),
        # Encoder-decoder models have relative positions; their n_positions is what they were trained with.
        max_positions=None if decoder_start is not None else _max_positions(config, path),
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        decoder_start_token_id=decoder_start,
    )


def _max_positions(config: Mapping[str, Any], path: Path) -> int | None:
    positions = _integer(config, POSITION_KEYS, path)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if positions is None or not isinstance(rope, dict) or str(config.get("model_type")).startswith("gemma3"):
        return positions  # Gemma 3 counts its scaled positions
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = rope.get("original_max_position_embeddings") or positions
    return stretched_positions(str(kind), positions, original, float(rope.get("factor") or 1.0))


def stretched_positions(kind: str, positions: int, original: int, factor: float) -> int:
    """Longest sequence a scaling of rotary positions is meant for. `positions` is config.json's
    max_position_embeddings, which some kinds count before the scaling and some after.
    """
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    if kind == "yarn":
        return max(positions, int(original * factor))
    return positions


def _decoder_start(config: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> int | None:
    if not config.get("is_encoder_decoder"):
        return None
    key = "decoder_start_token_id"
    token_id = config.get(key) if generation.get(key) is None else generation[key]
    if token_id is None or not _is_index(token_id):
        raise ConfigurationError(f"{path}: an encoder-decoder model needs {key}, got {token_id!r}")
    return int(token_id)


def tokenizer_source(model_dir: Path) -> str:
    """The file with the vocabulary: tokenizer.json, or what came before it. Raises ConfigurationError."""
    for name in (ALL_IN_ONE, *SENTENCEPIECE):
        if (model_dir / name).is_file():
            return name
    if all((model_dir / name).is_file() for name in BYTE_LEVEL):
        return BYTE_LEVEL[0]
    raise ConfigurationError(
        f"{model_dir} has no tokenizer: neither {' nor '.join((ALL_IN_ONE, *SENTENCEPIECE, ' with '.join(BYTE_LEVEL)))}"
    )


def tokenizer_fingerprint(model_dir: Path) -> str:
    """Hash of the tokenizer's files: equal fingerprints mean equal token ids. Raises ConfigurationError."""
    source = tokenizer_source(model_dir)
    beside = () if source == ALL_IN_ONE else (BYTE_LEVEL[1], *_BESIDE)
    digest = blake2b(_read_bytes(model_dir / source), digest_size=_FINGERPRINT_BYTES)
    for name in beside:
        if (model_dir / name).is_file():
            digest.update(_read_bytes(model_dir / name))
    return digest.hexdigest()


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file; empty if it is missing and `optional`. Raises ConfigurationError."""
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(_read_bytes(path))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return content


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error


def _eos_ids(config: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_index(token_id) for token_id in ids):
        raise ConfigurationError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _integer(config: Mapping[str, Any], keys: Iterable[str], path: Path) -> int | None:
    """The first of `keys` that is set."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not _is_index(value) or value == 0:
            raise ConfigurationError(f"{path}: {key} must be a positive integer, got {value!r}")
        return int(value)
    return None


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
