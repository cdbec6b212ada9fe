"""Reads a checkpoint's config.json: first the keys that families share, then the differences of the model's family.

Decoder-only models have a ModelConfig, encoder-decoder models an EncoderDecoderConfig. FAMILIES is the table of the
decoder-only models; to add one, see "A model family" in CONTRIBUTING.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpoint.config_json import RawConfig, read_config, texts, with_usual_activations
from checkpoint.multimodal import WRAPPERS
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from engine.models.encoder_decoder.config import ARCHITECTURES, AnyConfig, EncoderDecoderConfig, parse_encoder_decoder
from engine.models.experts_config import check_experts
from engine.models.families.bailing import bailing_moe
from engine.models.families.bloom import bloom, mpt
from engine.models.families.chatglm import chatglm, glm, glm4
from engine.models.families.cohere import cohere, cohere2, cohere2_moe
from engine.models.families.deepseek import deepseek_v2, deepseek_v3, glm4_moe_lite, minicpm3, mistral4, youtu
from engine.models.families.dense import (
    apertus,
    arcee,
    cwm,
    ernie4_5,
    exaone,
    helium,
    hunyuan,
    jais2,
    minicpm,
    ministral3,
    nanochat,
    nemotron,
    orion,
    seed_oss,
    smollm3,
)
from engine.models.families.falcon import falcon
from engine.models.families.gemma import gemma, gemma2, gemma3, vault_gemma
from engine.models.families.gemma3n import gemma3n
from engine.models.families.gemma4 import gemma4, gemma4_unified
from engine.models.families.gpt2 import gpt2, gpt_bigcode, gpt_neo
from engine.models.families.gpt_neox import codegen, gpt_neox, gptj
from engine.models.families.gpt_oss import gpt_oss
from engine.models.families.granite import granite, granite_swa, hyperclovax
from engine.models.families.jamba import jamba
from engine.models.families.lfm2 import lfm2, lfm2_moe, lfm3
from engine.models.families.llama import (
    baichuan,
    bitnet,
    internlm,
    internlm2,
    internlm3,
    llama,
    mistral,
    qwen2,
    qwen3,
    stablelm,
    starcoder2,
)
from engine.models.families.llama4 import llama4
from engine.models.families.mamba import falcon_mamba, mamba
from engine.models.families.mamba_hybrid import bamba, falcon_h1, granite_moe_hybrid, mamba2, nemotron_h
from engine.models.families.mixtures import (
    deepseek,
    granite_moe,
    granite_moe_swa,
    mellum,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_vl_moe,
)
from engine.models.families.olmo import exaone4, olmo, olmo2, olmo3
from engine.models.families.opt import opt
from engine.models.families.phi import phi, phi3
from engine.models.families.qwen_hybrid import qwen3_5, qwen3_5_moe, qwen3_next
from engine.models.families.routed import (
    dots1,
    ernie4_5_moe,
    flex_olmo,
    glm4_moe,
    hunyuan_moe,
    minimax_m2,
    olmoe,
    phimoe,
    solar_open,
)
from engine.models.families.sigmoid_mixtures import afmoe, exaone_moe, hunyuan3, kolibri1
from engine.models.model_config import ModelConfig, RopeConfig, plain_config
from mesh.domain.errors import ConfigurationError

Facts = Callable[[ModelConfig, RawConfig], ModelConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """`facts(plain, raw)` returns the family's ModelConfig, usually by `dataclasses.replace`.

    `plain` is the plain decoder with this checkpoint's sizes, `raw` its config.json. It raises ConfigurationError for
    variants that are not supported. `unsaid`: members that config.json may leave out, with the values that transformers
    takes, where these are not those of `plain_config`.
    """

    title: str
    facts: Facts
    unsaid: RawConfig = field(default_factory=dict)


_NO_ATTENTION = {"num_attention_heads": 1, "layer_norm_epsilon": 1e-5}
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("Llama 1 to 3", llama),
    "BitNetForCausalLM": Family(
        "BitNet b1.58", bitnet, {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 5e5}
    ),
    "Llama4ForCausalLM": Family("Llama 4, text", llama4),
    "MistralForCausalLM": Family("Mistral", mistral),
    "MinistralForCausalLM": Family("Ministral 8B", mistral),
    "MixtralForCausalLM": Family("Mixtral", mixtral, {"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "Qwen2ForCausalLM": Family("Qwen 1.5, 2, 2.5", qwen2),
    "MiMoForCausalLM": Family("MiMo 7B", qwen2),
    "Qwen2MoeForCausalLM": Family("Qwen 1.5 MoE, 2 MoE", qwen2_moe),
    "Qwen3ForCausalLM": Family("Qwen 3", qwen3),
    "Qwen3MoeForCausalLM": Family("Qwen 3 MoE", qwen3_moe),
    "Qwen3VLMoeForConditionalGeneration": Family("Qwen 3 VL MoE, text", qwen3_vl_moe),
    "GPT2LMHeadModel": Family("GPT-2", gpt2, {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}),
    "GPTBigCodeForCausalLM": Family(
        "StarCoder, SantaCoder", gpt_bigcode, {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_pytorch_tanh"}
    ),
    "Starcoder2ForCausalLM": Family(
        "StarCoder 2", starcoder2, {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "GPTJForCausalLM": Family("GPT-J", gptj, {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}),
    "GPTNeoForCausalLM": Family(
        "GPT-Neo, TinyStories", gpt_neo, {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    ),
    "CodeGenForCausalLM": Family("CodeGen", codegen, {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}),
    "GPTNeoXForCausalLM": Family("GPT-NeoX, Pythia", gpt_neox, {"layer_norm_eps": 1e-5}),
    "OPTForCausalLM": Family("OPT", opt),
    "BloomForCausalLM": Family("BLOOM", bloom, {"layer_norm_epsilon": 1e-5}),
    "MptForCausalLM": Family("MPT", mpt),
    "MPTForCausalLM": Family("MPT", mpt),
    "FalconForCausalLM": Family("Falcon", falcon, {"layer_norm_epsilon": 1e-5}),
    "PhiForCausalLM": Family("Phi 1, 1.5, 2", phi, {"layer_norm_eps": 1e-5}),
    "Phi3ForCausalLM": Family("Phi 3, 3.5, 4", phi3, {"rms_norm_eps": 1e-5}),
    "GemmaForCausalLM": Family("Gemma", gemma),
    "Gemma2ForCausalLM": Family("Gemma 2", gemma2),
    "VaultGemmaForCausalLM": Family("VaultGemma", vault_gemma),
    "Gemma3ForCausalLM": Family("Gemma 3, text", gemma3),
    "Gemma3nForCausalLM": Family("Gemma 3n, text", gemma3n),
    "Gemma4ForCausalLM": Family("Gemma 4, text", gemma4),
    "Gemma4UnifiedForCausalLM": Family("Gemma 4 12B, text", gemma4_unified),
    "GraniteForCausalLM": Family("Granite 3", granite),
    "GraniteSWAForCausalLM": Family("Granite Swash", granite_swa, {"rms_norm_eps": 1e-5}),
    "HyperCLOVAXForCausalLM": Family("HyperCLOVA X SEED Think", hyperclovax),
    "StableLmForCausalLM": Family("StableLM", stablelm, {"layer_norm_eps": 1e-5}),
    "InternLMForCausalLM": Family("InternLM", internlm),
    "InternLM2ForCausalLM": Family("InternLM 2, 2.5", internlm2),
    "InternLM3ForCausalLM": Family("InternLM 3", internlm3),
    "BaichuanForCausalLM": Family("Baichuan 13B, 2", baichuan),
    "BaiChuanForCausalLM": Family("Baichuan 7B", baichuan),
    "ChatGLMModel": Family("ChatGLM 2, 3, GLM-4", chatglm),
    "ChatGLMForConditionalGeneration": Family("ChatGLM 2, 3, GLM-4", chatglm),
    "GlmForCausalLM": Family("GLM-4, GLM-Edge", glm, {"rms_norm_eps": 1.5625e-07}),
    "Glm4ForCausalLM": Family("GLM-4 0414, GLM-Z1", glm4, {"rms_norm_eps": 1.5625e-07}),
    "DeepseekForCausalLM": Family("DeepSeek-MoE 16B", deepseek),
    "GptOssForCausalLM": Family("gpt-oss", gpt_oss, {"rms_norm_eps": 1e-5}),
    "DeepseekV2ForCausalLM": Family("DeepSeek V2, Coder V2", deepseek_v2),
    "DeepseekV3ForCausalLM": Family("DeepSeek V3, R1, Moonlight, Kimi K2", deepseek_v3),
    "YoutuForCausalLM": Family("Youtu-LLM", youtu),
    "MiniCPMForCausalLM": Family("MiniCPM 1, 2, 4", minicpm),
    "MiniCPM3ForCausalLM": Family("MiniCPM 3", minicpm3, {"rms_norm_eps": 1e-5}),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7-Flash", glm4_moe_lite),
    "Lfm2ForCausalLM": Family("LFM2", lfm2),
    "Lfm2MoeForCausalLM": Family("LFM2 MoE", lfm2_moe),
    "Lfm3ForCausalLM": Family("LFM3", lfm3),
    "JambaForCausalLM": Family("Jamba", jamba),
    "MambaForCausalLM": Family("Mamba", mamba, _NO_ATTENTION),
    "FalconMambaForCausalLM": Family("Falcon Mamba", falcon_mamba, {**_NO_ATTENTION, "max_position_embeddings": 8192}),
    "Mamba2ForCausalLM": Family("Mamba 2", mamba2, {**_NO_ATTENTION, "max_position_embeddings": 8192}),
    "GraniteMoeHybridForCausalLM": Family("Granite 4", granite_moe_hybrid),
    "NemotronHForCausalLM": Family("Nemotron-H, Nano 2, 3 Nano", nemotron_h),
    "FalconH1ForCausalLM": Family("Falcon-H1", falcon_h1),
    "BambaForCausalLM": Family("Bamba", bamba),
    "Qwen3_5ForCausalLM": Family("Qwen 3.5", qwen3_5),
    "Qwen3_5MoeForCausalLM": Family("Qwen 3.5 MoE", qwen3_5_moe),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", qwen3_next),
    "SmolLM3ForCausalLM": Family("SmolLM 3", smollm3),
    "OlmoForCausalLM": Family("OLMo", olmo),
    "Olmo2ForCausalLM": Family("OLMo 2", olmo2),
    "Olmo3ForCausalLM": Family("OLMo 3", olmo3),
    "CohereForCausalLM": Family("Command R, R+, Aya", cohere),
    "Cohere2ForCausalLM": Family("Command R7B, Command A", cohere2),
    "CwmForCausalLM": Family("Code World Model", cwm, {"rms_norm_eps": 1e-5}),
    "SeedOssForCausalLM": Family("Seed-OSS", seed_oss),
    "Ernie4_5ForCausalLM": Family("ERNIE 4.5 0.3B", ernie4_5),
    "ExaoneForCausalLM": Family("EXAONE 3, 3.5, Deep", exaone, {"layer_norm_epsilon": 1e-5}),
    "Exaone4ForCausalLM": Family("EXAONE 4", exaone4),
    "OrionForCausalLM": Family("Orion 14B", orion, {"rms_norm_eps": 1e-5}),
    "HunYuanDenseV1ForCausalLM": Family("HunYuan dense", hunyuan),
    "Ministral3ForCausalLM": Family("Ministral 3, Devstral 2", ministral3),
    "ArceeForCausalLM": Family("Arcee AFM", arcee),
    "NemotronForCausalLM": Family("Nemotron 4, Minitron", nemotron),
    "ApertusForCausalLM": Family("Apertus", apertus),
    "HeliumForCausalLM": Family("Helium", helium),
    "Jais2ForCausalLM": Family("Jais 2", jais2),
    "NanoChatForCausalLM": Family("nanochat", nanochat),
    "Glm4MoeForCausalLM": Family("GLM-4.5 to 4.7", glm4_moe, {"rms_norm_eps": 1e-5}),
    "BailingMoeForCausalLM": Family("Ling-lite, Ling-plus", bailing_moe),
    "BailingMoeV2ForCausalLM": Family("Ling 2.0, Ring 2.0", bailing_moe),
    "OlmoeForCausalLM": Family("OLMoE", olmoe, {"rms_norm_eps": 1e-5}),
    "FlexOlmoForCausalLM": Family("FlexOlmo", flex_olmo, {"rms_norm_eps": 1e-6}),
    "Ernie4_5_MoeForCausalLM": Family("ERNIE 4.5 MoE", ernie4_5_moe),
    "GraniteMoeForCausalLM": Family("Granite 3 MoE", granite_moe),
    "GraniteMoeSharedForCausalLM": Family("Granite 3.1 MoE", granite_moe),
    "Dots1ForCausalLM": Family("dots.llm1", dots1),
    "HunYuanMoEV1ForCausalLM": Family("Hunyuan A13B", hunyuan_moe),
    "MiniMaxM2ForCausalLM": Family("MiniMax M2", minimax_m2),
    "PhimoeForCausalLM": Family("Phi 3.5 MoE", phimoe, {"rms_norm_eps": 1e-5}),
    "PhiMoEForCausalLM": Family("Phi 3.5 MoE", phimoe, {"rms_norm_eps": 1e-5}),
    "SolarOpenForCausalLM": Family("Solar Open", solar_open),
    "ExaoneMoeForCausalLM": Family("K-EXAONE", exaone_moe),
    "MellumForCausalLM": Family("Mellum 2", mellum),
    "HYV3ForCausalLM": Family("Hunyuan 3", hunyuan3, {"rms_norm_eps": 1e-5}),
    "AfmoeForCausalLM": Family("Trinity", afmoe, {"rms_norm_eps": 1e-5}),
    "GraniteMoeSWAForCausalLM": Family("Granite Swash MoE", granite_moe_swa),
    "Cohere2MoeForCausalLM": Family("Command A+", cohere2_moe),
    "Kolibri1ForCausalLM": Family("Kolibri 1", kolibri1),
    "Mistral4ForCausalLM": Family("Mistral Small 4", mistral4),
}
"""Families by the names in `architectures` of config.json."""


SUPPORTED_ACTIVATIONS = (
    *("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "xielu", "clamped_swiglu"),
)
"""The keys of `engine.models.activations.ACTIVATIONS`, for programs that read a config.json without torch."""


_MOST_ROWS = 2**24


def load_config(model_dir: Path, rope: RopeOverride = NO_ROPE_OVERRIDE) -> AnyConfig:
    """Read `config.json` of a Hugging Face checkpoint. `rope` overrides its rotary positions.

    Raises ConfigurationError if the file is absent, a member has a wrong type, or the model is not supported.
    """
    path = Path(model_dir) / "config.json"
    raw = read_config(path.parent)
    try:
        return _parse(rope.apply(raw), rope)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}: a member has a wrong type or value: {error!r}") from error


def _parse(raw: RawConfig, rope: RopeOverride) -> AnyConfig:
    for architecture in texts(raw, "architectures"):
        if architecture in ARCHITECTURES:
            _require_rotary(rope, architecture, has_rotary=False)
            return parse_encoder_decoder(raw, architecture)
    name, family = _family_of(raw)
    raw = with_usual_activations(raw)
    raw = {**raw, **{key: value for key, value in family.unsaid.items() if raw.get(key) is None}}
    config = family.facts(plain_config(raw, name), raw)
    if config.per_layer is None and isinstance(raw.get("intermediate_size"), list):
        raise ConfigurationError("config.json: intermediate_size must be a positive integer, not a list")
    has_rotary = config.positions == "rotary" and len(config.unrotated) < config.num_layers
    _require_rotary(rope, name, has_rotary=has_rotary)
    if rope.base:
        config = replace(config, rope=replace(config.rope, theta=rope.base))
    if rope.scaling:
        config = replace(config, counts_scaled_positions=False)
    _check(config)
    return config


def _require_rotary(rope: RopeOverride, architecture: str, *, has_rotary: bool) -> None:
    if rope and not has_rotary:
        raise ConfigurationError(f"{architecture} has no rotary positions that rope_scaling or rope_theta could change")


def load_decoder_config(model_dir: Path) -> ModelConfig:
    """`load_config` for decoder-only models; raises ConfigurationError for encoder-decoder models."""
    config = load_config(model_dir)
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(f"{model_dir}: this is for decoder-only models, not for {config.architecture}")
    return config


def _family_of(raw: RawConfig) -> tuple[str, Family]:
    names = texts(raw, "architectures")
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    supported = ", ".join(dict.fromkeys((*FAMILIES, *ARCHITECTURES, *WRAPPERS)))
    raise ConfigurationError(
        f"architecture {', '.join(names) or '(none given)'} is not supported; supported: {supported}"
    )


def _check(config: ModelConfig) -> None:
    _check_sizes(config)
    if config.activation not in SUPPORTED_ACTIVATIONS:
        raise ConfigurationError(
            f"activation {config.activation!r} is not supported; supported: {', '.join(SUPPORTED_ACTIVATIONS)}"
        )
    if config.activation == "xielu" and config.experts is not None:
        raise ConfigurationError("activation 'xielu' of experts is not supported")
    if config.num_heads % config.num_kv_heads:
        raise ConfigurationError(
            f"num_attention_heads ({config.num_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.positions == "rotary":
        for rope in (config.rope, *([] if config.window_rope is None else [config.window_rope])):
            _check_rope(rope, config.head_dim if config.per_layer is None else rope.dim)
    if config.experts is not None:
        check_experts(config.experts)
    if config.recurrent is not None:
        if len(config.recurrent.layers) != config.num_layers:
            raise ConfigurationError(
                f"layer_types has {len(config.recurrent.layers)} entries for {config.num_layers} layers"
            )
        if not any(config.recurrent.layers):
            raise ConfigurationError(f"{config.architecture} without any recurrent layer is not supported")
        has_attention = any(map(config.recurrent.has_attention, range(config.num_layers)))
        is_recurrence_alone = config.block == "single" and all(config.recurrent.layers)
        if not has_attention and not is_recurrence_alone:
            raise ConfigurationError("a model without any layer of attention is not supported")
    if len(config.windows) != config.num_layers:
        raise ConfigurationError(f"layer_types has {len(config.windows)} entries for {config.num_layers} layers")


def _check_sizes(config: ModelConfig) -> None:
    """Raise ConfigurationError for sizes of no model: rows are numbered in memory before any tensor is looked for."""
    layers = (
        (config.of_layer(layer) for layer in range(config.num_layers)) if config.per_layer is not None else (config,)
    )
    for sizes in layers:
        latent, recurrent = sizes.latent, sizes.recurrent
        counts = {
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_attention_heads times head_dim": sizes.num_heads * max(sizes.head_dim, sizes.result_dim),
            "num_attention_heads times qk_nope_head_dim": 0 if latent is None else sizes.num_heads * latent.plain_dim,
            "heads of recurrent layers times their dimensions": 0 if recurrent is None else recurrent.projected,
            "kernel of recurrent layers": 0 if recurrent is None else recurrent.kernel,
            "max_position_embeddings": sizes.max_position_embeddings if sizes.positions == "learned" else 0,
        }
        for name, count in counts.items():
            if count > _MOST_ROWS:
                raise ConfigurationError(
                    f"config.json: {name} is {count}, more than the {_MOST_ROWS} rows that a matrix may have: the file "
                    "is broken"
                )


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if head_dim % 2 or rope.dim % 2:
        raise ConfigurationError(
            f"head_dim must be even for rotary positions, got {head_dim}, of which {rope.dim} are rotated"
        )
    if not 0 < rope.dim <= head_dim:
        raise ConfigurationError(f"config.json implies that {rope.dim} of {head_dim} dimensions of a head are rotated")
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.kind == "longrope" and len(factors) != rope.dim // 2:
            raise ConfigurationError(
                f"config.json: {name} must have {rope.dim // 2} numbers, one for each pair of rotated dimensions, "
                f"got {len(factors)}"
            )
    if rope.kind == "longrope" and rope.original_positions < 2:
        raise ConfigurationError(
            f"config.json: original_max_position_embeddings must be above 1, got {rope.original_positions}"
        )
    if rope.kind == "yarn" and rope.theta <= 1:
        raise ConfigurationError(f"config.json: rope_theta of YaRN must be above 1, got {rope.theta:g}")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigurationError(
            f"config.json: high_freq_factor ({rope.high_freq_factor:g}) must be above low_freq_factor "
            f"({rope.low_freq_factor:g})"
        )
