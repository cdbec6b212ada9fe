"""Calls of functions, found in what models write, however it is cut into pieces."""

import json
import sys
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.answer_parser import AnswerFormat, AnswerParser
from gateway.openai.call_reader import CallBegun
from gateway.openai.chat import build_message
from gateway.openai.chat_template import messages_of
from gateway.openai.requests import ChatBody
from gateway.openai.tool_choice import CallParser, ToolUse, parse_tool_use
from gateway.openai.tool_parser import FORCED_FORMAT, TOOL_FORMATS, ToolCallParser, ToolFormat
from tandem import FinishReason, InvalidRequest
from tests.defects import Repaired

NAMES = ("add", "look_up")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"{"}]}}'
SUM = ("add", '{"a": 1, "b": [2, {"c": "}\\"{"}]}')
LOOK = '{"name": "look_up", "parameters": {"q": "für"}}'
LOOKED = ("look_up", '{"q": "für"}')
UNKNOWN = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
NOTED = f'<tool_call>{{"note": 1, {ADD[1:]}</tool_call>'
JSON = '{"weather": "fine", "name": "add"}'
# Arguments with half of a surrogate pair, and these as a text in JSON, whose escape is not one of the inner JSON.
HALF, HALF_IN_TEXT = r'{"a": "\ud83d"}', r'"{\"a\": \"\ud83d\"}"'

Found = tuple[str | None, list[tuple[str, str]]]


