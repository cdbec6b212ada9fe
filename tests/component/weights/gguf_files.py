"""Writes checkpoints as GGUF, as llama.cpp's own converter does: names by the package's table, order of rows, norms."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.models.experts_config import ExpertsConfig
from engine.models.model_config import ModelConfig
from engine.models.read_config import load_decoder_config

Numbers = np.ndarray[Any, np.dtype[np.float32]]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "GraniteForCausalLM": "granite",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "PhiForCausalLM": "phi2",
    "Phi3ForCausalLM": "phi3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "GPTBigCodeForCausalLM": "starcoder",
    "GPT2LMHeadModel": "gpt2",
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "GPTNeoXForCausalLM": "gptneox",
    "SmolLM3ForCausalLM": "smollm3",
    "MiniCPMForCausalLM": "minicpm",
    "ArceeForCausalLM": "arcee",
    "Jais2ForCausalLM": "jais2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "SeedOssForCausalLM": "seed_oss",
    "Glm4ForCausalLM": "glm4",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "Olmo2ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Glm4MoeForCausalLM": "glm4moe",
    "Dots1ForCausalLM": "dots1",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "OlmoeForCausalLM": "olmoe",
}
_NEIGHBOURS = ("llama", "granite", "smollm3", "minicpm", "arcee")
"""Architectures of llama.cpp that rotate neighbours."""
_UNGROUPED = ("bloom", "falcon", "gptneox")
"""Architectures whose fused projections llama.cpp has in another order than Hugging Face."""


def write_gguf(
    model_dir: Path, path: Path, kind: str = "F32", words: str = "gpt-2", *, is_from_2023: bool = False
) -> Path:
    """Write the checkpoint with its matrices of type `kind`; returns `path`. `words`: how it cuts them. In files
    `is_from_2023` each expert has its own tensors, and the output matrix is always there.
    """
    raw, config = json.loads((model_dir / "config.json").read_text()), load_decoder_config(model_dir)
    architecture = ARCHITECTURES[raw["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    weights = _weights(model_dir)
    _describe(writer, raw, config, behind=sum(name.endswith("eh_proj.weight") for name in weights))
    _write_vocabulary(writer, model_dir, words)
    tensors = _as_llama_cpp(weights, architecture, config, is_from_2023=is_from_2023)
    _finish(writer, model_dir, config, tensors, kind)
    return path


def _finish(
    writer: gguf.GGUFWriter, model_dir: Path, config: ModelConfig, tensors: Mapping[str, Numbers], kind: str
) -> None:
    """Write the tensors, and close the file."""
    raw = json.loads((model_dir / "config.json").read_text())
    for name, numbers in tensors.items():
        quantised = gguf.GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(numbers, quantised), raw_dtype=quantised)
    for name, factors in _rope_factors(raw, config).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(model_dir: Path) -> dict[str, Numbers]:
    return {name: tensor.float().numpy() for name, tensor in load_file(model_dir / "model.safetensors").items()}


def write_sentencepiece(model_dir: Path, path: Path) -> Path:
    """Write the checkpoint, whose vocabulary is a model of sentencepiece; returns `path`."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(model_dir / "tokenizer.model"))
    ids = range(model.vocab_size())
    writer = gguf.GGUFWriter(path, "llama")
    raw, config = json.loads((model_dir / "config.json").read_text()), load_decoder_config(model_dir)
    _describe(writer, raw, config)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(id_) for id_ in ids])
    writer.add_token_scores([model.get_score(id_) for id_ in ids])
    writer.add_token_types([_kind(model, id_) for id_ in ids])
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    _finish(writer, model_dir, config, _as_llama_cpp(_weights(model_dir), "llama", config), "F32")
    return path


def _kind(model: Any, id_: int) -> gguf.TokenType:
    if model.is_byte(id_):
        return gguf.TokenType.BYTE
    if model.is_unknown(id_):
        return gguf.TokenType.UNKNOWN
    return gguf.TokenType.CONTROL if model.is_control(id_) else gguf.TokenType.NORMAL


