"""The formats of tool calls between tags, and of calls written as in Python, which tagged_calls.py parses."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """The format in which a family of models writes calls. States in capitals are those of TaggedCallParser."""

    starts: tuple[str, ...]  # marks before the first call and before later ones
    heads: tuple[str, ...]  # expressions for what may be between such a mark and the function's name
    behind_name: str  # an expression for what is between the name and the arguments
    parameter: str = ""  # an expression from BETWEEN to a value, with its name as group; "": JSON arguments
    value_ends: tuple[str, ...] = ()  # marks after a value, the first of them its own; none: see `quote`
    has_lines: bool = False  # a line break around a value is not part of it
    quote: str = ""  # without `value_ends`: the mark around texts, as in quoted_values.py; "": values as in Python
    call_ends: tuple[str, ...] = ()  # marks that end the parameters
    closings: tuple[str, ...] = ()  # marks that may follow; the last one ends the calls
    next_start: str | None = None  # the mark between two calls, "" for none; None: the last of `starts`
    bare: str = ""  # a text that begins with this may be calls without a mark

    has_control_marks: ClassVar[bool] = True
    arguments_key: ClassVar[str] = "arguments"
    num_id_chars: ClassVar[int] = 24


def _qwen(start: str, end: str) -> TaggedFormat:
    """Qwen3-Coder's format, with these marks around a call."""
    return TaggedFormat(
        (start, "<function="),
        (r"\s{0,8}<function=", r"\s{0,8}"),
        r">",
        r"<parameter=([^<>]{1,256})>",
        ("</parameter>", "<parameter=", "</function>", end),
        has_lines=True,
        call_ends=("</function>", end),
        closings=(end,),
    )


def _python(start: str, end: str, *, next_start: str = ",", bare: str = "") -> TaggedFormat:
    """Calls as in Python, `[f(a=1), g()]`, with these marks around them. All arguments have names."""
    return TaggedFormat(
        (start,),
        (r"\s{0,8}[\[,]?\s{0,8}",),
        r"\s{0,8}\((?=\s{0,8}(?:\)|[^\W\d]\w{0,63}\s{0,8}=(?!=)))",
        r"([^\W\d]\w{0,63})\s{0,8}=",
        call_ends=(")", end),
        closings=("]", end),
        next_start=next_start,
        bare=bare,
    )


_DEEPSEEK = TaggedFormat(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    # Before V3.1: function<sep>NAME, then the arguments in a block of code. Since then: NAME<sep>, then the arguments.
    (
        r"\s{0,8}(?:<｜tool▁call▁begin｜>)?\s{0,8}function<｜tool▁sep｜>",
        r"\s{0,8}(?:<｜tool▁call▁begin｜>)?\s{0,8}",
    ),
    r"(?:<｜tool▁sep｜>)?\s{0,8}(?:```json)?\s{0,8}(?={)",
    closings=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
# Objects in a list, whose members have names of their own: CallReader does not know these.
_COHERE = TaggedFormat(
    ("<|START_ACTION|>",),
    (r'\s{0,16}\[?\s{0,16}\{\s{0,16}(?:"tool_call_id"\s?:\s?"\w{0,16}",\s{0,16})?"tool_name"\s?:\s?"',),
    r'",\s{0,16}"parameters"\s?:\s{0,16}(?={)',
    closings=("}", ",", "]", "<|END_ACTION|>"),
    next_start="{",
)
_PYTHONIC = _python("<|python_start|>", "<|python_end|>", bare="[")
TAGGED_FORMATS: Mapping[str, TaggedFormat] = MappingProxyType(
    {
        "qwen3_coder": _qwen("<tool_call>", "</tool_call>"),
        "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>"),
        "glm45": TaggedFormat(
            ("<tool_call>",),
            (r"\s{0,8}",),
            r"\s{0,8}(?=<arg_key>|</tool_call>)",
            r"<arg_key>([^<>]{1,256})</arg_key>\s{0,64}<arg_value>",
            ("</arg_value>", "</tool_call>"),
            call_ends=("</tool_call>",),
            closings=("</tool_call>",),
        ),
        "minimax_m2": TaggedFormat(
            ("<minimax:tool_call>", "<invoke name="),
            (r"""\s{0,8}<invoke name=["']?""", r"""["']?"""),
            r"""["']?>""",
            r"""<parameter name=["']?([^<>"']{1,256})["']?>""",
            ("</parameter>", "<parameter name=", "</invoke>", "</minimax:tool_call>"),
            call_ends=("</invoke>", "</minimax:tool_call>"),
            closings=("</minimax:tool_call>",),
        ),
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v31": _DEEPSEEK,
        "kimi_k2": TaggedFormat(
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            # The call's id is functions.NAME:NUMBER.
            (
                r"\s{0,8}(?:<\|tool_call_begin\|>)?\s{0,8}functions\.",
                r"\s{0,8}(?:<\|tool_call_begin\|>)?\s{0,8}",
            ),
            r"(?::\d{1,6})?\s{0,8}<\|tool_call_argument_begin\|>\s{0,8}(?={)",
            closings=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        "gemma4": TaggedFormat(
            ("<|tool_call>",),
            (r"\s{0,8}call:\s{0,8}",),
            r"\s{0,8}\{",
            r"""(?:<\|"\|>)?([^\s:,{}<>|"]{1,256})(?:<\|"\|>)?\s{0,8}:""",
            call_ends=("}", "<tool_call|>"),
            closings=("<tool_call|>",),
            quote='<|"|>',
        ),
        "cohere_command3": _COHERE,
        "cohere_command4": _COHERE,
        "apertus": TaggedFormat(
            ("<|tools_prefix|>",),
            (r'\s{0,16}\[?\s{0,16}\{\s{0,16}"',),
            r'"\s?:\s{0,16}(?={)',
            closings=("}", ",", "]", "<|tools_suffix|>"),
            next_start="{",
        ),
        "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
        "olmo3": _python("<function_calls>", "</function_calls>", next_start=""),
        "pythonic": _PYTHONIC,
        "llama4_pythonic": _PYTHONIC,
    }
)
"""Keys are the names of vLLM's parsers."""
