"""bitsandbytes, which transformers and Unsloth write. Blocks of a matrix in 4 bits run along its rows, one row after
the other, so that a block may begin in one row and end in another.

A byte holds two numbers, the first in its high half; they number the 16 levels of NF4 or FP4, which the largest of the
block multiplies. With double quantisation the largest of blocks are bytes, which number 256 levels of their own and
have blocks of their own (QLoRA, Dettmers et al. 2023). A tensor of bytes holds the sizes as JSON.

In 8 bits (LLM.int8(), Dettmers et al. 2022) a matrix is int8 with the largest of each output.
"""

import math
from collections.abc import Mapping
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from checkpoint.tensors import StoredTensor
from engine.kernels.cpu.machine import INT4_GROUPS
from engine.quantized_formats.matrix import FLOATS, Part, Parts, QuantizedMatrix, Shape, Tensors
from engine.quantized_formats.storage import BLOCK_SIZES, MatrixStorage
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json

ABSMAX = "weight.absmax"
_KINDS = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022833334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
LEVELS: Mapping[str, Tensor] = {
    "nf4": torch.tensor(_NF4),
    "fp4": torch.tensor((*_FP4_TWELFTHS, *(0.0 - level for level in _FP4_TWELFTHS))) / 12,  # no -0
}
_LEVELS_TOLERANCE = 1e-3
"""By which a file's own list of levels, which the library does not read, may differ."""
_INT8_FACTOR = 1 / 127
_STORAGE_SIZES = (1, 2, 4, 8)
"""Bytes of the types whose numbers stand for packed bytes, as in checkpoints of FSDP."""
_STORAGE_DTYPES = ("U8", "I8", "BF16", "F16", "F32", "F64")