def _describe(writer: gguf.GGUFWriter, raw: Mapping[str, Any], config: ModelConfig, behind: int = 0) -> None:
    """`behind`: layers of multi-token prediction."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers + behind)
    if behind:
        writer.add_nextn_predict_layers(behind)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    if config.recurrent is None:
        writer.add_head_count_kv(config.num_kv_heads)
    else:
        writer.add_head_count_kv([0 if is_conv else config.num_kv_heads for is_conv in config.recurrent.layers])
        writer.add_shortconv_l_cache(config.recurrent.kernel)
    if raw.get("head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.positions == "rotary" and writer.arch != "falcon":
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_rope_dimension_count(config.rope.dim)
    writer.add_vocab_size(raw["vocab_size"])
    if writer.arch == "gptneox":
        writer.add_parallel_residual(config.block == "parallel")
    if writer.arch == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    if writer.arch == "minicpm":
        writer.add_embedding_scale(config.embed_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(1.0 / config.logit_scale)
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if (scaled := rope.get("rope_type")) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaled))
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings", raw.get("original_max_position_embeddings")):
        writer.add_rope_scaling_orig_ctx_len(original)
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    if config.experts:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.top_k)
        if writer.arch not in ("llama", "olmoe"):
            writer.add_expert_feed_forward_length(config.experts.intermediate_size)
        if config.experts.shared_size:
            num_shared = config.experts.shared_size // config.experts.intermediate_size
            size = config.experts.shared_size // (num_shared if writer.arch == "bailingmoe2" else 1)
            writer.add_expert_shared_feed_forward_length(size)
            writer.add_expert_shared_count(num_shared)
        if config.experts.choice_bias:
            _describe_choice(writer, config.experts)
    if raw.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
    if raw.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])


def _describe_choice(writer: gguf.GGUFWriter, experts: ExpertsConfig) -> None:
    """Of experts that are chosen with a bias."""
    kinds = {"softmax": gguf.ExpertGatingFuncType.SOFTMAX, "sigmoid": gguf.ExpertGatingFuncType.SIGMOID}
    writer.add_expert_gating_func(kinds[experts.scoring])
    writer.add_leading_dense_block_count(experts.layers.index(True))
    writer.add_expert_weights_norm(experts.normalised)
    writer.add_expert_weights_scale(experts.routed_scale)
    if experts.num_groups > 1:
        writer.add_expert_group_count(experts.num_groups)
        writer.add_expert_group_used_count(experts.top_groups)
    if writer.arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(1)


def _write_vocabulary(writer: gguf.GGUFWriter, model_dir: Path, words: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    described = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder()
    size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    tokens = [tokenizer.id_to_token(id_) or f"[PAD{id_}]" for id_ in range(size)]
    unused = [gguf.TokenType.UNUSED if tokenizer.id_to_token(i) is None else gguf.TokenType.NORMAL for i in range(size)]
    kinds = [
        (gguf.TokenType.CONTROL if added[id_].special else gguf.TokenType.USER_DEFINED) if id_ in added else unused[id_]
        for id_ in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = described["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id(settings["bos_token"]))
    writer.add_eos_token_id(tokenizer.token_to_id(settings["eos_token"]))
    writer.add_pad_token_id(tokenizer.token_to_id(settings["pad_token"]))
    writer.add_chat_template(settings["chat_template"])


def _as_llama_cpp(
    tensors: Mapping[str, Numbers], architecture: str, config: ModelConfig, *, is_from_2023: bool = False
) -> dict[str, Numbers]:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_layers + 1)
    found: dict[str, Numbers] = {}
    experts: dict[str, dict[int, Numbers]] = {}
    for name, numbers in tensors.items():
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = numbers
            continue
        if architecture in _NEIGHBOURS and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            numbers = _neighbours(numbers, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if architecture in _UNGROUPED and "query_key_value" in name:
            numbers = _ungrouped(numbers, config)
        if architecture == "gpt2" and ".h." in name and name.endswith(".weight") and numbers.ndim == 2:
            numbers = np.ascontiguousarray(numbers.T)
        name = name.removeprefix("transformer.") if architecture == "bloom" else name
        numbers = numbers.squeeze(1) if numbers.ndim > 2 else numbers  # convolutions
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + 1
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = numbers.ravel()
            continue
        found[_named(table, name)] = numbers
    for name, matrices in experts.items():
        of_experts = _named(table, name)
        if is_from_2023:
            found |= {of_experts.replace("_exps", f".{number}"): matrix for number, matrix in matrices.items()}
        else:
            found[of_experts] = np.stack([matrices[number] for number in range(len(matrices))])
    if is_from_2023:
        found.setdefault("output.weight", found["token_embd.weight"])
    return found


def _named(table: gguf.TensorNameMap, name: str) -> str:
    """The table has w1 to w3 of experts without "model."."""
    suffixes = (".weight", ".bias")
    found = table.get_name(name, suffixes) or table.get_name(name.removeprefix("model."), suffixes)
    assert found is not None, name
    return str(found)


def _ungrouped(numbers: Numbers, config: ModelConfig) -> Numbers:
    groups = numbers.reshape(config.num_kv_heads, config.queries_per_kv_head + 2, config.head_dim, *numbers.shape[1:])
    return np.concatenate([groups[:, part].reshape(-1, *numbers.shape[1:]) for part in (slice(-2), -2, -1)])


def _neighbours(numbers: Numbers, heads: int) -> Numbers:
    halves = numbers.reshape(heads, 2, len(numbers) // heads // 2, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))


def _rope_factors(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, Numbers]:
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        named = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {name: np.array(rope[key], np.float32) for name, key in named.items()}
    if rope.get("rope_type") == "llama3":
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**raw), None)
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        return {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}
    return {}
