"""Calls between tags, and calls as in Python, as models write them, however their text is cut into pieces."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.answer_parser import AnswerParser
from gateway.openai.call_reader import CallBegun
from gateway.openai.chat import build_message
from gateway.openai.reasoning import REASONING_FORMATS
from gateway.openai.tagged_calls import TaggedCallParser, as_json, parameter_types
from gateway.openai.tagged_formats import TAGGED_FORMATS
from gateway.openai.tool_choice import CALL_FORMATS
from gateway.settings import REASONING_PARSERS, TOOL_CALL_PARSERS
from tandem import FinishReason
from tests.unit.gateway.test_tool_calls import num_lines_run

AREA = {
    "type": "object",
    "properties": {
        "shape": {"type": "string"},
        "dimensions": {"type": "object"},
        "precision": {"type": "integer"},
        "exact": {"type": "boolean"},
        "scale": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}}
FUNCTIONS: dict[str, dict[str, Any]] = {"area": AREA, "weather": CITY, "now": {}}

Found = tuple[str | None, list[tuple[str, Any]]]


def read(name: str, *texts: str) -> Found:
    """Content, and calls with their parsed arguments."""
    style = TAGGED_FORMATS[name]
    parser = AnswerParser(TaggedCallParser(style, FUNCTIONS), num_id_chars=style.num_id_chars)
    parts = [piece for text in texts for piece in parser.push(text)]
    message = build_message([*parts, *parser.finish(FinishReason.EOS_TOKEN)])
    calls = message.get("tool_calls", [])
    return message["content"], [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


DALLAS = ("weather", {"city": "Dallas", "unit": "celsius"})
ORLANDO = ("weather", {"city": "Orlando, FL\n(east)"})
SQUARE = {"shape": "square", "dimensions": {"width": 10, "height": [2, 3]}, "precision": 2}

QWEN_DALLAS = """<tool_call>
<function=weather>
<parameter=city>
Dallas
</parameter>
<parameter=unit>
celsius
</parameter>
</function>
</tool_call>"""
QWEN_ORLANDO = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOrlando, FL\n(east)\n</parameter>\n</function>\n</tool_call>"
)
QWEN_SQUARE = """<tool_call>
<function=area>
<parameter=shape>
square
</parameter>
<parameter=dimensions>
{"width": 10,
 "height": [2, 3]}
</parameter>
<parameter=precision>
2
</parameter>
</function>
</tool_call>"""
GLM_DALLAS = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Dallas</arg_value>
<arg_key>unit</arg_key>
<arg_value>celsius</arg_value>
</tool_call>"""
# GLM-4.7 leaves the line breaks out.
GLM_ORLANDO = "<tool_call>weather<arg_key>city</arg_key><arg_value>Orlando, FL\n(east)</arg_value></tool_call>"
GLM_SQUARE = """<tool_call>area
<arg_key>shape</arg_key>
<arg_value>square</arg_value>
<arg_key>dimensions</arg_key>
<arg_value>{"width": 10, "height": [2, 3]}</arg_value>
<arg_key>precision</arg_key>
<arg_value>2</arg_value>
</tool_call>"""


def deepseek_v3(name: str, arguments: object) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: object) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"


def kimi(name: str, arguments: object, number: int = 0) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"


def gemma(call: str) -> str:
    return f"<|tool_call>call:{call}<tool_call|>"


def cohere(*calls: tuple[str, Any]) -> str:
    members = ({"tool_call_id": str(n), "tool_name": f, "parameters": a} for n, (f, a) in enumerate(calls))
    listed = ",\n".join(f"    {json.dumps(call, ensure_ascii=False)}" for call in members)
    return f"<|START_ACTION|>[\n{listed}\n]<|END_ACTION|>"


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
MINIMAX_DALLAS = """<invoke name="weather">
<parameter name="city">Dallas</parameter>
<parameter name="unit">celsius</parameter>
</invoke>"""
MINIMAX_SQUARE = """<invoke name="area">
<parameter name="shape">square</parameter>
<parameter name="dimensions">{"width": 10, "height": [2, 3]}</parameter>
<parameter name="precision">2</parameter>
</invoke>"""
MINIMAX, MINIMAX_END = "<minimax:tool_call>\n", "\n</minimax:tool_call>"
PY_DALLAS = """weather(city="Dallas", unit='celsius')"""
PY_SQUARE = "area(shape='square', dimensions={'width': 10, 'height': [2, 3]}, precision=2)"
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO, OLMO_END = "<function_calls>", "</function_calls>"
QUOTED = {"shape": 'a), "b" = [c\n\\d', "exact": True, "scale": None, "tags": ["é", "x,y"], "precision": -2}

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3, V31 = deepseek_v3(*DALLAS), deepseek_v31(*DALLAS)

