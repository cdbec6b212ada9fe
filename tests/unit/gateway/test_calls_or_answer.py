"""Answers that are calls, as the model writes them, or else JSON of a schema: agents whose result has a type."""

import json
from typing import Any

import pytest

from checkpoint.grammar import GrammarCompiler
from gateway.errors import Problem
from gateway.openai.answer_parser import AnswerFormat
from gateway.openai.chat import build_message
from gateway.openai.requests import ChatBody, ClientFieldNames
from gateway.openai.sdk_arguments import chat_arguments
from gateway.openai.tool_choice import CALL_FORMATS, parse_tool_use
from mesh.domain.structure import MAX_GRAMMAR_CHARS, Structure, StructureKind
from tandem import FinishReason, GenerateArguments, InvalidRequest
from tests.fakes.router_model import byte_level_tokenizer, write_checkpoint

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"$ref": "#/$defs/sum", "$defs": {"sum": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
    }}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
PERSON = {
    "type": "object",
    "description": "Somebody.",
    "properties": {"name": {"enum": ["Ann", "100 %json {"]}, "friend": {"$ref": "#/$defs/friend"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"friend": {"type": "boolean"}},
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
WRITTEN = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(calls).replace("arguments", "parameters"),
    "phi4_mini_json": lambda calls: f"functools[{', '.join(calls)}]",
    "hunyuan_a13b": lambda calls: f"<tool_calls>[{', '.join(calls)}]</tool_calls>",
}
ADD, NOW = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
ANSWERS = ['{"name":"Ann"}', '{"name": "100 %json {", "friend": true}']


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def chat(**members: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [], "tools": TOOLS, "response_format": RESPONSE_FORMAT, **members})


def arguments_of(name: str, **members: Any) -> GenerateArguments:
    body = chat(**members)
    return chat_arguments(body, None, parse_tool_use(body, CALL_FORMATS.get(name)))


def accepts(compiler: GrammarCompiler, grammar: str | None, text: str) -> bool:
    structure = Structure(StructureKind.GRAMMAR, grammar or "")
    structure.validate()
    matcher = compiler.compile(structure)
    ids = byte_level_tokenizer().encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(name: str, text: str) -> tuple[str | None, list[str]]:
    parser = AnswerFormat(parse_tool_use(chat(), CALL_FORMATS[name]), "none").parser()
    message = build_message([*parser.push(text), *parser.finish(FinishReason.EOS_TOKEN)])
    return message["content"], [call["function"]["name"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_an_answer_is_calls_or_what_the_client_asked_for(compiler: GrammarCompiler, name: str) -> None:
    arguments = arguments_of(name)
    grammar = arguments["grammar"]
    assert (arguments["json_schema"], arguments["json_object"]) == (None, None)
    assert "Somebody" not in str(grammar), "it would take room"
    for text in ANSWERS:
        assert accepts(compiler, grammar, text)
        assert read(name, text) == (text, [])
    for calls, names in (([ADD], ["add"]), ([NOW, ADD, NOW], ["now", "add", "now"])):
        text = WRITTEN[name](calls)
        assert accepts(compiler, grammar, text)
        assert read(name, text) == (None, names)
    for calls in (
        [ADD.replace("1", '"x"')],
        [NOW.replace("now", "nobody")],
        [NOW.replace("{}", '{"a": 1}')],
        [NOW] * 17,
    ):
        assert not accepts(compiler, grammar, WRITTEN[name](calls))
    for text in ("text", '{"name": "Bob"}', '{"name":\n"Ann"}', ANSWERS[0] + WRITTEN[name]([ADD])):
        assert not accepts(compiler, grammar, text)


def test_as_many_tools_as_agents_have(compiler: GrammarCompiler) -> None:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string", "minLength": i} for i in range(9)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(40)]
    grammar = arguments_of("hermes", tools=tools)["grammar"]
    assert len(grammar) > 2 * MAX_GRAMMAR_CHARS
    assert accepts(compiler, grammar, WRITTEN["hermes"](['{"name": "f39", "arguments": {"p1": "x"}}']))


def test_complaints_name_what_the_client_sent() -> None:
    problem = Problem.of(InvalidRequest("grammar has 9000 characters, at most 8192 are allowed"))
    translated = ClientFieldNames.of(chat()).translate(problem)
    assert translated.message == "response_format with tools has 9000 characters, at most 8192 are allowed"
    assert translated.field == "response_format"


def test_complaints_quote_what_the_client_wrote() -> None:
    said = 'cannot be used: invalid regex "(choice" (in regex): unclosed group'
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "guided_regex": "(choice"})
    translated = ClientFieldNames.of(body).translate(Problem.of(InvalidRequest(f"regex {said}")))
    assert (translated.message, translated.field) == (f"guided_regex {said}", "guided_regex")


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_one_call_beside_an_answer(compiler: GrammarCompiler, name: str) -> None:
    grammar = arguments_of(name, parallel_tool_calls=False, response_format={"type": "json_object"})["grammar"]
    assert accepts(compiler, grammar, WRITTEN[name]([ADD]))
    assert accepts(compiler, grammar, '{"any": {"thing": 1}}')
    assert not accepts(compiler, grammar, WRITTEN[name]([ADD, NOW]))


def test_schemas_under_other_names() -> None:
    """vLLM's, also as text."""
    grammar = arguments_of("hermes")["grammar"]
    for members in (
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
    ):
        assert arguments_of("hermes", response_format=None, **members)["grammar"] == grammar


@pytest.mark.parametrize("name", sorted(CALL_FORMATS.keys() - WRITTEN.keys()))
def test_formats_that_a_grammar_cannot_name_keep_the_answer(name: str) -> None:
    arguments = arguments_of(name)
    assert arguments["json_schema"] == PERSON
    assert arguments.get("grammar") is None


@pytest.mark.parametrize(
    "members",
    [
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_regex": "a+"},
        {"response_format": None, "guided_json": "{"},
        {"tool_choice": "none"},
        {"tools": None},
    ],
)
def test_without_a_schema_or_tools_nothing_is_made(members: dict[str, Any]) -> None:
    assert arguments_of("hermes", **members).get("grammar") is None
