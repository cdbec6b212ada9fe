"""Finds the tensors of a quantised module in a checkpoint, checks them against config.json, and reads them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from checkpoint.tensors import StoredTensor
from engine.kernels.cpu.machine import LANES
from engine.quantized_formats import (
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    gguf,
    gptq,
    hqq,
    mxfp4,
    nvfp4,
    torchao,
)
from engine.quantized_formats.gguf_config import GGUF_TYPES
from engine.quantized_formats.matrix import FLOATS, Part, Parts, QuantizedMatrix, Shape, Tensors
from engine.quantized_formats.storage import BYTES, Format, MatrixStorage, Quantization
from engine.quantized_formats.unread import why_unread
from mesh.domain.errors import ConfigurationError

StoredTensors = Mapping[str, StoredTensor]

_MATRICES = ("weight", "qweight", "weight_packed", "W_q", torchao.MATRIX)
"""Names of the tensor that holds the numbers of a module's matrix; each module has one of them."""
_QUANTIZED = tuple(f".{part}" for part in (*_MATRICES[1:], bitsandbytes.ABSMAX))
"""Ends of names that only tensors of quantised modules have."""
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")
_UNUSED_PARTS = (
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"),
    *hqq.UNUSED_PARTS,
    *torchao.UNUSED_PARTS,
)
"""Scales of activations, which are computed here from the activations themselves, and what config.json says, too."""


class _Reader(NamedTuple):
    """`parts` raises ConfigurationError if a matrix of this shape cannot be stored so."""

    parts: Callable[[MatrixStorage, Shape], Parts]
    read: Callable[[MatrixStorage, Shape, Tensors], QuantizedMatrix]


_READERS: Mapping[Format, _Reader] = {
    "awq": _Reader(awq.parts, awq.read),
    "gptq": _Reader(gptq.parts, gptq.read),
    "packed": _Reader(compressed_tensors.packed_parts, compressed_tensors.read_packed),
    "plain": _Reader(compressed_tensors.plain_parts, compressed_tensors.read_plain),
    "mxfp4": _Reader(mxfp4.parts, mxfp4.read),
    "bnb-4bit": _Reader(bitsandbytes.parts_4bit, bitsandbytes.read_4bit),
    "bnb-8bit": _Reader(bitsandbytes.parts_8bit, bitsandbytes.read_8bit),
    "hqq": _Reader(hqq.parts, hqq.read),
    "torchao": _Reader(torchao.parts, torchao.read),
    "bitlinear": _Reader(bitnet.parts, bitnet.read),
    "autobitlinear": _Reader(bitnet.parts, bitnet.read),
    "bitnet-online": _Reader(bitnet.parts, bitnet.read),
    **dict.fromkeys(GGUF_TYPES, _Reader(gguf.parts, gguf.read)),
    "mxfp4-packed": _Reader(mxfp4.parts_of_module, mxfp4.read_module),
    "mxfp4-plain": _Reader(mxfp4.parts_of_module, mxfp4.read_module),
    "nvfp4-packed": _Reader(nvfp4.parts, nvfp4.read),
    "nvfp4-plain": _Reader(nvfp4.parts, nvfp4.read),
}


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """A module whose matrix is quantised. `parts`: the names of its tensors in the checkpoint, by those of the format;
    `unused`: names of others that belong to it; `dtype`: that of its numbers. `nf4_group`: inputs that share a scale in
    NF4 of the compiled decoder; None if the matrix is in another form.
    """

    name: str
    shape: Shape
    storage: MatrixStorage
    parts: Mapping[str, str]
    unused: tuple[str, ...]
    dtype: str
    nf4_group: int | None = None

    @property
    def fp8_group(self) -> int | None:
        """Inputs that share a scale, if the matrix is as our encoding "fp8" has it; None if it is in another form."""
        storage, group = self.storage, self.storage.block_inputs or self.shape[1]
        is_plain = storage.format in BYTES and storage.is_symmetric and not storage.has_group_index
        return group if is_plain and self.dtype == "F8_E4M3" and group % LANES == 0 else None

    @property
    def scales_name(self) -> str:
        """The tensor with the scales of a matrix in int8; the module's own name if its scale is computed."""
        return next((self.parts[part] for part in ("weight_scale", "SCB") if part in self.parts), self.name)

    @property
    def int4_group(self) -> int | None:
        """As `MatrixStorage.int4_group`, for NF4, too."""
        return self.nf4_group or self.storage.int4_group

    @property
    def is_mxfp4(self) -> bool:
        return self.storage.is_mxfp4

    def read(self, read_tensor: Callable[[str], Tensor], member: int | None = None) -> QuantizedMatrix:
        """Read the matrix [outputs, inputs], or a member of tensors that stack several. Raises ConfigurationError."""
        tensors = {part: read_tensor(name) for part, name in self.parts.items()}
        if member is not None:
            tensors = {part: tensor[member] for part, tensor in tensors.items()}
        try:
            return _READERS[self.storage.format].read(self.storage, self.shape, tensors)
        except ConfigurationError as error:
            raise ConfigurationError(f"matrix {self.name}: {error}") from error