# What these models, or their chat templates, write; and slips that are known of them.
CASES: list[tuple[str, str, Found]] = [
    ("qwen3_coder", QWEN_DALLAS, (None, [DALLAS])),
    ("qwen3_coder", f"I look.\n\n{QWEN_DALLAS}\n{QWEN_SQUARE}\n", ("I look.", [DALLAS, ("area", SQUARE)])),
    ("qwen3_coder", QWEN_ORLANDO, (None, [ORLANDO])),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", (None, [("now", {})])),
    ("qwen3_coder", QWEN_DALLAS.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), (None, [DALLAS])),
    ("qwen3_coder", QWEN_DALLAS.replace("\n</parameter>", ""), (None, [DALLAS])),
    ("qwen3_coder", QWEN_DALLAS.replace("</function>\n", ""), (None, [DALLAS])),
    ("qwen3_coder", f"{QWEN_DALLAS} Done.", (" Done.", [DALLAS])),
    ("qwen3_coder", QWEN_DALLAS.replace("\n", ""), (None, [DALLAS])),
    ("qwen3_coder", QWEN_DALLAS.replace("weather", "nobody"), (QWEN_DALLAS.replace("weather", "nobody"), [])),
    ("qwen3_coder", "a <b, <function, <tool_cal", ("a <b, <function, <tool_cal", [])),
    ("qwen3_coder", f"<tool_call>{QWEN_DALLAS}", ("<tool_call>", [DALLAS])),
    (
        "qwen3_coder",
        "<function=area><parameter=exact>\nTrue\n</parameter><parameter=scale>None</parameter>"
        '<parameter=tags>["a"]</parameter><parameter=shape>\n\n</parameter></function>',
        (None, [("area", {"exact": True, "scale": None, "tags": ["a"], "shape": ""})]),
    ),
    ("glm45", GLM_DALLAS, (None, [DALLAS])),
    ("glm45", f"I look.\n{GLM_DALLAS}\n{GLM_SQUARE}", ("I look.", [DALLAS, ("area", SQUARE)])),
    ("glm45", f"{GLM_ORLANDO}{GLM_DALLAS}", (None, [ORLANDO, DALLAS])),
    ("glm45", "<tool_call>now\n</tool_call>", (None, [("now", {})])),
    ("glm45", "<tool_call>now</tool_call> Done.", (" Done.", [("now", {})])),
    ("glm45", GLM_DALLAS.replace("weather", "nobody"), (GLM_DALLAS.replace("weather", "nobody"), [])),
    ("glm45", "<tool_call>nowhere</tool_call>", ("<tool_call>nowhere</tool_call>", [])),
    ("deepseek_v3", f"{BEGIN}{V3}{END}", (None, [DALLAS])),
    ("deepseek_v3", f"I look.{BEGIN}{V3}\n{deepseek_v3('area', SQUARE)}{END}", ("I look.", [DALLAS, ("area", SQUARE)])),
    ("deepseek_v3", f"{BEGIN}{V3}", (None, [DALLAS])),
    ("deepseek_v3", V3.removesuffix("<｜tool▁call▁end｜>"), (None, [DALLAS])),
    ("deepseek_v3", f"{V3} And so on.", (" And so on.", [DALLAS])),
    ("deepseek_v31", f"{BEGIN}{V31}{deepseek_v31('area', SQUARE)}{END}", (None, [DALLAS, ("area", SQUARE)])),
    ("deepseek_v31", f"{BEGIN}{deepseek_v31('now', {})}{END}Done.", ("Done.", [("now", {})])),
    ("deepseek_v31", V31.replace("weather", "nobody"), (V31.replace("weather", "nobody"), [])),
    ("kimi_k2", f"{SECTION}{kimi(*DALLAS)}{SECTION_END}", (None, [DALLAS])),
    (
        "kimi_k2",
        f"I look.{SECTION}{kimi('now', {}, 3)}\n{kimi('area', {'tags': []}, 12)}{SECTION_END} Done.",
        ("I look. Done.", [("now", {}), ("area", {"tags": []})]),
    ),
    ("kimi_k2", f"{SECTION}{kimi('nobody', {})}", (f"{SECTION}{kimi('nobody', {})}", [])),
    ("seed_oss", QWEN_DALLAS.replace("tool_call>", "seed:tool_call>"), (None, [DALLAS])),
    ("minimax_m2", f"{MINIMAX}{MINIMAX_DALLAS}{MINIMAX_END}", (None, [DALLAS])),
    (
        "minimax_m2",
        f"I look.\n{MINIMAX}{MINIMAX_DALLAS}\n{MINIMAX_SQUARE}{MINIMAX_END}",
        ("I look.", [DALLAS, ("area", SQUARE)]),
    ),
    ("minimax_m2", "<invoke name='now'></invoke> Done.", (" Done.", [("now", {})])),
    ("cohere_command3", cohere(DALLAS), (None, [DALLAS])),
    ("cohere_command4", f"I look.{cohere(('now', {}), ORLANDO)}", ("I look.", [("now", {}), ORLANDO])),
    ("cohere_command3", cohere(("nobody", {})), (cohere(("nobody", {})), [])),
    ("apertus", f'<|tools_prefix|>[{{"weather": {json.dumps(DALLAS[1])}}}]<|tools_suffix|>', (None, [DALLAS])),
    ("apertus", 'So: <|tools_prefix|>[{"now": {}}, {"now": {}}]<|tools_suffix|>', ("So:", [("now", {})] * 2)),
    ("gemma4", gemma('weather{city:<|"|>Dallas<|"|>,unit:<|"|>celsius<|"|>}'), (None, [DALLAS])),
    (
        "gemma4",
        "I look." + gemma('weather{city:<|"|>Orlando, FL\n(east)<|"|>}') + gemma("now{}"),
        ("I look.", [ORLANDO, ("now", {})]),
    ),
    (
        "gemma4",
        gemma('area{shape:<|"|>square<|"|>,dimensions:{width:10,height:[2,3]},precision:2}'),
        (None, [("area", SQUARE)]),
    ),
    (
        "gemma4",
        gemma(
            'area{shape:<|"|>{"a": [}<|"|>,tags:[<|"|>a,b<|"|>,<|"|><|"|>,c d],exact:true,scale:null,precision:08:3}'
        ),
        (
            None,
            [
                (
                    "area",
                    {
                        "shape": '{"a": [}',
                        "tags": ["a,b", "", "c d"],
                        "exact": True,
                        "scale": None,
                        "precision": "08:3",
                    },
                )
            ],
        ),
    ),
    ("gemma4", gemma("nobody{a:1}"), (gemma("nobody{a:1}"), [])),
    ("lfm2", f"{LFM}[{PY_DALLAS}]{LFM_END}", (None, [DALLAS])),
    ("lfm2", f"I look.{LFM}[{PY_DALLAS}, now()]{LFM_END}Done.", ("I look.Done.", [DALLAS, ("now", {})])),
    ("lfm2", f"{LFM}[nobody(a=1)]{LFM_END}", (f"{LFM}[nobody(a=1)]{LFM_END}", [])),
    ("olmo3", f"{OLMO}{PY_DALLAS}\n{PY_SQUARE}{OLMO_END}", (None, [DALLAS, ("area", SQUARE)])),
    ("olmo3", f"{OLMO}area(exact=true, scale=null){OLMO_END}", (None, [("area", {"exact": True, "scale": None})])),
    ("pythonic", f"[{PY_DALLAS}, {PY_SQUARE}]", (None, [DALLAS, ("area", SQUARE)])),
    ("pythonic", f"[1] says {PY_DALLAS}", (f"[1] says {PY_DALLAS}", [])),
    ("llama4_pythonic", f"I look.<|python_start|>[{PY_DALLAS}]<|python_end|>", ("I look.", [DALLAS])),
    ("llama4_pythonic", f"{PY_DALLAS}", (f"{PY_DALLAS}", [])),
    ("pythonic", "[now(1), now(print())]", ("[now(1), now(print())]", [])),
    (
        "pythonic",
        f"[area({', '.join(f'{key}={value!r}' for key, value in QUOTED.items())})]",
        (None, [("area", QUOTED)]),
    ),
    (
        "pythonic",
        "[area(shape='a\nb\\d', tags=print(1))]",
        (None, [("area", {"shape": "a\nb\\d", "tags": "print(1)"})]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_however_the_text_is_cut(name: str, text: str, expected: Found) -> None:
    assert read(name, text) == expected
    assert read(name, *text) == expected
    for at in range(len(text)):
        assert read(name, text[:at], text[at:]) == expected, f"cut at {text[at - 10 : at]!r}"


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_a_text_that_is_cut_off_has_the_calls_so_far(name: str, text: str, expected: Found) -> None:
    """Behind any character: the names so far, and whole arguments of all calls but the last."""
    for length in range(len(text)):
        style = TAGGED_FORMATS[name]
        parser = AnswerParser(TaggedCallParser(style, FUNCTIONS), num_id_chars=style.num_id_chars)
        message = build_message([*parser.push(text[:length]), *parser.finish(FinishReason.LENGTH)])
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert [call["name"] for call in calls] == [known for known, _ in expected[1]][: len(calls)]
        for call, (_, arguments) in zip(calls[:-1], expected[1], strict=False):
            assert json.loads(call["arguments"]) == arguments


NOW = deepseek_v31("now", {})
NESTED = {"shape": "square", "dimensions": {"width": 10}}
SLIPS: list[tuple[str, str, Found]] = [
    ("pythonic", r"""[weather(city='C:\Users\new\d "x"')]""", (None, [("weather", {"city": 'C:\\Users\new\\d "x"'})])),
    ("pythonic", """[weather(city="print("hi")\n\\n")]""", (None, [("weather", {"city": 'print("hi")\n\\n'})])),
    (
        "lfm2",
        "<|tool_call_start|>[weather(city='it's x, y', unit='a')]",
        (None, [("weather", {"city": "it's x, y", "unit": "a"})]),
    ),
    ("pythonic", "[area(precision=1e999, scale=2.5)]", (None, [("area", {"precision": "1e999", "scale": 2.5})])),
    ("pythonic", r"[area(tags=('\ud83d\ude00', '\x41'))]", (None, [("area", {"tags": ["😀", "A"]})])),
    ("qwen3_coder", "<tool_call>\n<function=now>\n", (None, [("now", {})])),
    ("qwen3_coder", QWEN_DALLAS.removesuffix("</function>\n</tool_call>"), (None, [DALLAS])),
    ("qwen3_coder", QWEN_DALLAS.removesuffix("</parameter>\n</function>\n</tool_call>"), (None, [DALLAS])),
    ("qwen3_coder", QWEN_DALLAS.removesuffix("\n</parameter>\n</function>\n</tool_call>"), (None, [DALLAS])),
    ("qwen3_coder", "<function=area>\n<parameter=precision>\n2\n", (None, [("area", {"precision": 2})])),
    ("qwen3_coder", "<function=area>\n<parameter=shape>\n", (None, [("area", {"shape": ""})])),
    ("glm45", "<tool_call>now<arg_key>", (None, [("now", {})])),
    ("kimi_k2", f"{SECTION}{kimi(*DALLAS)}".removesuffix("}<|tool_call_end|>"), (None, [DALLAS])),
    ("minimax_m2", f"{MINIMAX}{MINIMAX_DALLAS}".removesuffix("</parameter>\n</invoke>"), (None, [DALLAS])),
    ("cohere_command3", cohere(DALLAS).partition("}")[0], (None, [DALLAS])),
    ("lfm2", f"{LFM}[{PY_DALLAS[:-2]}", (None, [DALLAS])),
    (
        "lfm2",
        f"{LFM}[{PY_SQUARE.partition(']')[0]}",
        (None, [("area", {key: SQUARE[key] for key in list(SQUARE)[:2]})]),
    ),
    ("lfm2", f"{LFM}[{PY_DALLAS[:-1]}]{LFM_END}So.", ("So.", [DALLAS])),
    ("lfm2", f"{LFM}[area(precision=", (None, [("area", {"precision": ""})])),
    ("glm45", GLM_DALLAS.removesuffix("\n</tool_call>"), (None, [DALLAS])),
    ("glm45", GLM_ORLANDO.removesuffix("</arg_value></tool_call>"), (None, [ORLANDO])),
    ("deepseek_v31", V31.removesuffix("}<｜tool▁call▁end｜>"), (None, [DALLAS])),
    ("deepseek_v31", f"{V31.replace('}', '')}{NOW}{END} Done.", (" Done.", [DALLAS, ("now", {})])),
    (
        "deepseek_v3",
        deepseek_v3("area", NESTED).replace("}}", "}") + deepseek_v3("now", {}),
        (None, [("area", NESTED), ("now", {})]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), SLIPS)
def test_a_call_without_its_last_marks_is_closed(name: str, text: str, expected: Found) -> None:
    assert read(name, text) == expected
    assert read(name, *text) == expected


def test_texts_come_as_they_are_written() -> None:
    parser = TaggedCallParser(TAGGED_FORMATS["qwen3_coder"], FUNCTIONS)
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    shown = ["".join(getattr(piece, "text", "") for piece in parser.push(text)) for text in ("New ", 'Y"', "ork\n")]
    assert shown == ['"New ', 'Y\\"', "ork"], "the line break may belong to the tag"


VALUES = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30).filter(lambda text: "<" not in text),
    st.integers(),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)
TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", list: "array", dict: "object"}


@given(
    st.sampled_from(["qwen3_coder", "glm45"]),
    st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), VALUES, max_size=4),
    st.integers(1, 9),
    st.booleans(),
)
def test_what_a_chat_template_writes_is_read_back(
    name: str, arguments: dict[str, Any], size: int, python: bool
) -> None:
    """Values as the templates of both families show them in earlier turns; Qwen's shows True, False and None."""
    schema = {"properties": {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}}

    def shown(value: Any) -> str:
        if isinstance(value, str):
            return value
        return str(value) if python and not isinstance(value, dict | list) else json.dumps(value)

    if name == "qwen3_coder":
        items = "".join(f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in arguments.items())
        text = f"<tool_call>\n<function=f>\n{items}</function>\n</tool_call>"
    else:
        items = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n" for key, value in arguments.items()
        )
        text = f"<tool_call>f\n{items}</tool_call>"
    style = TAGGED_FORMATS[name]
    parser = AnswerParser(TaggedCallParser(style, {"f": schema}), num_id_chars=style.num_id_chars)
    parts = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    message = build_message([*parts, *parser.finish(FinishReason.EOS_TOKEN)])
    assert message["content"] is None
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [arguments]


