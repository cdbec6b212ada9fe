"""The files of a model's tokenizer, and the hash by which router and workers compare theirs. Standard library only;
`tokenizer_files.py` loads the tokenizer.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from checkpoint.config_json import read_bytes, read_json
from mesh.domain.errors import ConfigurationError

ALL_IN_ONE = "tokenizer.json"
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
