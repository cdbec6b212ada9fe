"""The model families, one row each. To add one, see "A model family" in CONTRIBUTING.md."""

from collections.abc import Mapping

from engine.models.families.family import Family
from engine.models.families.gpt2 import gpt2
from engine.models.families.gpt_neox import gpt_neox
from engine.models.families.llama import llama, mistral, qwen2, qwen3

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("Llama 1 to 3", llama),
    "MistralForCausalLM": Family("Mistral", mistral),
    "Qwen2ForCausalLM": Family("Qwen 1.5, 2, 2.5", qwen2),
    "Qwen3ForCausalLM": Family("Qwen 3", qwen3),
    "GPT2LMHeadModel": Family("GPT-2", gpt2),
    "GPTNeoXForCausalLM": Family("GPT-NeoX, Pythia", gpt_neox),
}
"""By what config.json calls `architectures`."""