def read(style: ToolFormat, text: str, size: int = 10_000, reason: FinishReason = FinishReason.LENGTH) -> Found:
    """Content and calls, where the text comes in pieces of so many characters."""
    parser = AnswerParser(ToolCallParser(style, NAMES), num_id_chars=style.num_id_chars)
    parts = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    message = build_message([*parts, *parser.finish(reason)])
    calls = message.get("tool_calls", [])
    assert (parser.reason(FinishReason.EOS_TOKEN) == "tool_calls") == bool(calls)
    assert parser.reason(FinishReason.LENGTH) == "length"
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return message["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


# As models write them: Qwen 2.5 and 3, Hermes, Llama 3, Mistral (tokenizers v3 to v7, v11, v13), Phi-4-mini, Granite 3,
# with and without the special tokens that detokenising drops.
CASES: list[tuple[str, str, Found]] = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", (None, [SUM])),
    ("hermes", f"I see.\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{LOOK}\n</tool_call>\n", ("I see.", [SUM, LOOKED])),
    ("hermes", f"<tool_call>{ADD}</tool_call> Done.", (" Done.", [SUM])),
    ("hermes", f"<tool_call>{ADD}", (None, [SUM])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', (None, [("add", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', (None, [("add", "{}")])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', (None, [("add", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', (None, [("add", '{"a": 1}')])),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {HALF_IN_TEXT}}}</tool_call>', (None, [("add", HALF)])),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', (None, [("add", "{}")])),
    ("hermes", f'<tool_call>{ADD[:-1]}, "note": {{"name": "}}"}}, "x": [1]}}</tool_call> Done.', (" Done.", [SUM])),
    ("hermes", '<tool_call>{"name": "add", "arguments": ""}</tool_call>', (None, [("add", "{}")])),
    ("hermes", NOTED, (NOTED, [])),
    ("hermes", "1 < 2, <tool, <tool_call", ("1 < 2, <tool, <tool_call", [])),
    ("hermes", UNKNOWN, (UNKNOWN, [])),
    ("hermes", "<tool_call>nonsense</tool_call> x", ("<tool_call>nonsense</tool_call> x", [])),
    ("hermes", JSON, (JSON, [])),
    ("hermes", "plain \n", ("plain \n", [])),
    ("hermes", "", ("", [])),
    ("llama3_json", LOOK, (None, [LOOKED])),
    ("llama3_json", f"\n<|python_tag|>{LOOK}; {ADD}", (None, [LOOKED, SUM])),
    ("llama3_json", '{"type": "function", "name": "look_up", "parameters": {"q": "für"}}', (None, [LOOKED])),
    ("llama3_json", JSON, (JSON, [])),
    ("llama3_json", '{"name": "add", "arguments": 3}', ('{"name": "add", "arguments": 3}', [])),
    ("llama3_json", f"Use {LOOK}", (f"Use {LOOK}", [])),
    ("mistral", f"[TOOL_CALLS] [{ADD}, {LOOK}]", (None, [SUM, LOOKED])),
    ("mistral", f"[{ADD}, {LOOK}]", (None, [SUM, LOOKED])),
    ("mistral", f"[TOOL_CALLS] [{ADD}] [TOOL_CALLS] [{LOOK}]", (None, [SUM, LOOKED])),
    ("mistral", "[1] is a note", ("[1] is a note", [])),
    ("mistral", "[TOOL", ("[TOOL", [])),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{SUM[1]}", (None, [SUM])),
    (
        "mistral",
        f"[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{SUM[1]}[TOOL_CALLS]look_up[CALL_ID]xyzXYZ789[ARGS]{LOOKED[1]}",
        (None, [SUM, LOOKED]),
    ),
    ("mistral", f"I see.[TOOL_CALLS]add[ARGS]{SUM[1]}[TOOL_CALLS]look_up[ARGS]{LOOKED[1]}", ("I see.", [SUM, LOOKED])),
    ("mistral", f"add{SUM[1]}look_up{LOOKED[1]}", (None, [SUM, LOOKED])),
    ("mistral", f"addabcDEF123{SUM[1]}look_upxyzXYZ789 {LOOKED[1]}", (None, [SUM, LOOKED])),
    ("mistral", f"[TOOL_CALLS]add{SUM[1]} and so on", ("and so on", [SUM])),
    ("mistral", f"add{SUM[1]}look", ("look", [SUM])),
    ("mistral", "add the numbers, then look_up {x}", ("add the numbers, then look_up {x}", [])),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}", ("[TOOL_CALLS]nobody[ARGS]{}", [])),
    ("mistral", "add", ("add", [])),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1', (None, [("add", '{"a": 1')])),
    ("mistral", "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]", ("[TOOL_CALLS]", [("add", "{}")])),
    ("phi4_mini_json", f"functools[{ADD}, {LOOK}]", (None, [SUM, LOOKED])),
    ("phi4_mini_json", f"functools[{ADD}]", (None, [SUM])),
    ("phi4_mini_json", f"[{ADD}]", (None, [SUM])),
    ("phi4_mini_json", "import functools\nx = [1]", ("import functools\nx = [1]", [])),
    ("granite", f"<|tool_call|>[{ADD}, {LOOK}]", (None, [SUM, LOOKED])),
    ("granite", f"[{ADD}]", (None, [SUM])),
    ("hunyuan_a13b", f"I see.\n<tool_calls>[{ADD}, {LOOK}]</tool_calls>", ("I see.", [SUM, LOOKED])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_calls(name: str, text: str, expected: Found, size: int) -> None:
    assert read(TOOL_FORMATS[name], text, size) == expected


def in_hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


# Two braces are missing of this call.
OPEN, CLOSED = '{"name": "add", "arguments": {"a": {"b": 1', ("add", '{"a": {"b": 1}}')
SLIPS: list[tuple[str, str, Found]] = [
    ("hermes", in_hermes(ADD[:-1], LOOK), (None, [SUM, LOOKED])),
    ("hermes", f"<tool_call>{ADD[:-1]}<tool_call>{LOOK}</tool_call>", (None, [SUM, LOOKED])),
    ("hermes", f"{in_hermes(LOOK, ADD[:-1])} Done.", (" Done.", [LOOKED, SUM])),
    ("hermes", in_hermes(f"{ADD[:-1]},", LOOK), (None, [SUM, LOOKED])),
    ("hermes", in_hermes(f"{OPEN}}}", LOOK), (None, [("add", '{"a": {"b": 1}\n}'), LOOKED])),
    ("hermes", in_hermes(OPEN + ",", LOOK), (None, [("add", f"{CLOSED[1][:-2]},\n"), LOOKED])),
    ("hermes", in_hermes('{"name": "add"', LOOK), ('<tool_call>\n{"name": "add"\n</tool_call>', [LOOKED])),
    ("hermes", f"{in_hermes(f'{ADD}}}', f'{LOOK}}}')} Done.", (" Done.", [SUM, LOOKED])),
    ("llama3_json", f"{LOOK[:-1]}; {ADD}", (None, [LOOKED, SUM])),
    ("mistral", f"[TOOL_CALLS][{ADD[:-1]}, {LOOK}]", (None, [SUM, LOOKED])),
    ("mistral", f"[TOOL_CALLS][{ADD}}}, {LOOK}}}]", (None, [SUM, LOOKED])),
    ("granite", f"<|tool_call|>[{ADD[:-1]}]", (None, [SUM])),
]


@pytest.mark.parametrize(("name", "text", "expected"), SLIPS)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_a_brace_too_few_or_too_many_costs_no_call(name: str, text: str, expected: Found, size: int) -> None:
    assert read(TOOL_FORMATS[name], text, size) == expected


@pytest.mark.parametrize("style", [*TOOL_FORMATS.values(), FORCED_FORMAT])
def test_a_call_that_the_model_leaves_open_is_closed(style: ToolFormat) -> None:
    """Only by brackets, and only if that makes its arguments JSON."""
    for arguments in (CLOSED[1][:-2], CLOSED[1][:-1], '{"a": [1, {}', '{"a": [1,', '{"a": "x'):
        text = f'{style.start}{{"name": "add", "arguments": {arguments}'
        missing = {CLOSED[1][:-2]: "}}", CLOSED[1][:-1]: "}", '{"a": [1, {}': "]}"}.get(arguments, "")
        for size in (1, 10_000):
            assert read(style, text, size, FinishReason.EOS_TOKEN) == (None, [("add", arguments + missing)])
            assert read(style, text, size, FinishReason.LENGTH) == (None, [("add", arguments)])


@pytest.mark.parametrize("number", range(12))
def test_a_name_that_begins_a_longer_one(number: int) -> None:
    """The rest of the longer name has as many characters as the id behind a shorter one."""
    short, long = f"search{number}", f"search{number}Documents"
    for written, called in ((long, long), (f"{short}abcDEF123", short), (short, short)):
        parser = ToolCallParser(TOOL_FORMATS["mistral"], [short, long])
        begun = [
            piece for char in f'{written}{{"q": 1}}' for piece in parser.push(char) if isinstance(piece, CallBegun)
        ]
        assert [piece.name for piece in begun] == [called]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [({"arguments": '{"a": 1}'}, {"a": 1}), ({"arguments": ""}, {}), ({"arguments": None}, {}), ({}, {})],
)
def test_calls_of_earlier_turns_have_arguments(arguments: dict[str, Any], shown: Any) -> None:
    """Chat templates write them as JSON, and some clients leave out arguments that are none."""
    turn = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", **arguments}}]}
    [message] = messages_of(ChatBody.model_validate({"messages": [turn]}))
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": shown}


def test_an_empty_list_of_calls_is_none() -> None:
    """Servers answer it and clients send it back; chat templates would show no content beside it, or fail."""
    turn = {"role": "assistant", "content": "Fine.", "tool_calls": []}
    assert messages_of(ChatBody.model_validate({"messages": [turn]})) == [{"role": "assistant", "content": "Fine."}]


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        ({"reasoning": "Hm."}, "Hm."),
        ({"reasoning": "Other.", "reasoning_content": "Hm."}, "Hm."),
        ({"reasoning": {"a": 1}}, None),
    ],
)
def test_reasoning_of_earlier_turns_has_two_names(members: dict[str, Any], shown: str | None) -> None:
    """Answers of vLLM have the shorter one, and transformers reads both."""
    [message] = messages_of(ChatBody.model_validate({"messages": [{"role": "assistant", "content": "Hi", **members}]}))
    assert message.get("reasoning_content") == shown