def parts_4bit(storage: MatrixStorage, shape: Shape) -> Parts:
    count = prod(shape)
    num_bytes = -(-count // 2)
    blocks = [(-(-count // size),) for size in BLOCK_SIZES]
    return {
        "weight": Part(_STORAGE_DTYPES, tuple((num_bytes // size, 1) for size in _STORAGE_SIZES)),
        ABSMAX: Part(("U8", *FLOATS), tuple(blocks)),
        "weight.quant_map": Part(FLOATS, ((len(_NF4),),)),
        **{f"{_STATE}{kind}": Part(("U8",), (), is_optional=True) for kind in _KINDS},
        "weight.nested_absmax": Part(FLOATS, (), is_optional=True),
        "weight.nested_quant_map": Part(FLOATS, ((256,),), is_optional=True),
    }


def read_4bit(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    kinds = [kind for kind in _KINDS if f"{_STATE}{kind}" in tensors]
    if len(kinds) != 1:
        raise ConfigurationError(
            f"it needs one tensor {_STATE} with nf4 or fp4 behind it, and has {len(kinds)}: download the checkpoint "
            "again"
        )
    count, kind = prod(shape), kinds[0]
    state = _state(tensors[f"{_STATE}{kind}"])
    _member(state, "quant_type", (kind,))
    size = _member(state, "blocksize", BLOCK_SIZES)
    if state.get("shape") != list(shape):
        raise ConfigurationError(
            f"its quant_state says shape {state.get('shape')!r:.100}, config.json implies {list(shape)}: one of them "
            "is from another checkpoint"
        )
    if not torch.allclose(tensors["weight.quant_map"].float(), LEVELS[kind], atol=_LEVELS_TOLERANCE, rtol=0):
        raise ConfigurationError(f"its quant_map has other levels than {kind}: download the checkpoint again")
    packed = tensors["weight"].reshape(-1).view(torch.uint8)
    if len(packed) != (num_bytes := -(-count // 2)):
        raise ConfigurationError(f"it has {len(packed)} bytes, and its shape implies {num_bytes}: download it again")
    largest, num_blocks = _largest(state, tensors), -(-count // size)
    if len(largest) != num_blocks:
        raise ConfigurationError(
            f"its absmax has {len(largest)} numbers, and blocks of {size} imply {num_blocks}: download it again"
        )
    numbers = torch.stack((packed >> 4, packed & 15), -1).view(-1)[:count].view(shape)
    num_outputs, num_inputs = shape
    group = gcd(num_inputs, size)  # no group is in two blocks
    first = torch.arange(num_outputs)[:, None] * num_inputs + torch.arange(0, num_inputs, group)
    return QuantizedMatrix(numbers, largest[first // size], levels=LEVELS[kind])


def nf4_group(shape: Shape, names: Mapping[str, str | None], stored: Mapping[str, StoredTensor]) -> int | None:
    """Inputs that share a scale in NF4 of the compiled decoder: as many as lie in one row and one block. None if they
    are too few, or the matrix is not NF4. `names`: those of its tensors, by those of the format.
    """
    absmax = names[ABSMAX]
    if names[f"{_STATE}nf4"] is None or absmax is None:
        return None
    # Only a matrix of one block may have several sizes, and the smallest one is as good as the right one.
    size = next(size for size in BLOCK_SIZES if stored[absmax].shape == (-(-prod(shape) // size),))
    return max((group for group in INT4_GROUPS if gcd(shape[1], size) % group == 0), default=None)


def _largest(state: Mapping[str, Any], tensors: Tensors) -> Tensor:
    """The largest magnitude of each block, fp32."""
    stored = tensors[ABSMAX]
    nested = tensors.get("weight.nested_absmax"), tensors.get("weight.nested_quant_map")
    if stored.dtype is not torch.uint8:
        if nested != (None, None):
            raise ConfigurationError("its absmax is in floating point and has a nested_absmax: download it again")
        return stored.float()
    if nested[0] is None or nested[1] is None:
        raise ConfigurationError(
            "its absmax is in bytes (bnb_4bit_use_double_quant), and nested_absmax or nested_quant_map is missing: "
            "download the checkpoint again"
        )
    size, offset = _member(state, "nested_blocksize", BLOCK_SIZES), state.get("nested_offset")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise ConfigurationError(f"nested_offset of its quant_state must be a number, got {offset!r:.100}")
    if nested[0].shape != (num_blocks := -(-len(stored) // size),):
        raise ConfigurationError(
            f"its nested_absmax has shape {list(nested[0].shape)}, and nested_blocksize {size} implies "
            f"{[num_blocks]}: download the checkpoint again"
        )
    blocks = nested[0].float().repeat_interleave(size)[: len(stored)]
    return nested[1].float()[stored.int()] * blocks + offset


def _state(tensor: Tensor) -> Mapping[str, Any]:
    if tensor.ndim != 1 or len(tensor) > _MAX_STATE_BYTES:
        raise ConfigurationError(f"its quant_state has shape {list(tensor.shape)}, which is no text: download it again")
    try:
        state = parse_json(tensor.numpy().tobytes())
    except ValueError as error:
        raise ConfigurationError(f"its quant_state is no JSON ({error}): download the checkpoint again") from error
    if not isinstance(state, dict):
        raise ConfigurationError("its quant_state must be a JSON object: download the checkpoint again")
    return state


def _member(state: Mapping[str, Any], name: str, accepted: tuple[Any, ...]) -> Any:
    value = state.get(name)
    found = next((each for each in accepted if each == value and type(each) is type(value)), None)
    if found is None:
        raise ConfigurationError(
            f"{name} {value!r:.100} of its quant_state is not supported; supported: {', '.join(map(str, accepted))}"
        )
    return found


def parts_8bit(storage: MatrixStorage, shape: Shape) -> Parts:
    return {
        "weight": Part(("I8",), (shape,)),
        "SCB": Part(FLOATS, (shape[:1],)),
        "weight_format": Part(("U8",), ((), (1,)), is_optional=True),
    }


def read_8bit(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    layout = tensors.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise ConfigurationError(
            f"its weight_format {int(layout)} is an order of numbers for some GPU, and only 0, in rows, is supported: "
            "write it again with bitsandbytes 0.45 or later"
        )
    return QuantizedMatrix(tensors["weight"], tensors["SCB"].float()[:, None], factor=_INT8_FACTOR)
