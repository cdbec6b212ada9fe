"""The model families, one row each. To add one, see "A model family" in CONTRIBUTING.md."""

from collections.abc import Mapping

from engine.models.families.baichuan import baichuan
from engine.models.families.bloom import bloom
from engine.models.families.chatglm import chatglm, glm, glm4
from engine.models.families.falcon import falcon
from engine.models.families.family import Family
from engine.models.families.gemma import gemma, gemma2, gemma3
from engine.models.families.gpt2 import gpt2, gpt_bigcode
from engine.models.families.gpt_neox import gpt_neox
from engine.models.families.gptj import gptj
from engine.models.families.granite import granite
from engine.models.families.internlm import internlm, internlm2, internlm3
from engine.models.families.llama import llama, mistral, qwen2, qwen3
from engine.models.families.mixtures import deepseek, mixtral, qwen2_moe, qwen3_moe
from engine.models.families.opt import opt
from engine.models.families.phi import phi, phi3
from engine.models.families.stablelm import stablelm
from engine.models.families.starcoder2 import starcoder2

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("Llama 1 to 3", llama),
    "MistralForCausalLM": Family("Mistral", mistral),
    "MixtralForCausalLM": Family("Mixtral", mixtral),
    "Qwen2ForCausalLM": Family("Qwen 1.5, 2, 2.5", qwen2),
    "Qwen2MoeForCausalLM": Family("Qwen 1.5 MoE, 2 MoE", qwen2_moe),
    "Qwen3ForCausalLM": Family("Qwen 3", qwen3),
    "Qwen3MoeForCausalLM": Family("Qwen 3 MoE", qwen3_moe),
    "GPT2LMHeadModel": Family("GPT-2", gpt2),
    "GPTBigCodeForCausalLM": Family("StarCoder, SantaCoder", gpt_bigcode),
    "Starcoder2ForCausalLM": Family("StarCoder 2", starcoder2),
    "GPTJForCausalLM": Family("GPT-J", gptj),
    "GPTNeoXForCausalLM": Family("GPT-NeoX, Pythia", gpt_neox),
    "OPTForCausalLM": Family("OPT", opt),
    "BloomForCausalLM": Family("BLOOM", bloom),
    "FalconForCausalLM": Family("Falcon", falcon),
    "PhiForCausalLM": Family("Phi 1, 1.5, 2", phi),
    "Phi3ForCausalLM": Family("Phi 3, 3.5, 4", phi3),
    "GemmaForCausalLM": Family("Gemma", gemma),
    "Gemma2ForCausalLM": Family("Gemma 2", gemma2),
    "Gemma3ForCausalLM": Family("Gemma 3, text", gemma3),
    "GraniteForCausalLM": Family("Granite 3", granite),
    "StableLmForCausalLM": Family("StableLM", stablelm),
    "InternLMForCausalLM": Family("InternLM", internlm),
    "InternLM2ForCausalLM": Family("InternLM 2, 2.5", internlm2),
    "InternLM3ForCausalLM": Family("InternLM 3", internlm3),
    "BaichuanForCausalLM": Family("Baichuan 13B, 2", baichuan),
    "BaiChuanForCausalLM": Family("Baichuan 7B", baichuan),
    "ChatGLMModel": Family("ChatGLM 2, 3, GLM-4", chatglm),
    "ChatGLMForConditionalGeneration": Family("ChatGLM 2, 3, GLM-4", chatglm),
    "GlmForCausalLM": Family("GLM-4, GLM-Edge", glm),
    "Glm4ForCausalLM": Family("GLM-4 0414, GLM-Z1", glm4),
    "DeepseekForCausalLM": Family("DeepSeek-MoE 16B", deepseek),
}
"""Families by the names in `architectures` of config.json."""