@pytest.mark.parametrize("text", [f"[{ADD}, {LOOK}]", f"{ADD}"])
def test_forced_answers_are_only_calls(text: str) -> None:
    assert read(FORCED_FORMAT, text, 3) == (None, [SUM, LOOKED] if text[0] == "[" else [SUM])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_truncated_forced_call_shows_no_json(size: int, repaired: Repaired) -> None:
    """Cut behind any of its characters: nothing, or what is known of calls."""
    text = f"[{ADD},{LOOK}]"
    for length in range(len(text)):
        content, calls = read(FORCED_FORMAT, text[:length], size)
        assert not content
        assert [name for name, _ in calls] == ["add", "look_up"][: len(calls)]
    assert read(FORCED_FORMAT, '[{"name":"ad', size) == ("", [])
    repaired("F11", "a forced call cut behind any of its characters leaves no JSON in the content")


def test_schemas_forbid_properties_they_do_not_name(repaired: Repaired) -> None:
    named = {"properties": {"a": {"properties": {}}, "b": {"items": {"properties": {"c": {}}}}}}
    free = {"properties": {}, "additionalProperties": True}
    combined = {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}
    functions = [
        {"name": str(place), "parameters": each}
        for place, each in enumerate([named, free, combined, {"type": "object"}])
    ]
    tools = [{"type": "function", "function": each} for each in functions]
    defined = forced_schema(parse_tool_use(ChatBody(messages=[], tools=tools, tool_choice="required"), HERMES))["$defs"]
    assert json.dumps(defined["0"]).count('"additionalProperties": false') == 3
    assert [defined[place] for place in "123"] == [free, combined, {"type": "object"}], "as the client has them"
    repaired("F11", "a forced call's arguments have no properties but those its function names")


