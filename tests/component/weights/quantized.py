"""Quantised checkpoints made of float ones, by packers that are written from the formats' definitions.

They share nothing with the readers of engine/quantized_formats. Each checkpoint has a twin: a float checkpoint with the
numbers that its integers and scales mean, which transformers can run.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.tensors import StoredTensor
from engine.loading.mapped_files import open_mapped, read_part
from engine.loading.stored_parameters import open_stored, stored_name
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from mesh.domain.errors import ConfigurationError
from tests.component.remote_families import REFERENCE, REMOTE_FAMILIES
from tests.component.weights import fp4_packers
from tests.made_once import made_once

GROUP = 16
INT4_GROUP = 32
"""The least that the compiled decoder multiplies as it is stored."""
BLOCK = 32
_LEAST_SCALE = 1e-4
"""Of numbers that are all 0."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by the last part of their names, and the matrix [outputs, inputs] that they mean, in fp32."""


@dataclass(frozen=True)
class Form:
    """`config`: quantization_config. `store` packs a matrix [outputs, inputs]. `kept`: ends of names of modules that
    stay as they are.
    """

    config: Mapping[str, Any]
    store: Callable[[Tensor], Stored]
    kept: tuple[str, ...] = ()


def pack(numbers: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Numbers [rows, columns] without sign -> int32 [rows, words]; place k of a word holds its number `order[k]`."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % per_word)).view(len(numbers), -1, per_word)
    words = sum(padded[:, :, number] << (bits * place) for place, number in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def rounded(weight: Tensor, bits: int, group_of: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [outputs, inputs] from 0 to 2^bits - 1, fp16 scales and zeros [outputs, groups]."""
    groups = range(int(group_of.max()) + 1)
    low = torch.stack([weight[:, group_of == group].amin(1).clamp(max=0) for group in groups], 1)
    high = torch.stack([weight[:, group_of == group].amax(1).clamp(min=0) for group in groups], 1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).clamp(min=_LEAST_SCALE).half()
    middle = torch.full_like(low, 2 ** (bits - 1))
    zeros = middle if symmetric else torch.round(-low / scales.float()).clamp(0, 2**bits - 1)
    by_input = scales.float()[:, group_of], zeros[:, group_of]
    values = (torch.round(weight / by_input[0]) + by_input[1]).clamp(0, 2**bits - 1)
    return values, scales, zeros


def meaning(values: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (values - zeros[:, group_of]) * scales.float()[:, group_of]


def in_order(num_inputs: int, group: int = GROUP) -> Tensor:
    return torch.arange(num_inputs) // group


def shuffled(num_inputs: int, group: int = GROUP) -> Tensor:
    """Groups as activation order makes them: of equal sizes, their inputs anywhere."""
    return in_order(num_inputs, group)[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(3))]


def awq(weight: Tensor, group: int = GROUP) -> Stored:
    group_of = in_order(weight.shape[1], group)
    values, scales, zeros = rounded(weight, 4, group_of, symmetric=False)
    parts = {"qweight": pack(values.t(), 4, _AWQ_ORDER), "qzeros": pack(zeros.t(), 4, _AWQ_ORDER), "scales": scales.t()}
    return parts, meaning(values, scales, zeros, group_of)


def gptq(
    weight: Tensor,
    bits: int = 4,
    *,
    version: int = 1,
    symmetric: bool = True,
    ordered: bool = False,
    group: int = GROUP,
) -> Stored:
    group_of = shuffled(weight.shape[1], group) if ordered else in_order(weight.shape[1], group)
    values, scales, zeros = rounded(weight, bits, group_of, symmetric=symmetric)
    zeros = zeros.clamp(min=1)  # 0 has no successor in version 1
    parts = {
        "qweight": pack(values, bits).t(),
        "qzeros": pack(zeros.t() - int(version == 1), bits),
        "scales": scales.t(),
        "g_idx": group_of.int(),
    }
    return parts, meaning(values, scales, zeros, group_of)


def w4a16(weight: Tensor, *, symmetric: bool = True, ordered: bool = False, group: int = GROUP) -> Stored:
    group_of = shuffled(weight.shape[1], group) if ordered else in_order(weight.shape[1], group)
    values, scales, zeros = rounded(weight, 4, group_of, symmetric=symmetric)
    parts = {"weight_packed": pack(values, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        parts["weight_zero_point"] = pack(zeros.t(), 4).t()
    if ordered:
        parts["weight_g_idx"] = group_of.int()
    return parts, meaning(values, scales, zeros, group_of)


def w8a8(weight: Tensor) -> Stored:
    """int8 from -128 on, as llm-compressor rounds."""
    scales = (weight.abs().amax(1, keepdim=True) / 127.5).clamp(min=_LEAST_SCALE)
    values = torch.round(weight / scales).clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def fp8_blocks(weight: Tensor) -> Stored:
    rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
    scales = torch.tensor(
        [
            [float(weight[rows == row][:, columns == column].abs().max()) / 448 for column in columns.unique()]
            for row in rows.unique()
        ]
    )
    by_number = scales[rows][:, columns]
    values = (weight / by_number).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale_inv": scales, "activation_scale": torch.ones(1)}
    return stored, values.float() * by_number


def fp8_channels(weight: Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales, "input_scale": torch.ones(1)}, values.float() * scales.float()


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = tuple(sign * number / 12 for sign in (1, -1) for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_NESTED_BLOCK = 256


def bitsandbytes_4bit(
    weight: Tensor, kind: str = "nf4", size: int = 64, *, nested: bool = False, storage: torch.dtype = torch.uint8
) -> Stored:
    """Blocks of `size` along the rows of the whole matrix."""
    levels, count = torch.tensor(_NF4 if kind == "nf4" else _FP4), weight.numel()
    blocks = torch.nn.functional.pad(weight.flatten().float(), (0, -count % size)).view(-1, size)
    largest = blocks.abs().amax(1).clamp(min=_LEAST_SCALE)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"weight.absmax": largest, "weight.quant_map": levels}
    if nested:
        parts, more, largest = _nested(largest)
        parts["weight.quant_map"] = levels
        state |= more
    numbers = (blocks / largest[:, None])[..., None].sub(levels).abs().argmin(-1)
    means = (levels[numbers] * largest[:, None]).flatten()[:count].view(weight.shape)
    pairs = torch.nn.functional.pad(numbers.flatten()[:count], (0, count % 2)).view(-1, 2)
    parts["weight"] = (16 * pairs[:, 0] + pairs[:, 1]).to(torch.uint8).view(storage)[:, None]
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, means


def _nested(largest: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """The largest magnitudes of blocks in bytes: the tensors, what the state says of them, and what they mean."""
    offset, levels = float(largest.mean()), torch.linspace(-1, 1, 256)
    blocks = torch.nn.functional.pad(largest - offset, (0, -len(largest) % _NESTED_BLOCK)).view(-1, _NESTED_BLOCK)
    outer = blocks.abs().amax(1).clamp(min=_LEAST_SCALE)
    numbers = (blocks / outer[:, None])[..., None].sub(levels).abs().argmin(-1)
    means = ((levels[numbers] * outer[:, None]) + offset).flatten()[: len(largest)]
    bytes_ = numbers.flatten()[: len(largest)].to(torch.uint8)
    parts = {"weight.absmax": bytes_, "weight.nested_absmax": outer, "weight.nested_quant_map": levels}
    return parts, {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}, means


def bitsandbytes_8bit(weight: Tensor) -> Stored:
    largest = weight.abs().amax(1).float().clamp(min=_LEAST_SCALE)
    values = torch.round(weight * (127 / largest[:, None])).clamp(-127, 127)
    parts = {"weight": values.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, values * largest[:, None] * (1 / 127)


def three_bits(weight: Tensor, group: int = GROUP) -> Stored:
    """GPTQ of 3 bits: number k of 32 has bits 3k to 3k + 2 of three words. Raises ConfigurationError."""
    if any(size % 32 for size in weight.shape):
        raise ConfigurationError("32 integers of 3 bits are packed together, and its sizes are no multiples of 32")
    group_of = in_order(weight.shape[1], group)
    values, scales, zeros = rounded(weight, 3, group_of, symmetric=False)
    zeros = zeros.clamp(min=1)
    parts = {"qweight": _pack_bits(values, 3).t(), "qzeros": _pack_bits(zeros.t() - 1, 3), "scales": scales.t()}
    return parts, meaning(values, scales, zeros, group_of)


def _pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """A stream of bits: numbers [rows, columns] without sign -> int32 [rows, columns * bits / 32]."""
    stream = numbers.long()[..., None] >> torch.arange(bits) & 1
    words = (stream.reshape(len(numbers), -1, 32) << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def auto_round(weight: Tensor, group: int = GROUP) -> Stored:
    """Symmetric in the whole range: the number that is furthest from 0 becomes -8, so that scales have a sign."""
    group_of = in_order(weight.shape[1], group)
    by_group = weight.reshape(len(weight), -1, group)
    furthest = by_group.gather(2, by_group.abs().argmax(2, keepdim=True))[:, :, 0]
    scales = torch.where(furthest.abs() < _LEAST_SCALE, _LEAST_SCALE, -furthest / 8).half()
    zeros = torch.full(scales.shape, 8.0)
    values = (torch.round(weight / scales.float()[:, group_of]) + 8).clamp(0, 15)
    parts = {"qweight": pack(values, 4).t(), "qzeros": pack(zeros.t() - 1, 4), "scales": scales.t()}
    return parts, meaning(values, scales, zeros, group_of)


def hqq(weight: Tensor, group: int = GROUP) -> Stored:
    """Zeros are real numbers. The first half of all groups is in the high bits, the second in the low ones."""
    group_of = in_order(weight.shape[1], group)
    values, scales, zeros = rounded(weight, 4, group_of, symmetric=False)
    zeros = (zeros + 0.3125).half()
    by_group = values.reshape(-1, group).to(torch.uint8)
    half = len(by_group) // 2
    parts = {
        "W_q": by_group[:half] << 4 | by_group[half:],
        "scale": scales.reshape(-1, 1),
        "zero": zeros.reshape(-1, 1),
    }
    facts = {"nbits": 4, "group_size": group, "axis": 1, "shape": list(weight.shape)}
    parts |= {name: torch.tensor(fact) for name, fact in facts.items()}
    parts |= {"packing": torch.tensor(list(b"4bit_u8")), "quant_zero": torch.tensor(0, dtype=torch.uint8)}
    return parts, meaning(values, scales, zeros.float(), group_of)


def _of_hqq(group: int) -> dict[str, Any]:
    facts = {"nbits": 4, "group_size": group, "axis": 1}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": facts}, "skip_modules": ["lm_head"]}


def torchao(weight: Tensor, bits: int, group: int = GROUP) -> Stored:
    """Integers with a sign, each in a byte."""
    group_of = in_order(weight.shape[1], group)
    values, scales, zeros = rounded(weight, bits, group_of, symmetric=False)
    middle = 2 ** (bits - 1)
    parts = {"qdata": values - middle, "scale": scales, "zero_point": zeros - middle}
    stored = {name: tensor if name == "scale" else tensor.to(torch.int8) for name, tensor in parts.items()}
    return {f"_weight_{name}": tensor for name, tensor in stored.items()}, meaning(values, scales, zeros, group_of)


def of_torchao(kind: str, **facts: object) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": facts}}}


def _intx(bits: int, group: int) -> dict[str, Any]:
    return of_torchao(
        "IntxWeightOnlyConfig",
        weight_dtype={"_type": "torch.dtype", "_data": f"int{bits}"},
        granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}},
        mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"},
        intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
    )


def bitnet(weight: Tensor) -> Stored:
    """Ternary, four rows in one of bytes, with the scale by which BitLinear divides."""
    if len(weight) % 4:
        raise ConfigurationError(f"BitNet cannot pack {len(weight)} rows by four")
    mean = weight.abs().mean().clamp(min=_LEAST_SCALE)
    scale = (1 / mean).bfloat16()
    values = (weight / mean).round().clamp(-1, 1)
    rows = (values + 1).to(torch.uint8).view(4, -1, weight.shape[1])
    packed = rows[0] + 4 * rows[1] + 16 * rows[2] + 64 * rows[3]
    return {"weight": packed, "weight_scale": scale.view(1)}, values / scale.float()


def compressed(kind: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True} | dict(weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group | more},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "llm_int8_skip_modules": None}
_OF_E2M1 = {"num_bits": 4, "type": "float"}
_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

FORMS: dict[str, Form] = {
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Form(_GPTQ, gptq),
    "gptq-8-order": Form(
        _GPTQ | {"bits": 8, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 8, version=2, symmetric=False, ordered=True),
    ),
    "w8a8": Form(compressed("int-quantized", {"strategy": "channel"}, input_activations=_DYNAMIC), w8a8),
    "w4a16": Form(compressed("pack-quantized", _INT4), w4a16),
    "w4a16-order": Form(
        compressed("pack-quantized", _INT4 | {"symmetric": False, "actorder": "group"}),
        lambda weight: w4a16(weight, symmetric=False, ordered=True),
    ),
    "fp8": Form({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, fp8_blocks),
    "fp8-channels": Form(compressed("float-quantized", {"type": "float", "strategy": "channel"}), fp8_channels),
    "bnb-nf4": Form(
        _BNB | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda weight: bitsandbytes_4bit(weight, nested=True),
    ),
    "bnb-fp4": Form(
        _BNB | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
        lambda weight: bitsandbytes_4bit(weight, "fp4", 128, storage=torch.bfloat16),
    ),
    "bnb-int8": Form(_BNB | {"load_in_4bit": False, "load_in_8bit": True}, bitsandbytes_8bit),
    "hqq": Form(_of_hqq(GROUP), hqq),
    "torchao-8": Form(_intx(8, GROUP), lambda weight: torchao(weight, 8)),
    "nvfp4": Form(
        compressed("nvfp4-pack-quantized", _OF_E2M1 | {"strategy": "tensor_group", "group_size": 16}), fp4_packers.nvfp4
    ),
    "modelopt-nvfp4": Form(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*embed*"]},
        fp4_packers.modelopt_nvfp4,
    ),
    "mxfp4": Form(
        compressed("mxfp4-pack-quantized", _OF_E2M1 | {"strategy": "group", "group_size": 32}), fp4_packers.mxfp4
    ),
}

BITSANDBYTES = tuple(form for form in FORMS if form.startswith("bnb"))
_FP4_FORMS = ("nvfp4", "modelopt-nvfp4", "mxfp4")
_OF_INT4 = {"group_size": INT4_GROUP}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "sym": True, "data_type": "int"}
INT4_FORMS: dict[str, Form] = {
    "awq-32": Form(FORMS["awq"].config | _OF_INT4, lambda weight: awq(weight, INT4_GROUP)),
    "awq-32-mixed": Form(
        FORMS["awq"].config | _OF_INT4,
        lambda weight: awq(weight, INT4_GROUP),
        kept=("v_proj", "o_proj", "1.mlp.down_proj"),
    ),
    "gptq-32": Form(_GPTQ | _OF_INT4, lambda weight: gptq(weight, group=INT4_GROUP)),
    "gptq-32-zeros": Form(
        _GPTQ | _OF_INT4 | {"sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, version=2, symmetric=False, group=INT4_GROUP),
    ),
    "w4a16-32-zeros": Form(
        compressed("pack-quantized", _INT4 | _OF_INT4 | {"symmetric": False}),
        lambda weight: w4a16(weight, symmetric=False, group=INT4_GROUP),
    ),
    "w4a16-32": Form(compressed("pack-quantized", _INT4 | _OF_INT4), lambda weight: w4a16(weight, group=INT4_GROUP)),
    "gptq-32-order": Form(
        _GPTQ | _OF_INT4 | {"desc_act": True, "sym": False},
        lambda weight: gptq(weight, symmetric=False, ordered=True, group=INT4_GROUP),
    ),
    "w4a16-32-order": Form(
        compressed("pack-quantized", _INT4 | _OF_INT4 | {"actorder": "group"}),
        lambda weight: w4a16(weight, ordered=True, group=INT4_GROUP),
    ),
    "gptq-3-bits": Form(
        _GPTQ | _OF_INT4 | {"bits": 3, "sym": False}, lambda weight: three_bits(weight, group=INT4_GROUP)
    ),
    "auto-round-32": Form(
        _AUTO_ROUND | _OF_INT4 | {"packing_format": "auto_round:auto_gptq"},
        lambda weight: auto_round(weight, group=INT4_GROUP),
    ),
    "hqq-32": Form(_of_hqq(INT4_GROUP), lambda weight: hqq(weight, INT4_GROUP)),
    "torchao-32": Form(_intx(4, INT4_GROUP), lambda weight: torchao(weight, 4, INT4_GROUP)),
}
"""Forms that the compiled decoder multiplies as they are stored. It rounds matrices that are `kept` to 8 bits."""

_KEPT_MATRICES = ("v_proj", "o_proj", "1.mlp.down_proj")
MIXED_FORMS: dict[str, Form] = {
    "fp8-mixed": Form(FORMS["fp8"].config, fp8_blocks, kept=_KEPT_MATRICES),
    "w8a8-mixed": Form(FORMS["w8a8"].config, w8a8, kept=_KEPT_MATRICES),
}
"""Forms of checkpoints whose makers left more than the output matrix as it was."""
TERNARY_FORMS: dict[str, Form] = {"bitnet": Form({"quant_method": "bitnet"}, bitnet)}

_ABSORBED = (".key_up", ".value_up")
"""What attention projects from latents: no matrices to the decoder, and quantised like all others in files."""
_KEPT = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")
"""Of delta nets: too few outputs for blocks of 128, so that files have them unquantised."""


def quantized_modules(model_dir: Path) -> dict[str, bool]:
    """Matrices that are usually quantised, by their modules' names; whether they are stored transposed."""
    specs, stored = parameter_specs(load_decoder_config(model_dir)), places(model_dir)
    matrices = [spec for spec in specs if spec.name != "lm_head" and (spec.is_matrix or spec.name.endswith(_ABSORBED))]
    sources = [source for spec in matrices for source in spec.sources if not source.name.endswith(_KEPT)]
    return {stored_name(source.name, stored).removesuffix(".weight"): source.transposed for source in sources}


def load_tensors(model_dir: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint of one file; experts that it stacks are one by one."""
    with open_mapped(model_dir / "model.safetensors") as file:
        return {name: read_part(file, name, place).clone() for name, place in places(model_dir).items()}


def places(model_dir: Path) -> dict[str, StoredTensor]:
    return open_stored(model_dir, parameter_specs(load_decoder_config(model_dir)))


def numbers_of(tensors: Mapping[str, Tensor], place: StoredTensor) -> Tensor:
    """The numbers of a matrix where they lie in the tensor that it is a part of."""
    assert place.whole is not None
    numbers = tensors[place.whole].view(-1)[place.first :]
    strides = (1, place.column_step) if place.column_step else (place.shape[-1], 1)
    return numbers.as_strided(place.shape, strides)


def quantize_checkpoint(model_dir: Path, out: Path, form: str) -> Path:
    """Write the checkpoint of `model_dir` in this form to `out`, and its twin to `twin_of(out)`. Returns `out`. Raises
    ConfigurationError for experts that no such format stores.
    """
    description = (FORMS | INT4_FORMS | MIXED_FORMS | TERNARY_FORMS)[form]
    if load_decoder_config(model_dir).tensors.stacked_experts and description.config.get("format") is None:
        raise ConfigurationError("its experts are in one tensor, as MXFP4 and `tandem quantize` store them, not this")
    for folder in (out, twin_of(out)):
        shutil.copytree(model_dir, folder)
    tensors, twin, stored = load_tensors(model_dir), load_file(model_dir / "model.safetensors"), places(model_dir)
    for module, transposed in quantized_modules(model_dir).items():
        if module.endswith(description.kept):
            continue
        if form in INT4_FORMS and module.endswith("kv_b_proj") and tensors[f"{module}.weight"].shape[1] % INT4_GROUP:
            continue
        name = module if module in tensors else f"{module}.weight"
        if form in _FP4_FORMS and tensors[name].shape[-2 if transposed else -1] % fp4_packers.MXFP4_GROUP:
            continue  # makers leave such matrices as they are
        weight = tensors.pop(name)
        parts, means = _store(weight, description, transposed=transposed)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        means, place = (means.mT if transposed else means).contiguous(), stored[name]
        if place.whole is None:
            twin[name] = means
        else:
            numbers_of(twin, place).copy_(means)
    save_file(tensors, out / "model.safetensors")
    save_file(twin, twin_of(out) / "model.safetensors", {"format": "pt"})
    describe(out, description.config)
    if (twin_of(out) / REFERENCE).exists():
        _quantize_reference(twin_of(out), description)
    return out


def _quantize_reference(twin: Path, form: Form) -> None:
    """Round the reference beside a twin as the twin is: rows do not depend on each other. Raises ConfigurationError for
    blocks of rows that the checkpoint has in another order.
    """
    tensors = load_file(twin / REFERENCE)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight")):
            tensors[name] = form.store(tensor)[1].contiguous()
    theirs, ours = REMOTE_FAMILIES[(twin / "family").read_text()].theirs(tensors), load_file(twin / "model.safetensors")
    if not all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()):
        raise ConfigurationError("its blocks of rows are not those of the reference, which has heads in another order")
    save_file(tensors, twin / REFERENCE)


def _store(weight: Tensor, form: Form, *, transposed: bool) -> Stored:
    """Of a matrix, or of matrices stacked as those of gpt-oss."""
    weight = weight.mT if transposed else weight
    if weight.ndim == 2:
        return form.store(weight)
    stored = [form.store(matrix) for matrix in weight]
    kinds = stored[0][0].keys() - {"weight_shape"}
    return {kind: torch.stack([parts[kind] for parts, _ in stored]) for kind in kinds}, torch.stack(
        [m for _, m in stored]
    )


def quantized_once(factory: pytest.TempPathFactory, model_dir: Path, form: str) -> Path:
    """As `quantize_checkpoint`, in a folder that all processes of this test run share."""
    name = f"{model_dir.name}-{form}"
    return made_once(factory, name, lambda folder: quantize_checkpoint(model_dir, folder / name, form)) / name


def describe(model_dir: Path, config: Mapping[str, Any] | None) -> None:
    """Set quantization_config of config.json."""
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def twin_of(model_dir: Path) -> Path:
    return model_dir.with_name(f"{model_dir.name}-twin")


def write_counted_checkpoint(folder: Path) -> Path:
    """A Llama of one layer in bf16, whose numbers are counted, not drawn: the same wherever they are made."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"}
    facts |= {"num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(facts | sizes | {"tie_word_embeddings": False}))
    tensors: dict[str, Tensor] = {}
    for spec in parameter_specs(load_decoder_config(folder)):
        for source in spec.sources:
            count = math.prod(source.shape)
            numbers = (torch.arange(count) * 7919 + 31 * len(tensors)) % 2003 - 1001
            numbers = numbers / 8192 if len(source.shape) > 1 else torch.ones(count)
            tensors[source.name] = numbers.view(source.shape).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
