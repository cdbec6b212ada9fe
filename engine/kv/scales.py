"""Scales of KV in fp8, as checkpoints of llm-compressor and AutoFP8 have them: one for the keys of a layer, one for its
values. The fingerprint of a model covers all tensors of its checkpoint, so workers that exchange KV have equal scales.
"""

import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import structlog

from checkpoint.tensors import open_checkpoint
from engine.loading.mapped_files import read_stored
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

_SCALE = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:\w+\.)?(?P<kind>[kv])_scale|(?P<projection>[kv])_proj\.output_scale)$"
)


class KVScale(NamedTuple):
    """Keys and values of a layer are divided by these before they are rounded."""

    key: float = 1.0
    value: float = 1.0


NO_SCALES: Mapping[int, KVScale] = MappingProxyType({})


def scale_names(model_dir: Path) -> list[str]:
    """The tensors of a checkpoint that scale KV. Raises ConfigurationError."""
    return [name for name in open_checkpoint(model_dir) if _SCALE.search(name)]


def read_kv_scales(model_dir: Path) -> Mapping[int, KVScale]:
    """The scales of a checkpoint by layer; a layer without any is left out. Raises ConfigurationError with the file and
    the tensor if one is not a single number above 0.
    """
    stored, scales = open_checkpoint(model_dir), dict[int, KVScale]()
    for name, match in ((name, _SCALE.search(name)) for name in stored):
        if match is None:
            continue
        numbers = read_stored(stored[name].path, name).float().flatten().tolist()
        if len(numbers) != 1 or not isfinite(numbers[0]) or numbers[0] <= 0:
            raise ConfigurationError(
                f"{stored[name].path}: tensor {name} must be one number above 0 to scale KV in fp8, got {numbers[:4]} "
                f"in shape {list(stored[name].shape)}: choose another kv_dtype"
            )
        layer, kind = int(match["layer"]), match["kind"] or match["projection"]
        before = scales.get(layer, KVScale())
        scales[layer] = before._replace(key=numbers[0]) if kind == "k" else before._replace(value=numbers[0])
    log.info("scales of KV are those of the checkpoint, else 1", layers_of_checkpoint=len(scales))
    return scales
