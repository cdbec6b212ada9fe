"""The weights of a CompiledDecoder as its loop reads them, and files of them, which are mapped when they are read.

Files are in the safetensors format. Arrays begin at multiples of a cache line, as the loop's vector loads need.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoint.tensors import StoredTensor, read_header
from engine.attention.backend import AttentionShape
from engine.bus_errors import name_if_cut_off
from engine.kernels.cpu.arguments import Array, Floats, HeadShape, Weights
from engine.kernels.cpu.machine import CACHE_LINE_BYTES
from engine.models.model_config import ModelConfig
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


class PackedDecoder(NamedTuple):
    """The weights that one rank holds, of the layers of its stage."""

    embed: Array  # [vocab_size, hidden], of a type as in DTYPES; [0, hidden] in other ranks than 0
    positions: Floats  # [max_position_embeddings, hidden] of learned positions; else, and in other ranks, [0, hidden]
    embed_norm: Floats  # as final_norm; [0, hidden] without
    weights: Weights  # of the layers
    output: Weights  # the output matrix; it has no outputs in later stages than 0. In int4: in int8 or its own type
    norms: Floats  # [num_layers, 2, 4 or 9 of _NORMS, 1 or 2, hidden]: weights of each, and biases of layer norms
    final_norm: Floats  # [1 or 2, hidden]
    sub_norms: Floats  # see ModelConstants
    head_norms: Floats  # [num_layers, 0, 2, 3 or number of own heads, largest head_dim]; see HeadNorms
    scalars: Floats  # see ModelConstants
    layer_inputs: Array  # [input_vocab, num_layers * input_width] of Gemma 4, as embed; else [0, 0]
    layer_inputs_norm: Floats  # [1, input_width], else [1, 0]
    activation: Floats  # see ModelConstants
    sinks: Floats  # [num_layers, num_heads] of the rank; [0, 0] without
    routers: Floats  # of layers with experts; see engine/kernels/cpu/routing.py
    router_biases: Floats
    choice_biases: Floats
    shared_gates: Floats
    expert_factors: Floats
    q_norms: Floats  # of latent attention, with those below; see engine/kernels/cpu/attention/latent.py
    kv_norms: Floats
    key_up: Array
    value_up: Array
    taps: Floats  # of recurrent layers, with those below it; see RecurrentWeights
    conv_biases: Floats
    rates: Floats
    rate_biases: Floats
    skips: Floats
    recurrent_norms: Floats
    value_panels: Floats
    step_panels: Floats


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
    name_if_cut_off([path])
    stored = read_header(path)
    try:
        arrays = {name: _map(stored[name]) for name in PackedDecoder._fields if name not in _PARTS}
        weights, output = (Weights(*(_map(stored[_name(part, name)]) for name in Weights._fields)) for part in _PARTS)
    except (KeyError, ValueError, OSError) as error:
        raise ConfigurationError(f"{path} is not a file of a partitioned model: {error!r}") from error
    return PackedDecoder(weights=weights, output=output, **arrays)


def stores_steps(path: Path) -> bool:
    """True if matrices in the file are in steps of int8. Raises ConfigurationError."""
    packed = read_header(path).get(_name("weights", "packed"))
    return packed is not None and packed.dtype == "I64"


def _arrays(packed: PackedDecoder) -> Mapping[str, NDArray[Any]]:
    """All arrays by name, and padding after those that do not end with a cache line."""
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


def qkv_width(heads: AttentionShape | HeadShape, config: ModelConfig) -> int:
    """Width of a layer's queries, keys and values together, and of the gates of queries."""
    gates = heads.num_heads if config.attention_gate else 0
    return (heads.num_heads + 2 * heads.num_kv_heads + gates) * heads.head_dim