def forced(parameters: dict[str, Any], num_functions: int = 1) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}
        for number in range(num_functions)
    ]
    return forced_schema(parse_tool_use(ChatBody(messages=[], tools=tools, tool_choice="required"), HERMES))


def test_descriptions_take_no_room_in_forced_calls() -> None:
    """A schema may have 65,536 characters."""
    described = {
        f"parameter_{number}": {
            "type": "string",
            "title": f"Parameter {number}",
            "description": "What it is good for. " * 16,
            "default": "a",
            "examples": ["a", "b"],
            "$comment": "x",
            "enum": ["a", "b", "c"],
        }
        for number in range(12)
    }
    assert len(json.dumps(forced({"type": "object", "properties": described}, 14))) < 20_000


def test_only_annotations_are_left_out_of_forced_calls() -> None:
    word = {"type": "string"}
    kept = {
        "type": "object",
        "properties": {"title": word, "description": {"enum": [{"title": "a"}]}, "default": {"const": {"$ref": "#"}}},
        "dependentRequired": {"title": ["description"]},
        "additionalProperties": False,
    }
    described = {**kept, "title": "A", "properties": {**kept["properties"], "title": {**word, "title": "Title"}}}
    branches = {"anyOf": [{"description": "b", "properties": {"a": {"title": "c", "type": "string"}}}]}
    assert forced(described)["$defs"]["0"] == kept
    assert forced(branches)["$defs"]["0"] == {"anyOf": [{"properties": {"a": word}}]}


