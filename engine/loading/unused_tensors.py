"""Reports tensors of a checkpoint that the model does not use: in one log line, or as an error if answers would be
wrong.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import structlog
import torch

from checkpoint.multimodal import other_part
from checkpoint.tensors import StoredTensor, are_equal
from engine.loading.mapped_files import read_stored
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

# Buffers that follow from the configuration, and copies of the embedding.
_HARMLESS = re.compile(
    r"(^|\.)("
    r"rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn|self_attention|crossattention)\.(bias|masked_bias)"
    r"|position_ids|alibi_mask|future_mask"
    r"|(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    r")$"
)
_MAX_LISTED = 20
_FLOATS = ("F64", "F32", "BF16", "F16")


def report_unused(
    model_dir: Path, stored: Mapping[str, StoredTensor], used: Iterable[str], tied: tuple[str, str] | None
) -> None:
    """List the tensors that are not `used` in one log line. `tied`: names of the output matrix and the embedding, if
    config.json says that they are equal; a copy of the embedding is not reported.

    Raises ConfigurationError for an output matrix that is no copy, quantised ones included, and for an unused bias of a
    matrix or norm that is used: answers would be wrong. Biases of zeros are ignored.
    """
    unused = {name for name in set(stored) - set(used) if not _HARMLESS.search(name)}
    others = {name: part for name in sorted(unused) if (part := other_part(name)) is not None}
    if others:
        log.info("only the text part of the model is served", tensors_not_read=dict(Counter(others.values())))
    unused -= others.keys()
    if tied is not None:
        _require_copy(model_dir, stored, unused, *tied)
        unused.discard(tied[0])
    used_stems = {name.removesuffix(".weight") for name in used}
    biases = {name for name in unused if name.endswith(".bias") and name.removesuffix(".bias") in used_stems}
    wrong = sorted(name for name in biases if not _is_zero(stored[name], name))
    if wrong:
        raise ConfigurationError(
            f"{model_dir}: the checkpoint has {wrong[0]}{_and_more(len(wrong))}, which config.json does not announce: "
            "set its attention_bias, mlp_bias or the like, if the model has biases, or remove them"
        )
    if summary := _summary(unused - biases):
        log.warning(
            "the model does not use tensors of its checkpoint", num_tensors=len(unused - biases), tensors=summary
        )


def _require_copy(
    model_dir: Path, stored: Mapping[str, StoredTensor], unused: Collection[str], head: str, embedding: str
) -> None:
    """Raise ConfigurationError if the checkpoint has an output matrix that is not the embedding."""
    stem = head.removesuffix("weight")
    parts = sorted(name for name in unused if name.startswith(stem) and name not in (head, f"{stem}bias"))
    is_other = head in unused and embedding in stored and not are_equal(stored[head], stored[embedding])
    if is_other or parts:
        raise ConfigurationError(
            f"{model_dir}: {head if is_other else parts[0]} differs from {embedding}, and config.json says that they "
            "are equal: set tie_word_embeddings to false, or remove it"
        )


def _is_zero(tensor: StoredTensor, name: str) -> bool:
    values = read_stored(tensor.path, name)
    numbers = values if tensor.dtype in _FLOATS else values.reshape(-1).view(torch.uint8)  # torch counts no fp8
    return not bool(torch.count_nonzero(numbers))


def _and_more(count: int) -> str:
    return f" and {count - 1} more biases" if count > 1 else ""


def _summary(names: Iterable[str]) -> str:
    """Names with `*` in place of layer numbers, and how often each occurs."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in sorted(names))
    labels = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    num_hidden = len(labels) - _MAX_LISTED
    return ", ".join(labels[:_MAX_LISTED]) + (f", and {num_hidden} more" if num_hidden > 0 else "")