def find_module(
    name: str, shape: Shape, stored: StoredTensors, quantization: Quantization | None
) -> QuantizedModule | None:
    """The quantised matrix of module `name`; None if the checkpoint stores it as it is, or not at all.

    Modules are quantised if their tensors are, whatever lists of exceptions config.json has. Raises ConfigurationError
    with the file and the tensor if config.json and the tensors do not fit.
    """
    if f"{name}.weight" not in stored or not _is_float(stored[f"{name}.weight"]):
        _require_read(name, stored)
    matrices = [f"{name}.{matrix}" for matrix in _MATRICES if f"{name}.{matrix}" in stored]
    is_float = matrices == [f"{name}.weight"] and _is_float(stored[matrices[0]]) and not is_packed(name, stored)
    if not matrices or (quantization is None and is_float):
        return None
    storage = None if quantization is None else quantization.storage_of(name)
    if is_float and not _stores_floats(name, storage, stored):
        _require_no_scales(name, stored)
        return None
    where = f"{stored[matrices[0]].path}: tensor {matrices[0]}"
    _require_described(name, matrices, where, storage, quantization)
    assert storage is not None
    try:
        parts = _READERS[storage.format].parts(storage, shape)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    if matrices[0] != f"{name}.{next(iter(parts))}":
        raise ConfigurationError(
            f"{where} is not in the format that config.json names ({quantization}): the checkpoint mixes formats; "
            "download it again"
        )
    _require_no_factors(name, stored)
    names = {part: _stored_part(f"{name}.{part}", details, stored, where) for part, details in parts.items()}
    unused = tuple(f"{name}.{part}" for part in _UNUSED_PARTS if f"{name}.{part}" in stored)
    return QuantizedModule(
        name,
        shape,
        storage,
        {part: found for part, found in names.items() if found is not None},
        unused,
        stored[matrices[0]].dtype,
        bitsandbytes.nf4_group(shape, names, stored) if storage.format == "bnb-4bit" else None,
    )


def _require_described(
    name: str, matrices: list[str], where: str, storage: MatrixStorage | None, quantization: Quantization | None
) -> None:
    """Raise ConfigurationError unless a quantised module has one matrix, and config.json says how it is stored."""
    if len(matrices) > 1:
        raise ConfigurationError(
            f"{where} is there beside {matrices[1]}: the checkpoint mixes formats; remove the shards of one"
        )
    if quantization is None:
        raise ConfigurationError(
            f"{where} is quantised, but config.json has no quantization_config: copy it from where the checkpoint is "
            "from"
        )
    if storage is None:
        raise ConfigurationError(
            f"{where} is quantised, but config.json says that {name} is not ({quantization}): one of them is from "
            "another checkpoint"
        )


def is_packed(name: str, stored: StoredTensors) -> bool:
    """True if bitsandbytes has packed the matrix of a module, whose numbers may then be called floats."""
    return f"{name}.{bitsandbytes.ABSMAX}" in stored


def _require_read(name: str, stored: StoredTensors) -> None:
    """Raise ConfigurationError for a module whose tensors are of a format that is not read."""
    if (reason := why_unread(name, stored)) is not None:
        folder = next(iter(stored.values())).path.parent
        raise ConfigurationError(f"{folder}: {reason}")


