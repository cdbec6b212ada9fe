"""LoRA adapters (Hu et al. 2022) as they are loaded: y += b (a x), for the rows that use the adapter.

A parameter may merge several modules of the checkpoint, as "qkv" does. Each module that an adapter changes is a piece,
which adds to some outputs of the parameter. A rank has the part of a piece for the outputs or inputs that its specs
hold. The eager decoder computes pieces in `linear.py`; the compiled decoder has them packed (`packed_adapters.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint.adapters import AdapterFiles, AdapterMatrix
from checkpoint.multimodal import possible_names
from checkpoint.tensors import StoredTensor
from engine.finite import is_finite
from engine.models.parameters import ParameterSpec, Source
from mesh.domain.errors import ConfigurationError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_NAMED = 3


class ModulePiece(NamedTuple):
    """Outputs `[first, first + len(b))` of a parameter change by b (a x). a: [rank, inputs], b: [outputs, rank] with
    the adapter's scale; both are fp32.
    """

    a: Tensor
    b: Tensor
    first: int


AdapterWeights = Mapping[str, tuple[ModulePiece, ...]]
"""The pieces of one adapter, by the name of the parameter."""


_Read = Callable[[StoredTensor, str], Tensor]


def load_adapter(adapter: AdapterFiles, specs: Sequence[ParameterSpec]) -> AdapterWeights:
    """Read the part of an adapter that changes what `specs` hold: all parameters of a model, or those of
    `share.adapter_specs`. Raises ConfigurationError, which names the adapter, if it does not fit the model.
    """
    return _load(adapter, specs, _values)


def adapter_shapes(adapters: Sequence[AdapterFiles], specs: Sequence[ParameterSpec]) -> list[AdapterWeights]:
    """As `load_adapter` of each, on torch's device "meta": nothing is read, but shapes are checked."""
    return [_load(adapter, specs, _shape) for adapter in adapters]


def change_experts(adapters: Sequence[AdapterFiles], specs: Sequence[ParameterSpec]) -> bool:
    """True if any of them changes a matrix of an expert, or of a shared one."""
    changed = {module for adapter in adapters for module in adapter.matrices}
    of_experts = (spec for spec in specs if ".experts." in spec.name or ".shared." in spec.name)
    modules = (name for spec in of_experts for source in spec.sources for name in possible_names(_module(source)))
    return any(module in changed for module in modules)


def _load(adapter: AdapterFiles, specs: Sequence[ParameterSpec], read: _Read) -> AdapterWeights:
    try:
        _require_known(adapter, specs)
        held = (spec for spec in specs if spec.is_held and _is_adaptable(spec))
        pieces = {spec.name: tuple(_pieces(adapter, spec, read)) for spec in held}
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"adapter {adapter.name}: {error}") from error
    return {name: nonempty for name, nonempty in pieces.items() if nonempty}


def _is_adaptable(spec: ParameterSpec) -> bool:
    """True for the matrices of attention, MLPs and experts."""
    return spec.is_matrix and spec.name.startswith("layers.")


def _require_known(adapter: AdapterFiles, specs: Sequence[ParameterSpec]) -> None:
    sources = [(source, _is_adaptable(spec)) for spec in specs for source in spec.sources]
    known = {name: adaptable for source, adaptable in sources for name in possible_names(_module(source))}
    if missing := [module for module in adapter.matrices if module not in known]:
        trained_on = f", and says that it was trained on {adapter.base}" if adapter.base else ""
        raise ConfigurationError(
            f"the model has no {_some(missing)}: the adapter is for another base model{trained_on}"
        )
    if refused := [module for module in adapter.matrices if not known[module]]:
        raise ConfigurationError(
            f"{_some(refused)} cannot have an adapter, only the matrices of attention, MLPs and experts can, but for "
            "kv_b_proj: train the adapter without it, or merge it into its base model"
        )


def _module(source: Source) -> str:
    return source.name.removesuffix(".weight")


def _some(modules: Sequence[str]) -> str:
    omitted = f" and {len(modules) - _MAX_NAMED} more" if len(modules) > _MAX_NAMED else ""
    return f"module {', '.join(modules[:_MAX_NAMED])}{omitted}"


def _pieces(adapter: AdapterFiles, spec: ParameterSpec, read: _Read) -> Iterator[ModulePiece]:
    first = 0
    for source in spec.sources:
        named = [name for name in possible_names(_module(source)) if name in adapter.matrices]
        if len(named) > 1:
            raise ConfigurationError(f"{' and '.join(named)} are the same module of this model: save the adapter again")
        if named:
            matrix = adapter.matrices[named[0]]
            a, b = _factors(matrix, source, read)
            b = b * (matrix.scale * spec.factor)
            if not b.is_meta and not is_finite(b):
                raise ConfigurationError(f"lora_alpha makes numbers of {_module(source)} infinite: it is too large")
            yield from _held(ModulePiece(a[:, spec.input_slice], b, first), spec)
        first += source.num_rows


def _held(piece: ModulePiece, spec: ParameterSpec) -> Iterator[ModulePiece]:
    """The part of the piece for the outputs that the rank holds, if any; they are in ascending order."""
    if spec.held_rows is None:
        yield piece
        return
    first, end = np.searchsorted(spec.held_rows, (piece.first, piece.first + len(piece.b))).tolist()
    if first < end:
        rows = torch.from_numpy(spec.held_rows[first:end] - piece.first)
        yield ModulePiece(piece.a, piece.b[rows], first)


def _factors(matrix: AdapterMatrix, source: Source, read: _Read) -> tuple[Tensor, Tensor]:
    outputs, inputs = source.shape[::-1] if source.transposed else source.shape
    shape_a, shape_b = (matrix.rank, inputs), (outputs, matrix.rank)
    for name, part, shape in (("lora_A", matrix.a, shape_a), ("lora_B", matrix.b, shape_b)):
        if part.shape != shape:
            raise ConfigurationError(
                f"{name} of {_module(source)} has shape {list(part.shape)}, and this base model needs {list(shape)}: "
                "the adapter is for another base model"
            )
    a, b = (read(part, _module(source)) for part in (matrix.a, matrix.b))
    return a, b if source.rows is None else b[torch.from_numpy(source.rows)]


def _shape(tensor: StoredTensor, module: str) -> Tensor:
    _require_dtype(tensor, module)
    return torch.empty(tensor.shape, device="meta")


def _require_dtype(tensor: StoredTensor, module: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise ConfigurationError(f"{module} has dtype {tensor.dtype}, not one of {', '.join(_DTYPES)}")


def _values(tensor: StoredTensor, module: str) -> Tensor:
    _require_dtype(tensor, module)
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        stored = bytearray(file.read(tensor.num_bytes))
    if len(stored) != tensor.num_bytes:
        raise ConfigurationError(f"{tensor.path} is truncated: download or write it again")
    values = torch.frombuffer(stored, dtype=_DTYPES[tensor.dtype]).view(tensor.shape).to(torch.float32)
    if not is_finite(values):
        raise ConfigurationError(f"{module} has numbers that are NaN or infinite")
    return values