@pytest.mark.parametrize(
    ("identity", "base"),
    [
        ({}, ""),
        ({"$id": "https://example.org/f.json"}, ""),
        ({"$id": "https://example.org/f.json#"}, "https://example.org/f.json"),
        ({"$id": "urn:f"}, "urn:f"),
    ],
)
def test_references_of_forced_calls(identity: dict[str, str], base: str) -> None:
    """Those by an anchor stay as they are: they hold in the whole schema."""
    node = {"next": {"$ref": f"{base}#"}, "size": {"$ref": f"{base}#/$defs/size"}, "unit": {"$ref": "#unit"}}
    definitions = {"size": {"type": "integer"}, "unit": {"$anchor": "unit", "const": 1}}
    schema = forced({**identity, "properties": node, "$defs": definitions})
    assert [each["$ref"] for each in schema["$defs"]["0"]["properties"].values()] == [
        *("#/$defs/0", "#/$defs/0/$defs/size", "#unit")
    ]
    validator = jsonschema.Draft202012Validator(schema)
    call = {"name": "f0", "arguments": {"next": {"size": 1, "unit": 1}}}
    assert validator.is_valid([call])
    for wrong in ({"size": "1"}, {"unit": 2}, {"other": 1}):
        assert not validator.is_valid([{**call, "arguments": {"next": wrong}}])


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "functools",
    "add",
    "<|python_tag|>",
    "<",
    "{",
    "}",
    "[",
    '"',
    "\\",
    " ",
    "\n",
    ",",
    ":",
]
pieces = st.sampled_from([*MARKS, "x", '"name"', '"add"', '"arguments"', "{}"])


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(pieces, max_size=14).map("".join), st.integers(1, 9))
def test_text_that_is_not_a_call_is_kept(name: str, text: str, size: int) -> None:
    content, calls = read(TOOL_FORMATS[name], text, size)
    assert (content, calls) == read(TOOL_FORMATS[name], text)
    if not calls:
        assert content == text


def body(**members: Any) -> ChatBody:
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": _NODE}},
        {"type": "function", "function": {"name": "look_up"}},
    ]
    return ChatBody.model_validate({"messages": [], "tools": tools, **members})


_NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}, "kind": {"$ref": "#/$defs/kind"}},
    "required": ["v"],
    "$defs": {"kind": {"enum": ["a", "b"]}},
}
LOOKUP: dict[str, Any] = {"name": "look_up", "arguments": {}}
HERMES = TOOL_FORMATS["hermes"]


def forced_schema(use: ToolUse | None) -> dict[str, Any]:
    assert use is not None
    schema = use.structure()["json_schema"]
    assert isinstance(schema, dict)
    return schema


@pytest.mark.parametrize(
    ("members", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [
                {"name": "add", "arguments": {"v": 1, "next": {"v": 2, "kind": "a"}}},
                {"name": "look_up", "arguments": {}},
            ],
            [{"name": "add", "arguments": {"v": 1, "next": {"kind": "a"}}}],
        ),
        ({"tool_choice": "required"}, [LOOKUP], [LOOKUP | {"arguments": {"x": 1}}]),
        (
            {"tool_choice": "required"},
            [{"name": "add", "arguments": {"v": 1}}],
            [{"name": "add", "arguments": {"v": 1, "more": 2}}],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"name": "add", "arguments": {"v": 1, "kind": "b"}},
            {"name": "add", "arguments": {"v": 1, "kind": "c"}},
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
            {"name": "look_up", "arguments": {}},
            {"name": "add", "arguments": {"v": 1}},
        ),
    ],
)
def test_forced_calls_fit_their_functions(members: dict[str, Any], good: Any, bad: Any) -> None:
    validator = jsonschema.Draft202012Validator(forced_schema(parse_tool_use(body(**members), HERMES)))
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)


