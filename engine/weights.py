"""Loading weights: from memory-mapped safetensors into merged parameters, or random ones for tests and benchmarks.

Every parameter is allocated once and filled from the map, so that besides the model itself only the page cache grows.
A tensor-parallel loader will read its rank's rows here; today there is one rank.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import StoredTensor, open_checkpoint
from engine.models.parameters import ParameterSpec, Source
from mesh.domain.errors import ConfigurationError

Progress = Callable[[float], None]
_DUMMY_STD = 0.02
_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """Where parameters go, and as what."""

    device: torch.device
    dtype: torch.dtype


def load_weights(
    model_dir: Path, specs: list[ParameterSpec], target: WeightsTarget, on_progress: Progress | None = None
) -> dict[str, Tensor]:
    """Parameters by name, from a checkpoint. ConfigurationError names the file and tensor that is missing or wrong.

    `on_progress` receives the fraction of elements that are loaded, up to 1.0.
    """
    stored = open_checkpoint(model_dir)
    _check(model_dir, specs, stored)
    parameters: dict[str, Tensor] = {}
    total, done = sum(torch.Size(spec.shape).numel() for spec in specs), 0
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for spec in specs:
            names = [_stored_name(source.name, stored) for source in spec.sources]
            for name in names:
                path = stored[name].path
                if path not in files:
                    files[path] = stack.enter_context(_open(path))
            parameters[spec.name] = _fill(spec, target, [(name, files[stored[name].path]) for name in names])
            done += parameters[spec.name].numel()
            if on_progress is not None:
                on_progress(done / total)
    return parameters


def dummy_weights(
    specs: list[ParameterSpec], target: WeightsTarget, seed: int = 0, on_progress: Progress | None = None
) -> dict[str, Tensor]:
    """Random parameters, the same on every device for a seed: norms are 1, biases and matrices small."""
    parameters: dict[str, Tensor] = {}
    for i, spec in enumerate(specs):
        if spec.is_scale:
            values = torch.ones(spec.shape)
        else:
            digest = blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            values = torch.empty(spec.shape).normal_(0.0, _DUMMY_STD, generator=generator)
        parameters[spec.name] = values.to(target.device, target.dtype)
        if on_progress is not None:
            on_progress((i + 1) / len(specs))
    return parameters


def _stored_name(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """Checkpoints of a model without its output matrix call their tensors the same without the first part."""
    bare = name.partition(".")[2]
    return bare if name not in stored and bare in stored else name


def _check(model_dir: Path, specs: list[ParameterSpec], stored: Mapping[str, StoredTensor]) -> None:
    for source in (source for spec in specs for source in spec.sources):
        name = _stored_name(source.name, stored)
        if name not in stored:
            files = sorted({tensor.path.name for tensor in stored.values()})
            raise ConfigurationError(f"{model_dir}: tensor {name} is missing: {', '.join(files)} must have it")
        if stored[name].dtype not in _DTYPES:
            raise ConfigurationError(
                f"{stored[name].path}: tensor {name} has dtype {stored[name].dtype}, not one of "
                f"{', '.join(_DTYPES)}: quantised checkpoints are not supported"
            )
        if stored[name].shape != source.shape:
            raise ConfigurationError(
                f"{stored[name].path}: tensor {name} has shape {list(stored[name].shape)}, "
                f"config.json implies {list(source.shape)}"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


def _fill(spec: ParameterSpec, target: WeightsTarget, stored: list[tuple[str, Any]]) -> Tensor:
    """`stored`: the name in the checkpoint, and the open file, of each source."""
    parameter = torch.empty(spec.shape, dtype=target.dtype, device=target.device)
    first = 0
    for source, (name, file) in zip(spec.sources, stored, strict=True):
        parameter[first : first + source.num_rows].copy_(_rows(source, _read(file, name)))
        first += source.num_rows
    if spec.factor != 1.0:
        parameter.mul_(spec.factor)
    if spec.unit_rows:
        parameter.div_(torch.linalg.vector_norm(parameter, dim=1, keepdim=True).clamp_(min=1e-12))
    return parameter.add_(spec.offset) if spec.offset else parameter


def _read(file: Any, name: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise ConfigurationError(f"cannot read tensor {name}: {error}") from error
    return tensor


def _rows(source: Source, tensor: Tensor) -> Tensor:
    tensor = tensor.t() if source.transposed else tensor
    return tensor if source.rows is None else tensor.index_select(0, torch.from_numpy(source.rows))