def _stores_floats(name: str, storage: MatrixStorage | None, stored: StoredTensors) -> bool:
    """True if a matrix in floating point is quantised all the same: see bitnet.py."""
    if storage is None or not storage.is_ternary:
        return False
    has_scale = storage.format == "autobitlinear" and f"{name}.weight_scale" in stored
    return storage.format == "bitnet-online" or has_scale


def _require_no_scales(name: str, stored: StoredTensors) -> None:
    """Raise ConfigurationError for scales of a matrix that is in floating point: without them it may mean nothing."""
    if scales := [f"{name}.{part}" for part in _SCALES if f"{name}.{part}" in stored]:
        weight = stored[f"{name}.weight"]
        raise ConfigurationError(
            f"{weight.path}: tensor {name}.weight has dtype {weight.dtype}, and {scales[0]} is there beside it: the "
            "checkpoint mixes formats; remove the scales if the matrix is dequantised, or download it again"
        )


def _require_no_factors(name: str, stored: StoredTensors) -> None:
    """Raise ConfigurationError for factors of activations, which modelopt has for AWQ and SmoothQuant."""
    if (factors := f"{name}.pre_quant_scale") in stored:
        raise ConfigurationError(
            f"{stored[factors].path}: tensor {factors} multiplies the activations of {name}, which is not supported: "
            "serve a checkpoint that was quantised without AWQ or SmoothQuant, or the original one"
        )


def find_stacked(
    name: str, count: int, shape: Shape, stored: StoredTensors, quantization: Quantization | None
) -> QuantizedModule | None:
    """As `find_module`, for tensors that stack the matrices of `count` experts."""
    matrices = (f"{name}_blocks", *(f"{name}.{matrix}" for matrix in _MATRICES))
    matrix = next((candidate for candidate in matrices if candidate in stored), None)
    if matrix is None:
        return None
    where, is_mxfp4 = f"{stored[matrix].path}: tensor {matrix}", matrix == matrices[0]
    storage = None if quantization is None else quantization.storage_of(name)
    if storage is None or (storage.format == "mxfp4") != is_mxfp4:
        kind = "in MXFP4" if is_mxfp4 else "quantised"
        raise ConfigurationError(f"{where} is {kind}, but quant_method of config.json is not that ({quantization})")
    try:
        parts = _READERS[storage.format].parts(storage, shape)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    found: dict[str, str] = {}
    for part, details in parts.items():
        stacked = replace(details, shapes=tuple((count, *own) for own in details.shapes))
        stored_part = _stored_part(f"{name}{'_' if is_mxfp4 else '.'}{part}", stacked, stored, where)
        found |= {} if stored_part is None else {part: stored_part}
    return QuantizedModule(name, shape, storage, found, (), stored[matrix].dtype)


def stores_quantized(stored: StoredTensors) -> bool:
    """True if any matrix of the checkpoint is quantised."""
    return any(
        name.endswith(_QUANTIZED) or (name.endswith(".weight") and not _is_float(tensor))
        for name, tensor in stored.items()
    )


def _is_float(tensor: StoredTensor) -> bool:
    return tensor.dtype in (*FLOATS, "F64")


def _stored_part(name: str, part: Part, stored: StoredTensors, where: str) -> str | None:
    """The name of a part in the checkpoint, None if it is optional and missing. Raises ConfigurationError."""
    stem = name.rpartition(".")[0]
    candidates = [name, *(f"{stem}.{alias}" for alias in part.aliases)]
    found = next((candidate for candidate in candidates if candidate in stored), None)
    if found is None:
        if part.is_optional:
            return None
        raise ConfigurationError(
            f"{where} cannot be read without {' or '.join(candidates)}, which is missing: download the checkpoint again"
        )
    tensor = stored[found]
    if tensor.dtype not in part.dtypes:
        raise ConfigurationError(
            f"{tensor.path}: tensor {found} has dtype {tensor.dtype}, which its format stores as "
            f"{' or '.join(part.dtypes)}"
        )
    if part.shapes and tensor.shape not in part.shapes:
        expected = " or ".join(str(list(shape)) for shape in part.shapes)
        raise ConfigurationError(
            f"{tensor.path}: tensor {found} has shape {list(tensor.shape)}, config.json implies {expected}"
        )
    return found
