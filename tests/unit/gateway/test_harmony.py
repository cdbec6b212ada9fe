"""gpt-oss's answers: channels, calls, and the grammars that hold them to a structure."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from checkpoint.grammar import GrammarCompiler
from gateway.openai.answer_parser import AnswerParser
from gateway.openai.chat import build_message
from gateway.openai.harmony import HarmonyParser
from gateway.openai.harmony_structure import in_harmony
from gateway.openai.tool_choice import HARMONY_FORMATS, Function, ToolUse
from mesh.domain.structure import Structure, StructureKind
from tandem import FinishReason, GenerateArguments, InvalidRequest

THOUGHT = "<|channel|>analysis<|message|>Hm, 2 < 3.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains."
HEAD = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CALL = '{"city": "Ulm"}'
WEATHER = [("weather", CALL)]
Parts = tuple[str, str | None, list[tuple[str, str]]]

CASES: list[tuple[str, Parts]] = [
    (THOUGHT + FINAL, ("Hm, 2 < 3.", "It rains.", [])),
    (THOUGHT + FINAL + "<|return|>", ("Hm, 2 < 3.", "It rains.", [])),
    ("<|channel|>final<|message|>It rains.", ("", "It rains.", [])),
    (THOUGHT + HEAD + CALL, ("Hm, 2 < 3.", None, WEATHER)),
    (THOUGHT + HEAD + CALL + "<|call|>", ("Hm, 2 < 3.", None, WEATHER)),
    (f" to=functions.weather<|channel|>commentary json<|message|>{CALL}<|call|>", ("", None, WEATHER)),
    (f"<|channel|>analysis to=functions.weather code<|message|>{CALL}", ("", None, WEATHER)),
    (HEAD + CALL + "<|call|>" + HEAD + CALL, ("", None, WEATHER * 2)),
    (HEAD + "<|call|>", ("", None, [("weather", "{}")])),
    ("<|channel|>commentary<|message|>I look.<|end|>" + HEAD + CALL, ("", "I look.", WEATHER)),
    ("<|channel|>commentary<|message|>I look.<|end|>" + FINAL, ("", "I look.\nIt rains.", [])),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant" + THOUGHT, ("a\nHm, 2 < 3.", None, [])),
    ("<|channel|>commentary to=functions.nobody<|message|>{}<|call|>", ("", "{}", [])),
    ("<|channel|>analysis<|message|>Hm" + FINAL, ("Hm", "It rains.", [])),
    ("of a message that is continued, <|", ("", "of a message that is continued, <|", [])),
    (THOUGHT + "<|start|>assistant<|chan", ("Hm, 2 < 3.", None, [])),
    ("<|channel|>" + 600 * "x", ("", "<|channel|>" + 600 * "x", [])),
    (THOUGHT + 600 * " " + FINAL, ("Hm, 2 < 3.", 600 * " " + "\nIt rains.", [])),
    ("to", ("", "to", [])),
]


def parts_of(text: str, size: int, *, joins_thoughts: bool = False) -> Parts:
    parser = AnswerParser(HarmonyParser(["weather"], joins_thoughts=joins_thoughts), num_id_chars=24)
    pushed = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    message = build_message([*pushed, *parser.finish(FinishReason.EOS_TOKEN)])
    made = [call["function"] for call in message.get("tool_calls", ())]
    content, calls = message["content"], [(call["name"], call["arguments"]) for call in made]
    assert parser.reason(FinishReason.EOS_TOKEN) == ("tool_calls" if calls else "stop")
    return message.get("reasoning_content", ""), content, calls


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_parts(text: str, expected: Parts) -> None:
    for size in (1, 3, 7, len(text)):
        assert parts_of(text, size) == expected


def test_reasoning_that_is_not_to_be_separate_is_content() -> None:
    assert parts_of(THOUGHT + FINAL, 5, joins_thoughts=True) == ("", "Hm, 2 < 3.\nIt rains.", [])


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("harmony")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("return", "call", "channel", "start", "message", "end", "constrain")
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": 263, "eos_token_id": [256, 257], "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"], **sizes}))
    return GrammarCompiler(folder)


def fits(compiler: GrammarCompiler, arguments: GenerateArguments, text: str) -> bool:
    """True if the text is a whole answer. Marks are tokens of the model's."""
    grammar = arguments["grammar"]
    assert grammar is not None
    assert not {"json_schema", "json_object", "regex", "choice"} & {key for key, value in arguments.items() if value}
    matcher: LLMatcher = compiler.compile(Structure(StructureKind.GRAMMAR, grammar))
    tokenizer = Tokenizer.from_file(str(compiler._model_dir / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USE = ToolUse((Function(name="weather", parameters=SCHEMA),), HARMONY_FORMATS["openai"])
FORCED = ToolUse(USE.functions, USE.style, is_forced=True)
ANSWER = FINAL.removeprefix("<|start|>assistant").removesuffix("It rains.")
IN_CALL = HEAD.removeprefix("<|start|>assistant")


@pytest.mark.parametrize(
    ("arguments", "use", "answers", "others"),
    [
        ({"json_schema": SCHEMA}, None, [ANSWER + CALL], [CALL, ANSWER + "It rains.", IN_CALL + CALL]),
        ({"json_object": True}, None, [ANSWER + '{"a": [1]}'], [ANSWER + "3"]),
        ({"json_schema": json.dumps(SCHEMA)}, USE, [ANSWER + CALL, IN_CALL + CALL], [IN_CALL + "{}"]),
        ({"regex": r"a/b\/\d"}, None, [ANSWER + "a/b/3"], [ANSWER + "a/b"]),
        ({"choice": ["yes", 'n"o']}, None, [ANSWER + "yes", ANSWER + 'n"o'], [ANSWER + "y"]),
        ({"json_schema": SCHEMA}, FORCED, [IN_CALL + CALL], [ANSWER + CALL, IN_CALL + '{"town": 3}']),
    ],
)
def test_structures(
    compiler: GrammarCompiler,
    arguments: GenerateArguments,
    use: ToolUse | None,
    answers: list[str],
    others: list[str],
) -> None:
    structured = in_harmony(arguments, use)
    assert structured["skip_special_tokens"] is False
    for answer in answers:
        assert fits(compiler, structured, answer)
        assert fits(compiler, structured, THOUGHT + "<|start|>assistant" + answer)
    assert not any(fits(compiler, structured, other) for other in others)


def test_a_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="harmony"):
        in_harmony({"grammar": 'start: "a"'}, None)


def test_answers_without_a_structure_have_none(tmp_path: Path) -> None:
    assert in_harmony({"n": 1}, USE) == {"n": 1, "skip_special_tokens": False, "include_eos": False}
