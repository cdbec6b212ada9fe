"""Loading of weights: memory-mapped safetensors become merged parameters.

Every parameter is allocated once and filled from the map when the model takes it. Matrices are converted to their
encoding one by one, and pages of the map are given back, so only the page cache grows, apart from the model itself.
Quantised matrices (engine/quantized_formats) are dequantised on the way; for products in int8, fp8 and int4, those in
int8, fp8 and int4 are taken as they are.
Checkpoint tensors that the model does not use are listed in the log, and refused if they are biases.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from checkpoint.tensors import StoredTensor
from engine.finite import is_finite, why_not_finite
from engine.kernels.cpu.machine import IN_BF16, IN_FP32
from engine.loading.grouped_matrices import Conversion, conversion_of
from engine.loading.load_phases import load_phase
from engine.loading.mapped_files import open_mapped, read_part
from engine.loading.stored_parameters import (
    find_modules,
    fp8_of,
    int4_of,
    open_stored,
    require_tensors,
    rounded_beside_int8,
    rounds_to_steps,
    stored_name,
)
from engine.loading.ternary import are_ternary, holds_ternary, in_four_bits
from engine.loading.unused_tensors import report_unused
from engine.memory import release_pages
from engine.models.encodings import (
    ALL_FLOAT,
    IN_STEPS,
    OUTPUT,
    OUTPUT_ENCODINGS,
    Forms,
    LinearParameters,
    Parameters,
    StoredMatrices,
    Values,
)
from engine.models.parameters import ParameterSpec, Source
from engine.models.rounding import round_to_int8
from engine.quantized_formats.config import read_quantization
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.modules import QuantizedModule
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

Progress = Callable[[float], None]
_TABLES = ("embed", "layer_inputs")
_ROUNDED = ("int8", "int4", IN_STEPS)
_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """Device, dtype and encoding of loaded parameters; `encoding`: see LinearParameters. If they will be packed
    for the compiled decoder, `is_packed`, norms and biases are fp32, whatever the dtype of matrices, and matrices are
    without the factors of their products.
    """

    device: torch.device
    dtype: torch.dtype
    encoding: str = "float"
    is_packed: bool = False

    def dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        if spec.in_fp32 or (self.is_packed and len(spec.shape) == 1):
            return torch.float32
        return torch.float32 if spec.wide and self.dtype is torch.float16 else self.dtype

    def rounding(
        self, specs: Sequence[ParameterSpec], modules: Mapping[str, QuantizedModule] = MappingProxyType({})
    ) -> "WeightsTarget":
        """The target with the encoding that int4 stands for, see rounds_to_steps."""
        return replace(self, encoding=IN_STEPS) if self.encoding == "int4" and rounds_to_steps(specs, modules) else self


def load_weights(
    model_dir: Path,
    specs: list[ParameterSpec],
    target: WeightsTarget,
    on_progress: Progress | None = None,
    *,
    tied: tuple[str, str] | None = None,
    used_elsewhere: Iterable[str] = (),
    is_part: bool = False,
) -> Parameters:
    """The parameters of a checkpoint, which are read when they are taken. `tied`: see report_unused, which does not
    report tensors that are `used_elsewhere`, and nothing if the model `is_part` of what the checkpoint holds.

    `on_progress` receives the fraction of read elements, up to 1.0. Raises ConfigurationError with the file and the
    tensor that is missing or has the wrong shape or dtype; taking a parameter raises it if a number is not finite.
    """
    stored, quantization = open_stored(model_dir, specs), read_quantization(model_dir)
    modules = find_modules(specs, stored, quantization)
    if modules:
        loaded_as = str(target.dtype).removeprefix("torch.") if target.encoding == "float" else target.encoding
        log.info("the checkpoint is quantised", format=str(quantization), modules=len(modules), loaded_as=loaded_as)
    require_tensors(model_dir, specs, stored, modules)
    used = {stored_name(source.name, stored) for spec in specs for source in spec.sources} | set(used_elsewhere)
    used |= {f"{module.name}.weight" for module in modules.values()}
    used |= {name for module in modules.values() for name in (*module.parts.values(), *module.unused)}
    tied = None if tied is None else (stored_name(tied[0], stored), stored_name(tied[1], stored))
    if not is_part:
        report_unused(model_dir, stored, used, tied)
    factors = {spec.name: spec.factor for spec in specs if spec.is_matrix and target.is_packed}
    specs = [replace(spec, factor=1.0) if spec.name in factors else spec for spec in specs]
    kept = None
    if target.encoding in ("int4", "fp8"):
        kept = int4_of(specs, modules) if target.encoding == "int4" else fp8_of(specs, stored, modules)
    stored_as = (kept or ALL_FLOAT)._replace(keeps_output=target.encoding != "float" and are_ternary(modules))
    in_int8 = rounded_beside_int8(specs, modules) if target.encoding == "int8" else kept.in_int8 if kept else ()
    rounded = [spec for spec in specs if spec.name in in_int8 and conversion_of(spec, modules, kept) is None]
    if rounded:
        log.info("matrices that the checkpoint has in another form are rounded to 8 bits", matrices=len(rounded))
    target = target.rounding(specs, modules)
    values = _stored_values(specs, target, stored, modules, kept)
    return parameters_of(specs, target, values, on_progress, stored_as, factors)


def held(specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    return [spec for spec in specs if spec.is_held]


def parameters_of(
    specs: list[ParameterSpec],
    target: WeightsTarget,
    values: Iterable[Tensor | LinearParameters],
    on_progress: Progress | None,
    kept: StoredMatrices = ALL_FLOAT,
    factors: Mapping[str, float] | None = None,
) -> Parameters:
    """Parameters with these values of the specs that are held, in their order."""
    specs = held(specs)

    def source() -> Iterator[Values]:
        total, done = sum(prod(spec.held_shape) for spec in specs), 0
        for spec, parameter in zip(specs, values, strict=True):
            done += prod(spec.held_shape)
            if on_progress is not None:
                on_progress(done / total)
            yield spec.name, parameter, spec.is_matrix

    return Parameters(target.encoding, (spec.name for spec in specs), source(), kept, factors)


def _stored_values(
    specs: list[ParameterSpec],
    target: WeightsTarget,
    stored: Mapping[str, StoredTensor],
    modules: Mapping[str, QuantizedModule],
    kept: StoredMatrices | None,
) -> Iterator[Tensor | LinearParameters]:
    """The values of the specs that are held. `kept`: how matrices in int4 or fp8 are multiplied; None to dequantise
    them.
    """
    with ExitStack() as stack:
        reader = _Reader(stored, modules, stack)
        for spec in held(specs):
            own = target.encoding
            encoding = OUTPUT_ENCODINGS.get(own, own) if spec.name == OUTPUT else own
            parameter: Tensor | LinearParameters
            with load_phase("read"):
                if kept is not None and spec.name in kept.forms:
                    parameter = reader.fp8(spec, kept.forms[spec.name])
                elif encoding in ("int4", IN_STEPS) and holds_ternary(spec, modules):
                    parameter = in_four_bits(spec, encoding, partial(reader.ternary, spec))
                elif encoding == "int4" and (convert := conversion_of(spec, modules, kept)) is not None:
                    parameter = reader.converted(spec, convert)
                elif kept is not None and encoding == "int4" and spec.is_matrix and spec.name not in kept.in_int8:
                    parameter = reader.int4(spec, kept.group)
                elif encoding == "int8" and reader.has_int8(spec):
                    parameter = reader.int8(spec)
                else:
                    parameter = reader.fill(spec, _in_own_type(spec, encoding, reader, target))
            yield parameter


def _in_own_type(spec: ParameterSpec, encoding: str, reader: "_Reader", target: WeightsTarget) -> WeightsTarget:
    """The target with the checkpoint's own type for tables of tokens, see `target_of_table`, and for matrices that will
    be rounded: in 16 bits they take half of the memory until then.
    """
    dtypes = {reader.dtype_of(source) for source in spec.sources}
    own = _NARROW.get(dtypes.pop() or "", target.dtype) if len(dtypes) == 1 else target.dtype
    if spec.name == OUTPUT and reader.is_ternary and not target.is_packed:
        return target  # the eager decoder multiplies what is not rounded in its own type
    is_exact = spec.factor == 1.0 and not spec.offset and not spec.unit_rows
    if spec.is_matrix and is_exact and encoding in _ROUNDED:
        return replace(target, dtype=own)
    return target_of_table(spec, own, target)


def target_of_table(spec: ParameterSpec, own_dtype: torch.dtype, target: WeightsTarget) -> WeightsTarget:
    """The target with the checkpoint's own type for tables of tokens, if these are packed beside rounded matrices."""
    # The eager decoder has layers' inputs in that type, too: it widens the rows that it reads.
    is_kept = spec.name in _TABLES and (target.encoding != "float" if target.is_packed else spec.name != "embed")
    return replace(target, dtype=own_dtype) if is_kept else target