MARKS = sorted(
    {mark for style in TAGGED_FORMATS.values() for mark in (*style.starts, *style.value_ends, *style.closings)}
)
PIECES = st.sampled_from(
    [*MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "now", ">", "city", "{", "}", "<", "\n", " ", "x"]
)


@given(st.sampled_from(sorted(TAGGED_FORMATS)), st.lists(PIECES, max_size=14).map("".join), st.integers(1, 9))
def test_text_that_is_not_a_call_is_kept(name: str, text: str, size: int) -> None:
    def pieces(step: int) -> Any:
        parser = AnswerParser(TaggedCallParser(TAGGED_FORMATS[name], FUNCTIONS), num_id_chars=24)
        parts = [piece for at in range(0, len(text), step) for piece in parser.push(text[at : at + step])]
        message = build_message([*parts, *parser.finish(FinishReason.EOS_TOKEN)])
        return message["content"], [call["function"] for call in message.get("tool_calls", [])]

    content, calls = pieces(size)
    assert (content, calls) == pieces(1000)
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "42", '"42"'),
        ({"type": "integer"}, " 42 ", "42"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": "number"}, "4", "4"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "float"}, "3.14", "3.14"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "42", '"42"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "42", "42"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"42"', '"\\"42\\""'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/tags"}]}, '["a"]', '["a"]'),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"$ref": "#/nowhere"}, "5", "5"),
        ({"allOf": True}, "5", "5"),
        ({"anyOf": "string"}, "5", "5"),
        ({"anyOf": [{"type": "string"}] * 1000}, "5", "5"),
        ({"anyOf": [{"$ref": "#/properties/value"}, {"type": "string"}]}, "5", "5"),
        ({"type": "array"}, "[" * 100_000, json.dumps("[" * 100_000)),
        ({}, "plain words", '"plain words"'),
        ({}, "[1, 2]", "[1, 2]"),
    ],
)
def test_types_are_those_of_the_schema(schema: dict[str, Any], text: str, expected: str) -> None:
    root = {
        "properties": {"value": schema},
        "$defs": {"tags": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    assert as_json(text, parameter_types(root, "value")) == expected


def test_a_schema_that_refers_to_itself_many_times_costs_little() -> None:
    """Also one whose parts refer to each other, and one that is deep."""
    itself = {"$ref": "#/properties/value"}
    wide = {"properties": {"value": {"anyOf": [dict(itself) for _ in range(200)]}}}
    parts = [{"$ref": f"#/$defs/{number}"} for number in range(40)]
    crossed = {"properties": {"value": parts[0]}, "$defs": {str(number): {"anyOf": parts} for number in range(40)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        deep = {"anyOf": [deep]}
    for root in (wide, crossed, {"properties": {"value": deep}}):
        assert num_calls(partial(parameter_types, root, "value")) < 20_000
        assert as_json("5", parameter_types(root, "value")) == "5"


def num_calls(work: Callable[[], object]) -> int:
    """How many calls of functions the work takes; it is stopped at 20,000."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"
        if count >= 20_000:
            raise TimeoutError

    sys.setprofile(trace)
    try:
        work()
    except TimeoutError:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", sorted(TAGGED_FORMATS))
def test_text_that_begins_like_a_call_soon_goes_on(name: str) -> None:
    """An answer about the marks of calls streams: no more is held back than a head of a call may have."""
    parser = TaggedCallParser(TAGGED_FORMATS[name], FUNCTIONS)
    pieces = parser.push(f"{TAGGED_FORMATS[name].starts[-1]}foo> is how a model begins a call. " + "Words, " * 20)
    assert pieces
    assert parser.num_calls == 0


@pytest.mark.parametrize("name", sorted(TAGGED_FORMATS))
def test_many_long_names_cost_little(name: str) -> None:
    """The parser is made on the event loop, and expressions of Python's take long to compile."""
    names: dict[str, Any] = {f"{number:03}{'n' * 1000}": {} for number in range(256)}

    def parse() -> None:
        parser = TaggedCallParser(TAGGED_FORMATS[name], names)
        for _ in range(20):
            parser.push(f"{TAGGED_FORMATS[name].starts[-1]}n")

    assert num_calls(parse) < 10_000


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>function\n```json\n{}\n```<｜tool▁call▁end｜>"),
        ("qwen3_coder", "<tool_call>\n<function=function></function></tool_call>"),
        ("glm45", "<tool_call>function\n</tool_call>"),
    ],
)
def test_a_function_may_be_named_function(style: str, text: str) -> None:
    for size in (1, 1000):
        parser = TaggedCallParser(TAGGED_FORMATS[style], {"function": {}, "func": {}})
        pieces = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
        assert [piece.name for piece in pieces if isinstance(piece, CallBegun)] == ["function"]


def test_every_format_may_be_chosen() -> None:
    assert set(TOOL_CALL_PARSERS) == {"auto", "none", *CALL_FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize("name", sorted(TAGGED_FORMATS))
def test_the_work_grows_with_the_text_not_faster(name: str) -> None:
    """A long value, and one that never ends, a character at a time."""

    def work(num_chars: int) -> int:
        parser = TaggedCallParser(TAGGED_FORMATS[name], FUNCTIONS)
        begin = next(text for case, text, _ in CASES if case == name).partition("Dallas")[0]
        parser.push(begin)
        return sum(num_lines_run(parser, char) for char in "x\n" * num_chars)

    assert work(400) < 2.5 * work(200)
