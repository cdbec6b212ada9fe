"""Loading of weights: memory-mapped safetensors become merged parameters; tests and benchmarks use random ones.

Every parameter is allocated once and filled from the map when the model takes it. Matrices are converted to their
scheme one by one, and pages of the map are given back, so besides the model itself only the page cache grows.
Checkpoint tensors that the model does not use are listed in the log, and refused if they are biases.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.tensors import StoredTensor, open_checkpoint, read_sample
from engine.finite import is_finite
from engine.load_times import load_phase
from engine.memory import release_pages
from engine.models.parameters import ParameterSpec, Source
from engine.models.schemes import Parameters, Values
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

Progress = Callable[[float], None]
_DUMMY_STD = 0.02
_DTYPES = ("F64", "F32", "BF16", "F16")
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


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """Device, dtype and scheme of loaded parameters; `scheme`: see LinearParameters."""

    device: torch.device
    dtype: torch.dtype
    scheme: str = "float"

    def dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        return torch.float32 if spec.wide and self.dtype is torch.float16 else self.dtype


def load_weights(
    model_dir: Path,
    specs: list[ParameterSpec],
    target: WeightsTarget,
    on_progress: Progress | None = None,
    *,
    tied: tuple[str, str] | None = None,
) -> Parameters:
    """The parameters of a checkpoint, which are read when they are taken. `tied`: see report_unused.

    `on_progress` receives the fraction of read elements, up to 1.0. Raises ConfigurationError with the file and the
    tensor that is missing or has the wrong shape or dtype; taking a parameter raises it if a number is not finite.
    """
    stored = open_checkpoint(model_dir)
    _check(model_dir, specs, stored)
    used = {stored_name(source.name, stored) for spec in specs for source in spec.sources}
    tied = None if tied is None else (stored_name(tied[0], stored), stored_name(tied[1], stored))
    report_unused(model_dir, stored, used, tied)
    return _parameters(specs, target, _stored_values(specs, target, stored), on_progress)


def dummy_weights(
    specs: list[ParameterSpec], target: WeightsTarget, seed: int = 0, on_progress: Progress | None = None
) -> Parameters:
    """Random parameters that depend on the seed, not on the device: norms are 1, biases and matrices small."""
    return _parameters(specs, target, (_dummy_values(spec, target, seed) for spec in _held(specs)), on_progress)


def _held(specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    return [spec for spec in specs if spec.is_held]


def _parameters(
    specs: list[ParameterSpec], target: WeightsTarget, values: Iterable[Tensor], on_progress: Progress | None
) -> Parameters:
    """Parameters with these values of the specs that are held, in their order."""
    specs = _held(specs)

    def source() -> Iterator[Values]:
        total, done = sum(prod(spec.held_shape) for spec in specs), 0
        for spec, tensor in zip(specs, values, strict=True):
            done += tensor.numel()
            if on_progress is not None:
                on_progress(done / total)
            yield spec.name, tensor, spec.is_matrix

    return Parameters(target.scheme, (spec.name for spec in specs), source())


def _stored_values(
    specs: list[ParameterSpec], target: WeightsTarget, stored: Mapping[str, StoredTensor]
) -> Iterator[Tensor]:
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for spec in _held(specs):
            names = [stored_name(source.name, stored) for source in spec.sources]
            for name in names:
                path = stored[name].path
                if path not in files:
                    files[path] = stack.enter_context(_open(path))
            with load_phase("read"):
                parameter = _fill(spec, target, [(name, files[stored[name].path]) for name in names])
            yield parameter


def _dummy_values(spec: ParameterSpec, target: WeightsTarget, seed: int) -> Tensor:
    if spec.is_scale:
        values = torch.ones(spec.shape)
    else:
        digest = blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        values = torch.empty(spec.shape).normal_(0.0, _DUMMY_STD, generator=generator)
    if spec.held_rows is not None:
        values = values[torch.from_numpy(spec.held_rows)]
    return values[..., spec.input_slice].contiguous().to(target.device, target.dtype_of(spec))


def stored_name(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """The name under which the checkpoint stores tensor `name`: base-model checkpoints omit its first component."""
    bare = name.partition(".")[2]
    return bare if name not in stored and bare in stored else name


def _check(model_dir: Path, specs: list[ParameterSpec], stored: Mapping[str, StoredTensor]) -> None:
    for source in (source for spec in specs for source in spec.sources):
        name = stored_name(source.name, stored)
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
    """Build one parameter; `stored` holds the name in the checkpoint and the open file of each source."""
    parameter = torch.empty(spec.held_shape, dtype=target.dtype_of(spec), device=target.device)
    first = 0
    for source, (name, file) in zip(spec.held_sources(), stored, strict=True):
        part = parameter[first : first + source.num_rows]
        mapped = _read(file, name)
        part.copy_(_rows(source, mapped)[..., spec.input_slice])
        release_pages(mapped)
        if not is_finite(part):
            raise ConfigurationError(_not_finite(part, name))
        first += source.num_rows
    if spec.factor != 1.0:
        parameter.mul_(spec.factor)
    if spec.unit_rows:
        parameter.div_(torch.linalg.vector_norm(parameter, dim=1, keepdim=True).clamp_(min=1e-12))
    return parameter.add_(spec.offset) if spec.offset else parameter


def _not_finite(values: Tensor, name: str) -> str:
    count = int((~torch.isfinite(values)).sum())
    hint = "or too large for float16: try bfloat16" if values.dtype is torch.float16 else "the checkpoint is broken"
    return f"{count} of {values.numel()} numbers of tensor {name} are NaN or infinite: {hint}"


def _read(file: Any, name: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise ConfigurationError(f"cannot read tensor {name}: {error}") from error
    return tensor


def _rows(source: Source, tensor: Tensor) -> Tensor:
    tensor, rows = tensor.t() if source.transposed else tensor, source.rows
    if rows is None:
        return tensor
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return tensor[rows[0] : rows[-1] + 1]  # eight times as fast as index_select
    return tensor.index_select(0, torch.from_numpy(rows))


def report_unused(
    model_dir: Path, stored: Mapping[str, StoredTensor], used: Iterable[str], tied: tuple[str, str] | None = None
) -> None:
    """List the tensors that are not `used` in one log line. `tied`: names of the output matrix and the embedding, if
    config.json says that they are equal; a copy of the embedding is not reported.

    Raises ConfigurationError for an unused bias of a matrix or norm that is used: answers would be wrong without it.
    Biases of zeros are ignored.
    """
    unused = {name for name in set(stored) - set(used) if not _HARMLESS.search(name)}
    if tied is not None and tied[0] in unused and _are_copies(*(stored[name] for name in tied if name in stored)):
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


def _are_copies(*tensors: StoredTensor) -> bool:
    """True if the tensors have equal samples; they are not read completely."""
    samples = {(tensor.dtype, tensor.shape, read_sample(tensor)) for tensor in tensors}
    return len(tensors) == 1 or len(samples) == 1


def _is_zero(tensor: StoredTensor, name: str) -> bool:
    with safe_open(tensor.path, framework="pt") as file:
        return not bool(torch.count_nonzero(file.get_tensor(name)))


def _and_more(count: int) -> str:
    return f" and {count - 1} more biases" if count > 1 else ""


def _summary(names: Iterable[str]) -> str:
    """Names with `*` in place of layer numbers, and how often each occurs."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in sorted(names))
    labels = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    num_hidden = len(labels) - _MAX_LISTED
    return ", ".join(labels[:_MAX_LISTED]) + (f", and {num_hidden} more" if num_hidden > 0 else "")
