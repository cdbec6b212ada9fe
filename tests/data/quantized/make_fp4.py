"""Makes the checkpoints of this folder in fp8 and fp4 as make.py makes the others; see README.md:

python make_fp4.py compressed | modelopt | quark
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from make import CONFIG, HERE, MODULES, float_model, save
from safetensors.torch import load_file
from torch import Tensor

ATTENTION, MLP = "*self_attn*", "*mlp*"


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
    model.load_state_dict(float_model(torch.bfloat16))
    return model


def without_minus_zero(numbers: Tensor) -> Tensor:
    """Libraries make -0 of the number that has the sign and no other bit, we 0."""
    return numbers + 0.0


def parts_of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {part[len(name) + 1 :]: tensor for part, tensor in tensors.items() if part.startswith(f"{name}.")}


def make_compressed() -> None:
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.utils.data import DataLoader
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    def make(folder: str, **groups: QuantizationScheme) -> None:
        with tempfile.TemporaryDirectory() as made:
            llama().save_pretrained(made)
            model = LlamaForCausalLM.from_pretrained(made, dtype="auto")
            # Static scales of activations are written, too; they come from these samples.
            data = [{"input_ids": torch.arange(64)[None], "attention_mask": torch.ones(1, 64, dtype=torch.int64)}]
            recipe = QuantizationModifier(ignore=["lm_head"], config_groups=groups)
            unread = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
            oneshot(model=model, recipe=recipe, dataset=DataLoader(data, batch_size=None), processor=unread)
            model.save_pretrained(made, save_compressed=True)
            tensors = load_file(Path(made, "model.safetensors"))
            quantization = json.loads(Path(made, "config.json").read_text())["quantization_config"]
        schemes = {name: module.quantization_scheme for name, module in model.named_modules() if name in MODULES}

        def means(name: str, dtype: torch.dtype) -> Tensor:
            parts, args = parts_of(name, tensors), schemes[name].weights
            values, scales = parts.get("weight"), parts["weight_scale"].float()
            if values is None:
                packed = parts["weight_packed"]
                values = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
                if packed.shape[1] * 2 == scales.shape[1] * 32:
                    scales = decompress_mx_scale(parts["weight_scale"]).float()
            shared = parts.get("weight_global_scale")
            numbers = dequantize(values, scales, args=args, dtype=torch.float32, global_scale=shared)
            return without_minus_zero(numbers).to(dtype)

        save(folder, tensors, quantization, means)

    make("nvfp4", group_0=preset_name_to_scheme("NVFP4", ["Linear"]))
    make("mxfp4", group_0=preset_name_to_scheme("MXFP4A16", ["Linear"]))
    make(
        "mixed-fp4",
        group_0=preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*"]),
        group_1=preset_name_to_scheme("NVFP4A16", [r"re:.*mlp\.(gate|up)_proj"]),
        group_2=preset_name_to_scheme("MXFP4", ["re:.*down_proj"]),
    )


def make_modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    fp8 = {"num_bits": (4, 3)}
    rows = {"num_bits": (4, 3), "axis": 0}
    nvfp4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}

    def dequantized(name: str, tensors: dict[str, Tensor]) -> Tensor:
        parts, as_fp32 = parts_of(name, tensors), torch.float32
        weight, scale = parts["weight"], parts["weight_scale"]
        if weight.dtype is not torch.uint8:
            scale = scale[:, None] if scale.ndim else scale
            return FP8QTensor(weight.shape, as_fp32, weight).dequantize(as_fp32, scale=scale)
        shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
        if scale.dtype is torch.uint8:
            return MXFP4QTensor(shape, as_fp32, weight).dequantize(as_fp32, scale=scale, block_sizes={-1: 32})
        whole = parts["weight_scale_2"]
        sizes = {"block_sizes": {-1: 16}}
        return NVFP4QTensor(shape, as_fp32, weight).dequantize(as_fp32, scale=scale, double_scale=whole, **sizes)

    def make(folder: str, recipe: dict[str, Any], *, own_file: bool = False) -> None:
        model = llama()
        mtq.quantize(model, recipe, lambda quantised: quantised(torch.arange(64)[None]))
        with tempfile.TemporaryDirectory() as made:
            export_hf_checkpoint(model, export_dir=made)
            tensors = load_file(Path(made, "model.safetensors"))
            quantization = json.loads(Path(made, "config.json").read_text())["quantization_config"]
            described = Path(made, "hf_quant_config.json").read_text()
        save(
            folder, tensors, quantization, lambda name, dtype: without_minus_zero(dequantized(name, tensors)).to(dtype)
        )
        if own_file:  # as early releases describe themselves
            config = json.loads((HERE / folder / "config.json").read_text())
            del config["quantization_config"]
            (HERE / folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            (HERE / folder / "hf_quant_config.json").write_text(described + "\n")

    with_kv = [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    make("modelopt-fp8", {"quant_cfg": with_kv, "algorithm": "max"}, own_file=True)
    make("modelopt-nvfp4", mtq.NVFP4_DEFAULT_CFG)
    make("modelopt-mxfp4", mtq.MXFP4_DEFAULT_CFG)
    quantizers = {"*q_proj": fp8, "*k_proj": fp8, "*v_proj": fp8, "*o_proj": rows, MLP: nvfp4}
    mixed = [{"quantizer_name": f"{names}*weight_quantizer", "cfg": how} for names, how in quantizers.items()]
    inputs = {"*self_attn*": fp8, MLP: nvfp4}
    mixed += [{"quantizer_name": f"{names}*input_quantizer", "cfg": how} for names, how in inputs.items()]
    make("modelopt-mixed", {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *mixed], "algorithm": "max"})


def make_quark() -> None:
    from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
    from quark.torch.quantization.config.config import (
        FP8E4M3PerChannelSpec,
        FP8E4M3PerTensorSpec,
        Int8PerChannelSpec,
        OCP_MXFP4Spec,
        QConfig,
        QLayerConfig,
    )

    def make(folder: str, config: QConfig) -> None:
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(llama(), [torch.arange(64)[None]]))
        with tempfile.TemporaryDirectory() as made:
            export_safetensors(model, made)
            tensors = load_file(Path(made, "model.safetensors"))
            quantization = json.loads(Path(made, "config.json").read_text())["quantization_config"]
            read = import_model_from_safetensors(llama(), made)
        modules = {name: module for name, module in read.named_modules() if name in MODULES}

        def means(name: str, dtype: torch.dtype) -> Tensor:
            quantizer = modules[name].weight_quantizer
            if quantizer.scale.is_floating_point():
                quantizer.scale.data = quantizer.scale.data.float()
            quantizer.float_dtype = torch.float32
            return without_minus_zero(quantizer(modules[name].weight.data)).to(dtype)

        save(folder, tensors, quantization, means)

    fp8 = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
    rows = FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec()
    of_rows = FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True).to_quantization_spec()
    int8 = Int8PerChannelSpec(
        symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
    ).to_quantization_spec()
    weights = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    inputs = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec()
    mxfp4 = QLayerConfig(weight=weights, input_tensors=inputs)
    make("quark-fp8", QConfig(QLayerConfig(weight=fp8, input_tensors=fp8), exclude=["lm_head"]))
    make("quark-mxfp4", QConfig(mxfp4, exclude=["lm_head"]))
    own = {
        ATTENTION: QLayerConfig(weight=rows, input_tensors=of_rows),
        "*down_proj": QLayerConfig(weight=int8),
    }
    make("quark-mixed", QConfig(mxfp4, layer_quant_config=own, exclude=["lm_head"]))


if __name__ == "__main__":
    globals()[f"make_{sys.argv[1]}"]()