def test_the_arguments_key_fits_the_format() -> None:
    schema = forced_schema(
        parse_tool_use(body(tool_choice="required", parallel_tool_calls=False), TOOL_FORMATS["llama3_json"])
    )
    assert json.dumps(schema).count('"required": ["name", "parameters"]') == 2


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "no function 'nobody'"),
        ({"tool_choice": "always"}, "tool_choice must be"),
        ({"tool_choice": {"type": "function"}}, "function"),
        ({"tools": [{"type": "function"}]}, "function"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
    ],
)
def test_what_makes_no_sense(members: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        parse_tool_use(body(**members), HERMES)


def test_text_is_not_parsed_without_tools_or_a_known_format() -> None:
    assert parse_tool_use(body(tool_choice="none"), HERMES) is None
    assert parse_tool_use(body(), None) is None
    assert parse_tool_use(body(tools=None), HERMES) is None


def num_lines_run(parser: CallParser, text: str) -> int:
    """The number of lines of Python that parsing the text takes."""
    num_lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parser.push(text)
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("order", ["{name}, {arguments}", "{arguments}, {name}"])
def test_the_work_grows_with_the_text_not_faster(order: str) -> None:
    """Blanks before the arguments, which a model in a loop writes by the thousand."""

    def work(num_blanks: int) -> int:
        arguments = '"arguments": ' + " " * num_blanks + '{"a": "' + "x" * num_blanks + '"}'
        members = order.format(name='"name": "add"', arguments=arguments)
        return num_lines_run(ToolCallParser(TOOL_FORMATS["hermes"], NAMES), f"<tool_call>{{{members}}}")

    assert work(1000) < 2.5 * work(500)


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_blanks_behind_a_call_cost_the_same_each(name: str) -> None:
    """They are held back, because a mark may follow."""

    def work(num_blanks: int) -> int:
        parser = ToolCallParser(TOOL_FORMATS[name], NAMES)
        parser.push(f"[{ADD}]")
        return sum(num_lines_run(parser, "\n") for _ in range(num_blanks))

    assert work(200) < 2.5 * work(100)


@pytest.mark.parametrize("size", [1, 10_000])
def test_parallel_calls_may_be_turned_off(size: int) -> None:
    text = f"<tool_call>{ADD}</tool_call> and <tool_call>{LOOK}</tool_call>"
    calls = {}
    for is_parallel in (True, False):
        use = parse_tool_use(body(parallel_tool_calls=is_parallel), TOOL_FORMATS["hermes"])
        parser = AnswerFormat(use, "none").parser()
        parts = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
        message = build_message([*parts, *parser.finish(FinishReason.EOS_TOKEN)])
        calls[is_parallel] = [call["function"]["name"] for call in message["tool_calls"]]
        assert parser.reason(FinishReason.EOS_TOKEN) == "tool_calls"
    assert calls == {True: ["add", "look_up"], False: ["add"]}


@pytest.mark.parametrize("name", ["hermes", "granite"])
def test_calls_that_never_were_cost_no_more_at_once_than_in_pieces(name: str) -> None:
    """A client can let a model repeat marks, and an answer that is not streamed comes at once."""

    def work(num_marks: int) -> int:
        text = f"{TOOL_FORMATS[name].start}{{" * num_marks + "}" * num_marks
        return num_lines_run(ToolCallParser(TOOL_FORMATS[name], NAMES), text)

    assert work(100) < 2.5 * work(50)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("phi4_mini_json", f"{ADD}functools\nfunctools[{LOOK}]"),
        ("mistral", f"[TOOL_CALLS]{ADD}[TOOL_CALLS][TOOL_CALLS]{LOOK}"),
        ("granite", f"<|tool_call|>{{<|tool_call|>]{ADD}"),
        ("granite", f"{ADD},<|tool"),
        ("granite", f"{ADD}; <|tool_call|><|tool_call|>{LOOK}"),
        ("llama3_json", f"{ADD} ; <|python_tag|>"),
        ("mistral", f"[{ADD}], [TOOL_CALLS][TOOL_CALLS]{LOOK}"),
        ("mistral", f"{ADD}]\n[TOOL"),
    ],
)
def test_marks_in_odd_places_read_the_same_however_they_come(name: str, text: str) -> None:
    assert len({json.dumps(read(TOOL_FORMATS[name], text, size)) for size in range(1, len(text) + 1)}) == 1


@pytest.mark.parametrize("arguments", ["[" * 100_000 + "]" * 100_000, json.dumps("[" * 100_000)])
def test_arguments_nested_too_deeply_are_no_call(arguments: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(TOOL_FORMATS["hermes"], text, 1 << 20) == (text, [])
