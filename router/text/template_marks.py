"""Finds out from the strings in a chat template how its model writes calls, and where it reasons."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

# Llama 3.2's small models have templates without a mark in front of calls.
_LLAMA_32 = ('"parameters": ', "ipython")
# LFM2's templates show calls of earlier turns as text only.
_LFM = ("<|tool_list_start|>", "<|tool_call_start|>", "List of tools: [")
TOOLS_IN_SYSTEM = "'<|tool|>' + message['tools']"
"""Phi-4-mini's template takes tools as JSON text in the system message."""
# Recognised by strings in the templates of each format's models. The first that fits counts.
TOOL_CALLS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "qwen3_coder": lambda source: "<tool_call>" in source and "<function=" in source,
        "glm45": lambda source: "<tool_call>" in source and "<arg_key>" in source,
        "hermes": lambda source: "<tool_call>" in source,
        "deepseek_v3": lambda source: "<｜tool▁call▁begin｜>" in source,
        "kimi_k2": lambda source: "<|tool_calls_section_begin|>" in source,
        "minimax_m2": lambda source: "<minimax:tool_call>" in source,
        "seed_oss": lambda source: "<seed:tool_call>" in source,
        "cohere_command3": lambda source: "<|START_ACTION|>" in source,
        "apertus": lambda source: "<|tools_prefix|>" in source,
        "olmo3": lambda source: "<function_calls>" in source,
        "hunyuan_a13b": lambda source: "<tool_calls>" in source,
        "mistral": lambda source: "[TOOL_CALLS]" in source,
        "llama3_json": lambda source: "<|python_tag|>" in source or all(mark in source for mark in _LLAMA_32),
        "phi4_mini_json": lambda source: TOOLS_IN_SYSTEM in source,
        "granite": lambda source: "<|tool_call|>" in source,
        "lfm2": lambda source: any(mark in source for mark in _LFM),
        "gemma4": lambda source: "<|tool_call>" in source,
        "openai": lambda source: "<|channel|>" in source and "<|message|>" in source,
    }
)
_REASONING = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<seed:think><seed:cot_budget_reflect>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
)
# OLMo 3 Think's template opens the reasoning, and has no mark of its end.
_OPENS = re.compile(r"""<think>(?:\\n|\n)?['"]\s*-?\}\}""")


def tool_call_format(source: str) -> str:
    """Return a key of TOOL_CALLS, or "" if the template shows none."""
    return next((name for name, marks in TOOL_CALLS.items() if marks(source)), "")


def has_reasoning(source: str) -> bool:
    return any(end in source for _, end in _REASONING) or _OPENS.search(source) is not None


def ends_in_reasoning(text: str, continued: str) -> bool:
    """True if the prompt ends behind an opening mark, or the message that it continues has one that is still open."""
    is_at_end = any(text.rstrip().endswith(begin) for begin, _ in _REASONING)
    return is_at_end or any(continued.rfind(begin) > continued.rfind(end) for begin, end in _REASONING)