class _Reader:
    """Reads parameters of a checkpoint, whose files it opens until `stack` closes them."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], modules: Mapping[str, QuantizedModule], stack: ExitStack
    ) -> None:
        self._stored = stored
        self._modules = modules
        self._stack = stack
        self._files: dict[Path, Any] = {}
        self._mapped: list[Tensor] = []
        self.is_ternary = are_ternary(modules)

    def dtype_of(self, source: Source) -> str | None:
        """The file's name of the dtype; None for a quantised module. Blocks of GGUF are scaled by numbers in fp16."""
        if (module := self._modules.get(source.name)) is not None:
            return "F16" if module.storage.is_gguf else None
        return self._stored[stored_name(source.name, self._stored)].dtype

    def fill(self, spec: ParameterSpec, target: WeightsTarget) -> Tensor:
        """A parameter in the target's dtype. Raises ConfigurationError if a number is not finite."""
        make = torch.empty if spec.sources else torch.zeros
        parameter = make(spec.held_shape, dtype=target.dtype_of(spec), device=target.device)
        first = 0
        for source in spec.held_sources():
            part = parameter[first : first + source.num_rows]
            if source.name in self._modules:
                part.copy_(self._quantized(source).dequantized()[:, spec.input_slice])
                name = self._modules[source.name].name
            else:
                name = stored_name(source.name, self._stored)
                part.copy_(_rows(source, self._tensor(name))[..., spec.input_slice])
            self._release()
            if not is_finite(part):
                raise ConfigurationError(why_not_finite(part, name))
            first += source.num_rows
        if spec.factor != 1.0:
            parameter.mul_(spec.factor)
        if spec.unit_rows:
            parameter.div_(torch.linalg.vector_norm(parameter, dim=1, keepdim=True).clamp_(min=1e-12))
        return parameter.add_(spec.offset) if spec.offset else parameter

    def has_int8(self, spec: ParameterSpec) -> bool:
        """True if a part of the matrix is stored in int8 with a scale for each output, and is used like that."""
        modules = [self._modules.get(source.name) for source in spec.sources]
        is_plain = spec.is_matrix and not spec.unit_rows and not spec.offset
        return is_plain and any(module is not None and module.storage.is_int8 for module in modules)

    def int8(self, spec: ParameterSpec) -> LinearParameters:
        """A matrix with the integers and scales of the checkpoint; parts that it has in other forms are rounded. Raises
        ConfigurationError if a number is not finite.
        """
        weight, scales = torch.empty(spec.held_shape, dtype=torch.int8), torch.empty(spec.held_shape[0])
        first = 0
        for source in spec.held_sources():
            rows = slice(first, first + source.num_rows)
            module = self._modules.get(source.name)
            if module is not None and module.storage.is_int8:
                matrix = self._quantized(source)
                weight[rows], scales[rows] = matrix.values, matrix.scales[:, 0] * matrix.factor
                if not is_finite(scales[rows]):
                    raise ConfigurationError(why_not_finite(scales[rows], module.scales_name))
                matrix.require_finite(module.name)
                self._release()
            else:
                weight[rows], scales[rows] = round_to_int8(self._floats(spec, source))
            first += source.num_rows
        return LinearParameters(weight, "int8", scales.mul_(spec.factor))

    def fp8(self, spec: ParameterSpec, forms: Forms) -> LinearParameters:
        """A matrix with the numbers and scales of the checkpoint; outputs that it has in other forms are floats. Raises
        ConfigurationError if a number is not finite.
        """
        kinds = {form for _, form in forms}
        groups = kinds - {IN_FP32, IN_BF16}
        if not groups:
            dtype = torch.bfloat16 if kinds == {IN_BF16} else torch.float32
            return LinearParameters(self.fill(spec, replace(_FLOAT32, dtype=dtype)))
        num_outputs, num_inputs = spec.held_shape
        weight = torch.zeros(spec.held_shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales, first = torch.zeros(num_outputs, max(-(-num_inputs // group) for group in groups)), 0
        for source, (count, form) in zip(spec.held_sources(), forms, strict=True):
            rows, first = slice(first, first + count), first + count
            if form not in groups:
                continue
            matrix = self._quantized(source)
            weight[rows], scales[rows, : matrix.scales.shape[1]] = matrix.values, matrix.scales
            matrix.require_finite(self._modules[source.name].name)
            self._release()
        numbers = self.fill(spec, _FLOAT32) if len(kinds) > 1 else None
        return LinearParameters(weight, "fp8", scales, numbers=numbers)

    def int4(self, spec: ParameterSpec, group: int) -> LinearParameters:
        """A matrix with the integers, scales and zeros of the checkpoint, all of whose parts are int4, or NF4. Raises
        ConfigurationError if a number is not finite.
        """
        num_outputs, num_inputs = spec.held_shape
        weight = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
        scales = torch.empty(num_outputs, -(-num_inputs // group))
        zeros = torch.empty(scales.shape, dtype=torch.uint8)
        first, order = 0, None
        for number, source in enumerate(spec.held_sources()):
            rows, module = slice(first, first + source.num_rows), self._modules[source.name]
            matrix = self._quantized(source)
            order = matrix.input_order() if number == 0 else order
            try:
                weight[rows], scales[rows], zeros[rows] = matrix.in_int4(group, order)
            except ConfigurationError as error:
                raise ConfigurationError(f"matrix {module.name}: {error}") from error
            matrix.require_finite(module.name)
            self._release()
            first += source.num_rows
        is_nf4 = self._modules[spec.sources[0].name].nf4_group is not None
        return LinearParameters(weight, "int4", scales.mul_(spec.factor), zeros, order=order, is_nf4=is_nf4)

    def ternary(self, spec: ParameterSpec, source: Source) -> QuantizedMatrix | Tensor:
        """See `in_four_bits`."""
        module = self._modules.get(source.name)
        if module is None or not module.storage.is_ternary:
            return self._floats(spec, source)
        matrix = self._quantized(source)
        matrix.require_finite(module.name)
        self._release()
        return matrix

    def _floats(self, spec: ParameterSpec, source: Source) -> Tensor:
        """The numbers of a part of a matrix, in fp32."""
        part = replace(spec, shape=(source.num_rows, spec.shape[1]), sources=(source,), factor=1.0, held_rows=None)
        return self.fill(part, _FLOAT32)

    def converted(self, spec: ParameterSpec, convert: Conversion) -> LinearParameters:
        """A matrix with the numbers and scales of the checkpoint. Raises ConfigurationError if one is not finite."""
        matrices = [self._quantized(source) for source in spec.held_sources()]
        for source, matrix in zip(spec.held_sources(), matrices, strict=True):
            matrix.require_finite(self._modules[source.name].name)
        parameter = convert(matrices)
        self._release()
        return parameter.scaled(spec.factor)

    def _quantized(self, source: Source) -> QuantizedMatrix:
        """The outputs that `source` selects of a quantised matrix."""
        matrix = self._modules[source.name].read(self._tensor, source.member)
        return matrix if source.rows is None else matrix.select(torch.from_numpy(source.rows))

    def _tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        if stored.path not in self._files:
            self._files[stored.path] = self._stack.enter_context(open_mapped(stored.path))
        self._mapped.append(read_part(self._files[stored.path], name, stored))
        return self._mapped[-1]

    def _release(self) -> None:
        """Give back the pages of the tensors that were read, which must not be used any more."""
        for tensor in self._mapped:
            release_pages(tensor)
        self._mapped.clear()


_FLOAT32 = WeightsTarget(torch.device("cpu"), torch.float32)


def _rows(source: Source, tensor: Tensor) -> Tensor:
    tensor = tensor if source.member is None else tensor[source.member]
    tensor, rows = tensor.t() if source.transposed else tensor, source.rows
    tensor = tensor.flatten() if source.flat else tensor
    if rows is None:
        return tensor
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return tensor[rows[0] : rows[-1] + 1]  # eight times as fast as index_select
    return tensor.index_select(0, torch.from_numpy(rows))
