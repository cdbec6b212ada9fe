"""A checkpoint in fp32, bf16 or fp16, opened to be quantised: its headers are read, and it must not change until the
result is complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoint.partition_manifest import read_partition
from checkpoint.tensors import StoredTensor
from checkpoint.watched_files import WatchedFiles
from engine.loading.stored_parameters import find_modules, open_stored, require_tensors, stored_name
from engine.models.model_config import ModelConfig
from engine.models.parameters import ParameterSpec, parameter_specs
from engine.models.read_config import load_config
from engine.quantized_formats.config import read_quantization
from mesh.domain.errors import ConfigurationError

STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BEFORE_LAYERS = ("embed", "positions", "embed_norm", "embed_norm_bias", "project_in")


@dataclass(frozen=True, slots=True)
class FloatCheckpoint:
    """A checkpoint that can be quantised. `specs` are in the order in which they are read, without the factors of
    matrices, so that these are those of the file; `product_factors` has them by name. `dtype` is that of the matrices.
    `files`: config.json and those of the weights.
    """

    folder: Path
    config: ModelConfig
    specs: list[ParameterSpec]
    stored: dict[str, StoredTensor]
    dtype: torch.dtype
    product_factors: Mapping[str, float]
    files: WatchedFiles

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.stored.values())

    def layer_specs(self, index: int) -> list[ParameterSpec]:
        return [spec for spec in self.specs if spec.name.startswith(f"layers.{index}.")]

    def dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        return STORED_DTYPES[self.stored[stored_name(spec.sources[0].name, self.stored)].dtype]


def open_float_checkpoint(folder: Path) -> FloatCheckpoint:
    """Read config.json and the headers of tensors. Raises ConfigurationError if the checkpoint cannot be quantised."""
    if read_partition(folder) is not None:
        raise ConfigurationError(f"{folder} is partitioned: quantise the checkpoint that it was made from")
    if (quantization := read_quantization(folder)) is not None and quantization.method != "mxfp4":
        raise ConfigurationError(
            f"{folder} is quantised already ({quantization}): quantise the checkpoint that it was made from"
        )
    files = WatchedFiles.of([folder / "config.json"])
    config = load_config(folder)
    if not isinstance(config, ModelConfig):
        raise ConfigurationError(
            f"{config.architecture} cannot be quantised, only decoder-only models can: `tandem up --quantize int8` "
            "serves it in int8"
        )
    in_order = sorted(parameter_specs(config), key=_when_needed)
    stored = open_stored(folder, in_order)
    require_tensors(folder, in_order, stored, find_modules(in_order, stored, quantization))
    product_factors = {spec.name: spec.factor for spec in in_order}
    specs = [replace(spec, factor=1.0) for spec in in_order]
    files = files.and_of({tensor.path for tensor in stored.values()})
    dtypes = {stored[name].dtype for spec in specs for name in names_of(spec, stored) if name in stored}
    if not dtypes <= set(STORED_DTYPES):
        raise ConfigurationError(f"{folder}: weights must be fp32, bf16 or fp16 to be quantised, got {sorted(dtypes)}")
    first = next(spec for spec in specs if spec.is_matrix)
    dtype = STORED_DTYPES[stored[name].dtype] if (name := names_of(first, stored)[0]) in stored else torch.float32
    return FloatCheckpoint(folder, config, specs, stored, dtype, product_factors, files)


def _when_needed(spec: ParameterSpec) -> int:
    if spec.name.startswith("layers."):
        return 1
    return 0 if spec.name in _BEFORE_LAYERS else 2


def names_of(spec: ParameterSpec, stored: Mapping[str, StoredTensor]) -> list[str]:
    """The names of the tensors that a parameter is read from."""
    return [stored_name(source.name, stored) for source in spec.sources]
