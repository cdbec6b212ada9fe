"""Makes more checkpoints of this folder, as make.py does; see README.md. Run it in the environments of the libraries:

python make_others.py gptq | auto_round | hqq | torchao
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from make import CONFIG, GROUP, HERE, MODULES, float_model, linear, make_gptq_form, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def make_gptq() -> None:
    make_gptq_form("gptq-v1-3-bits", 3, symmetric=False, desc_act=False, kind="gptq")
    make_gptq_form("gptq-v2-2-bits", 2, symmetric=True, desc_act=True, kind="gptq_v2")


def make_auto_round() -> None:
    """By rounding to nearest, as `iters=0` means: that needs no calibration."""
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
    from transformers import LlamaConfig, LlamaForCausalLM

    class Tokenizer:
        model_max_length = 128

        def save_pretrained(self, *_: Any, **__: Any) -> None: ...

    def make(folder: str, packing: str, kinds: dict[str, Any], *, symmetric: bool) -> None:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).half()
        model.load_state_dict(float_model(torch.float16))
        made = HERE / folder / "made"
        facts = {"bits": 4, "group_size": GROUP, "sym": symmetric, "layer_config": kinds}
        rounder = AutoRound(model, Tokenizer(), iters=0, disable_opt_rtn=True, device_map="cpu", **facts)
        rounder.quantize_and_save(str(made), format=packing)
        path = next(made.rglob("model.safetensors"))
        tensors = load_file(path)
        quantization = json.loads((path.parent / "config.json").read_text())["quantization_config"]
        remove(made)

        def means(name: str, dtype: torch.dtype) -> Tensor:
            parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
            num_outputs, num_inputs = MODULES[name]
            bits = next((own["bits"] for kind, own in kinds.items() if kind in name), 4)
            if "awq" in quantization["packing_format"]:
                module = WQLinear_GEMM(bits, GROUP, num_inputs, num_outputs, False, "cpu")
            else:
                library = qlinear_torch_zp if "gptq" in quantization["packing_format"] else qlinear_torch
                module = library.QuantLinear(bits, GROUP, num_inputs, num_outputs, False)
            for part, tensor in parts.items():
                setattr(module, part, tensor.to(dtype) if part == "scales" else tensor)
            if isinstance(module, WQLinear_GEMM):
                return dequantize_gemm(module.qweight, module.qzeros, module.scales, bits, GROUP).t()
            with mock.patch("torch.matmul", lambda _, weight: weight):  # the matrix that it would multiply with
                return module(torch.zeros(num_inputs, num_inputs, dtype=dtype)).t()

        save(folder, tensors, quantization, means)

    make("auto-round", "auto_round", {"mlp.down_proj": {"bits": 8}, "v_proj": {"bits": 2}}, symmetric=True)
    make("auto-round-asymmetric", "auto_round", {"o_proj": {"bits": 3}}, symmetric=False)
    make("auto-round-awq", "auto_round:auto_awq", {}, symmetric=False)


def make_hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    def make(folder: str, kinds: dict[str, dict[str, Any]]) -> None:
        """One description for all modules, or one for each tag."""
        tensors, packed = float_model(torch.float16), {}
        described = {tag: BaseQuantizeConfig(**facts) for tag, facts in kinds.items()}
        for name in MODULES:
            own = described.get(name.removeprefix("model.layers.0."), described.get("all"))
            weight = linear(tensors.pop(f"{name}.weight").float())
            packed[name] = HQQLinear(weight, own, compute_dtype=torch.float16, device="cpu")
            state = packed[name].state_dict()
            tensors |= {f"{name}.{part}": tensor for part, tensor in state.items() if tensor is not None}
        # transformers stores each member of its own HqqConfig, which is made on GPUs only.
        quantization = {"quant_config": described.get("all", described), "quant_method": "hqq"}

        def means(name: str, dtype: torch.dtype) -> Tensor:
            module = packed[name]
            wide = {part: module.meta[part].float() for part in ("scale", "zero")}
            meta = module.meta | wide | {"compute_dtype": torch.float32}
            return module.__class__.dequantize(_With(module, meta)).to(dtype)

        save(folder, tensors, quantization | {"skip_modules": ["lm_head"]}, means)

    make("hqq-4-bits", {"all": {"nbits": 4, "group_size": GROUP, "axis": 1}})
    make(
        "hqq-mixed",
        {
            "self_attn.q_proj": {"nbits": 8, "group_size": GROUP, "axis": 0},
            "self_attn.k_proj": {"nbits": 3, "group_size": GROUP, "axis": 1},
            "self_attn.v_proj": {"nbits": 2, "group_size": 16, "axis": 0},
            "self_attn.o_proj": {"nbits": 1, "group_size": GROUP, "axis": 1},
            "mlp.gate_proj": {"nbits": 4, "group_size": GROUP, "axis": 1, "view_as_float": True},
            "mlp.up_proj": {"nbits": 3, "group_size": 64, "axis": 0, "view_as_float": True},
            "mlp.down_proj": {"nbits": 4, "group_size": GROUP, "axis": 0},
        },
    )


class _With:
    """An HQQLinear with other facts, as `dequantize` reads them."""

    def __init__(self, module: Any, meta: dict[str, Any]) -> None:
        self.ready, self.W_q, self.meta = True, module.W_q, meta


def make_torchao() -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        FqnToConfig,
        Int4Tensor,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerAxis,
        PerGroup,
        PerTensor,
    )
    from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

    def make(folder: str, kind: Any) -> None:
        made = HERE / folder / "made"
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
        model.load_state_dict(float_model(torch.bfloat16))
        model.save_pretrained(made)
        model = LlamaForCausalLM.from_pretrained(
            made, dtype="auto", quantization_config=TorchAoConfig(kind, modules_to_not_convert=["lm_head"])
        )
        model.save_pretrained(made)
        tensors, quantization = load_file(made / "model.safetensors"), read_config(made)
        with safe_open(made / "model.safetensors", "pt") as file:
            metadata = file.metadata()
        remove(made)
        weights = {name: module.weight for name, module in model.named_modules() if name in MODULES}
        save_as(folder, tensors, quantization, metadata, lambda name: weights[name].dequantize)

    def save_as(folder: str, tensors: dict[str, Tensor], quantization: Any, metadata: Any, dequantize: Any) -> None:
        save(folder, tensors, quantization, lambda name, dtype: as_dtype(dequantize(name), dtype))
        save_file(tensors, HERE / folder / "model.safetensors", metadata)

    def as_dtype(dequantize: Any, dtype: torch.dtype) -> Tensor:
        weight = dequantize.__self__
        if hasattr(weight, "target_dtype"):  # it has no other type than that of its scales
            return weight.to(dtype).dequantize()
        return dequantize(dtype)

    group = PerGroup(GROUP)
    make("torchao-w8a8", Int8DynamicActivationInt8WeightConfig())
    make("torchao-int4", Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group))
    kinds = {
        "self_attn.q_proj": IntxWeightOnlyConfig(torch.int4, group, MappingType.ASYMMETRIC),
        "self_attn.k_proj": Int8WeightOnlyConfig(),
        "self_attn.v_proj": IntxWeightOnlyConfig(torch.int2, group),
        "self_attn.o_proj": Float8WeightOnlyConfig(),
        "mlp.gate_proj": Float8WeightOnlyConfig(granularity=PerTensor()),
        "mlp.up_proj": IntxWeightOnlyConfig(torch.int8, PerAxis(0)),
    }
    named = {f"model.layers.0.{name}": kind for name, kind in kinds.items()}
    named |= {r"re:model\.layers\..*\.down_proj": IntxWeightOnlyConfig(torch.int8, PerGroup(64)), "lm_head": None}
    make("torchao-mixed", FqnToConfig(named))

    # Int4Tensor is quantised and multiplied on GPUs only: the numbers are made here, and what they mean is what its
    # kernel computes: an integer times a scale, plus the number that is called zero_point.
    tensors = float_model(torch.bfloat16)
    made: dict[str, Int4Tensor] = {}
    for name, (num_outputs, num_inputs) in MODULES.items():
        grouped = tensors[f"{name}.weight"].float().view(num_outputs, -1, GROUP)
        low, high = grouped.amin(2), grouped.amax(2)
        scales = (high - low) / 15
        zeros = low + 8 * scales
        values = torch.round((grouped - low[..., None]) / scales[..., None]).clamp(0, 15).view(num_outputs, -1) - 8
        octets = (values[:, ::2].to(torch.int8) & 15) | (values[:, 1::2].to(torch.int8) << 4)
        by_group = (numbers.t().contiguous().bfloat16() for numbers in (scales, zeros))
        made[name] = Int4Tensor(octets, *by_group, [1, GROUP], torch.Size((num_outputs, num_inputs)))
        tensors[f"{name}.weight"] = made[name]

    def means(name: str) -> Tensor:
        weight = made[name]
        octets = weight.qdata.int()
        values = torch.stack(((octets & 15 ^ 8) - 8, octets >> 4), 2).flatten(1)
        scales, zeros = (part.t().float().repeat_interleave(GROUP, 1) for part in (weight.scale, weight.zero_point))
        return values * scales + zeros

    flat, metadata = flatten_tensor_state_dict(tensors)
    quantization = TorchAoConfig(Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="plain")).to_dict()
    save_as("torchao-int4-plain", flat, quantization, metadata, lambda name: means(name).to)


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    globals()[f"make_{sys.argv[1]}"]()
