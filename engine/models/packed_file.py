"""Files of packed weights, which are mapped when they are read.

They are in the safetensors format. Arrays begin at multiples of a cache line, as the loop's vector loads need.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint.tensors import StoredTensor, read_header
from engine.kernels.cpu.arguments import Weights
from engine.kernels.cpu.machine import CACHE_LINE_BYTES
from engine.models.packed_decoder import PackedDecoder
from mesh.domain.errors import ConfigurationError

_PARTS = ("weights", "output")
_DATA_BOUNDARY = 4096
_DTYPES = {
    "F32": np.float32,
    "F16": np.uint16,
    "BF16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,  # fp8
    "I32": np.int32,
    "I64": np.int64,
}
_NAMES_OF_DTYPES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def write_packed(path: Path, packed: PackedDecoder) -> None:
    """Write a file that `read_packed` reads. Raises OSError."""
    arrays = _arrays(packed)
    header, end = {}, 0
    for name, array in arrays.items():
        dtype, first, end = _NAMES_OF_DTYPES[array.dtype], end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _DATA_BOUNDARY)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # tofile does not say why it fails


def read_packed(path: Path) -> PackedDecoder:
    """Read a file of `write_packed`. Raises ConfigurationError."""
    stored = read_header(path)
    try:
        arrays = {name: _map(stored[name]) for name in PackedDecoder._fields if name not in _PARTS}
        weights, output = (Weights(*(_map(stored[_name(part, name)]) for name in Weights._fields)) for part in _PARTS)
    except (KeyError, ValueError, OSError) as error:
        raise ConfigurationError(f"{path} is not a file of a partitioned model: {error!r}") from error
    return PackedDecoder(weights=weights, output=output, **arrays)


def _arrays(packed: PackedDecoder) -> Mapping[str, NDArray[Any]]:
    """All arrays by name, and padding behind those that do not end with a cache line."""
    arrays = {name: array for name, array in packed._asdict().items() if name not in _PARTS}
    for part in _PARTS:
        weights: Weights = getattr(packed, part)
        arrays |= {_name(part, name): array for name, array in weights._asdict().items()}
    padded: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        padded[name] = array
        if num_bytes := -array.nbytes % CACHE_LINE_BYTES:
            padded[f"{name}.padding"] = np.zeros(num_bytes, np.uint8)
    return padded


def _name(part: str, array: str) -> str:
    return f"{part}.{array}"


def _map(tensor: StoredTensor) -> NDArray[Any]:
    """Map an array privately: its pages are those of the page cache, which all processes share."""
    dtype = _DTYPES[tensor.dtype]
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    return np.memmap(tensor.path, dtype, "c", tensor.offset, tensor.shape).view(np.ndarray)
