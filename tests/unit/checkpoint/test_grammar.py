"""What can be compiled, what is refused and how, and what is kept."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from checkpoint import grammar
from checkpoint.grammar import GrammarCompiler
from mesh.domain.errors import InvalidRequest
from mesh.domain.request import SamplingParams
from mesh.domain.structure import MAX_REGEX_CHARS, Structure, StructureKind
from tests.defects import Repaired
from tests.fakes.router_model import BOS_ID, EOS_ID, byte_level_tokenizer, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder)


def schema(content: Any) -> Structure:
    text = content if isinstance(content, str) else json.dumps(content)
    return Structure(StructureKind.JSON_SCHEMA, text)


def regex(source: str) -> Structure:
    return Structure(StructureKind.REGEX, source)


def lark(source: str) -> Structure:
    return Structure(StructureKind.GRAMMAR, source)


def choice(*texts: str) -> Structure:
    return Structure(StructureKind.CHOICE, choices=texts)


def accepts(compiler: GrammarCompiler, structure: Structure, text: str) -> bool:
    matcher = compiler.compile(structure)
    ids = byte_level_tokenizer().encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


LISTS = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
TRIPLED = "\n".join(f"{one}: {two} {two} {two}" for one, two in pairwise("ABCDEFGHIJKLMNOPQRS"))
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LONG = '{"a":[' + "1," * 5000 + "1]}"
NO_SCHEMAS = [('"', '"'), ("/", "/"), ("/\n", "/"), ('"x" // ', ""), ("# ", '\n"x"'), ("<", ">"), ('"', "")]
"""What may be around a schema, so that it is a text, an expression, a comment or a special token."""


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (schema(OBJECT), '{"a": 1, "b": [true, null]}', '{"b": 1}'),
        (schema(OBJECT), '{"a":1}', '{\n  "a": 1\n}'),
        (schema(OBJECT), '{ "a" : 1 }', '{  "a": 1}'),
        (schema({"type": "array", "items": {"enum": ["x", 2]}, "minItems": 1}), '["x",2]', "[]"),
        (schema({"type": "string", "pattern": "^a+$", "maxLength": 3}), '"aaa"', '"aaaa"'),
        (schema({"type": "string", "pattern": '^[^"]+$'}), '"a\\nb"', '"a\\"b"'),
        (schema({"type": "string", "pattern": r"^([^\\]|x)+$"}), '"a\\"b"', r'"a\\b"'),
        (schema({"items": {"anyOf": [{"pattern": r'^[^-"\\\n]$', "type": "string"}]}}), '["]"]', r'["\\"]'),
        (schema({"type": "string", "pattern": r'^[^]"]\[\^$'}), r'"\\[^"', r'"\"[^"'),
        (schema({"patternProperties": {'^[^"]$': {}}, "additionalProperties": False}), '{"a": 1}', r'{"\"": 1}'),
        (schema({"properties": {"pattern": {"enum": [{"pattern": "[^a]"}]}}}), '{"pattern":{"pattern":"[^a]"}}', "x"),
        (schema(LISTS), "[[],[[]]]", "[1]"),
        (schema({"type": "string", "format": "date"}), '"2024-02-29"', '"2024-2-9"'),
        (schema({}), '"any"', "nonsense"),
        (schema({"type": "array", "items": {"type": "number", "multipleOf": 0.25}}), "[1.75, 1000000]", "[0.3]"),
        (schema({"type": "integer", "multipleOf": 7_000_000}), "21000000", "21000001"),
        (schema({"additionalProperties": OBJECT, "propertyNames": {"type": "string"}}), '{"b": {"a": 1}}', '{"b": 1}'),
        (schema({"propertyNames": {}, "uniqueItems": False, "items": {"propertyNames": True}}), '[{"a":1}, {}]', "x"),
        (schema({"type": "string", "format": "password", "maxLength": 2, "writeOnly": True}), '"ab"', '"abc"'),
        (schema({"type": ["string", "null"], "format": "uri-reference"}), '"../a"', "1"),
        (schema({"properties": {"format": {"enum": ["x"], "format": "cuid"}}}), '{"format":"x"}', '{"format":"cuid"}'),
        (schema({"properties": {"a": {"const": {"format": "x"}}}}), '{"a":{"format":"x"}}', '{"a":{}}'),
        (Structure(StructureKind.JSON_OBJECT), '{"für": "日本"}', "[1]"),
        (regex(r"^[a-c]{2,}\d$"), "abc1", "a1"),
        (regex(r"für \p{L}+"), "für Äpfel", "für 1"),
        (choice("yes", "no\n", "(a|b)\\ /"), "(a|b)\\ /", "a"),
        (choice("a", "ab"), "ab", "abb"),
        (lark('start: "(" start? ")"'), "((()))", "(()"),
        (lark('root ::= "a" tail*\ntail ::= [0-9] | "-" root'), "a1-a2", "1"),
        (lark('root ::= "caf\\u00e9ab"'), "caféab", "caf\uE9AB"),
        (lark('root ::= "caf\\u00e9" [\\u00e0-\\u00ff]+ [^\\u0061-\\u007A]'), "caféàÿA", "caféàÿa"),
        (lark('root ::= "\\U0001f600" [\\U0001F600-\\U0001f602]'), "😀😂", "😀ὠ"),
        (lark(r'root ::= "\u0022\u005c\u000a\[\]" [\u005d\u005e] [\u005e\u002d\u005a]'), '"\\\n[]^-', '"\\\n[]^_'),
        (lark('root ::= "\\\\u00e9" # \\ud800'), r"\u00e9", "é"),
        (lark('root ::= start "-" Start\nstart ::= "a" | "(" start ")"\nStart ::= "start"'), "(a)-start", "a-a"),
        (lark('root ::= start "start" [start]\nstart ::= "a"'), "astarts", "a"),
        (lark('root ::= [a&&b]+ [x~~y] [+--] [^&&a]'), "&b~,b", "bbx+&"),
        (lark('root ::= [^-&&a] [-~~] [^--0]'), "b-z", "a-z"),
        (lark('root ::= . "b"'), "\nb", "b"),
        (lark('root ::= ("a"+)? (("b"{2}){0,2} )+ ( "." | [.]+ )*'), "abbbb..", "ab"),
        (lark('root ::= "a\n\tb" [\n\t]'), "a\n\tb\t", "a b\t"),
        (lark('root ::= aB a-b a_b\naB ::= "x"\na-b ::= "y"\na_b ::= "z" a_b?'), "xyzz", "xxxx"),
        (
            lark(
                'root ::= A a 2d-kv é __ Root\n'
                'A ::= "A" A?\na ::= "a"\n2d-kv ::= "2"\né ::= "3"\n__ ::= "4"\nRoot ::= "."'
            ),
            "AAa234.",
            "aaa234.",
        ),
        (lark('start: "::=" | "b"'), "::=", "a"),
        (lark('start: "x: " value\nvalue: %json {"type": "boolean"}'), "x: true", "x: 1"),
        (lark('start: s s\ns: %json{"type":"string","pattern":"^[^\\"]$"}\n'), '"a""b"', r'"a""\""'),
    ],
)  # fmt: skip
def test_texts(compiler: GrammarCompiler, structure: Structure, good: str, bad: str) -> None:
    structure.validate()
    assert accepts(compiler, structure, good)
    assert not accepts(compiler, structure, bad)


@pytest.mark.parametrize("name", [*grammar._FORMATS, "password", "binary", "file-path", "json-string", "cuid", "x"])
def test_formats_are_enforced_or_annotations(name: str) -> None:
    unknown = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps({"format": name})))
    assert bool(unknown) == (name not in grammar._FORMATS)


INTEGERS = {"properties": {"a": {"type": "integer"}, 'é"\\': {"type": "integer"}}}
"""An open object. No name of it may come again: `a` with an escape would have any value."""
OPEN = [
    schema(INTEGERS),
    schema({"additionalProperties": True, "type": "object", **INTEGERS, "required": ["a"]}),
    schema({"$ref": "#/$defs/o", "$defs": {"o": INTEGERS}}),
    schema({"$ref": "#/$defs/o", "properties": {"b": {}}, "$defs": {"o": INTEGERS}}),
    schema({"anyOf": [INTEGERS, {"type": "string"}]}),
    schema({"properties": {"b": {}}, "anyOf": [INTEGERS, {"required": ["b"]}], "additionalProperties": True}),
    schema({"allOf": [{"required": ["a"]}, INTEGERS, {"additionalProperties": {}}]}),
]
EXTRA_NAMES = ["c", "aa", "", "ä", "日本 x", "😀", '\\"', r"\\", r"\n", r"\u0001"]


@pytest.mark.parametrize("structure", OPEN)
def test_no_name_of_an_open_object_comes_again(compiler: GrammarCompiler, structure: Structure) -> None:
    start = r'{"a": 1, "é\"\\": 2'
    assert accepts(compiler, structure, start + "}")
    for name in EXTRA_NAMES:
        assert accepts(compiler, structure, f'{start}, "{name}": ["\\n", {{"a": "x"}}]}}'), name
    for name in ("a", r"\u0061", r"é\"\\", r"\u00e9\"\\", r"\u00E9\"\\", r"é\u0022\\", r"é\"\u005c"):
        assert not accepts(compiler, structure, f'{start}, "{name}": "x"}}'), name


def test_open_objects_within_others(compiler: GrammarCompiler) -> None:
    outer = schema({"properties": {"o": INTEGERS, "properties": {"type": "array", "items": INTEGERS}}})
    assert accepts(compiler, outer, '{"o": {"a": 1, "ä": "x"}, "properties": [{"a": 1, "": "x"}], "b": "x"}')
    for text in (r'{"o": {"a": 1, "\u0061": "x"}}', r'{"properties": [{"\u0061": "x"}]}', r'{"\u006f": {"a": "x"}}'):
        assert not accepts(compiler, outer, text), text
    text = lark(f"start: %json {json.dumps(INTEGERS)}")
    assert accepts(compiler, text, '{"a": 1, "ä": "x"}')
    assert not accepts(compiler, text, r'{"a": 1, "\u0061": "x"}')


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (schema({**INTEGERS, "additionalProperties": {"type": "string"}}), '{"a":1,"b":"x"}', '{"a":1,"b":2}'),
        (schema({"allOf": [INTEGERS, {"patternProperties": {"^x": False}}]}), '{"a":1,"b":2}', '{"a":1,"x":2}'),
        (schema({"allOf": [INTEGERS, {"properties": {"a": {}}, "additionalProperties": False, "minProperties": 1}]}),
         '{"a":1}', '{"a":1,"b":2}'),
        (schema({"required": ["a"], "properties": {"a": {}}, "maxProperties": 2}), '{"a":1,"b":2}', '{"b":2}'),
    ],
)  # fmt: skip
def test_objects_that_say_more_of_other_names(
    compiler: GrammarCompiler, structure: Structure, good: str, bad: str
) -> None:
    assert accepts(compiler, structure, good)
    assert not accepts(compiler, structure, bad)


@pytest.mark.parametrize(
    ("structure", "complaint"),
    [
        (schema("{"), "json_schema is not valid JSON"),
        (schema('{"items":' * 2000 + "1" + "}" * 2000), "json_schema is not valid JSON, or nested too deeply"),
        (schema("3"), "json_schema must be a JSON object"),
        (schema(True), "json_schema must be a JSON object"),
        (schema({"description": "x" * 70_000}), "json_schema has 70019 characters, at most 65536"),
        (schema([{"pattern": "a?" * 1500}, {"patternProperties": {"b" * 1500: {}}}]), "JSON object"),
        (schema({"items": {"pattern": "a?" * 1500, "patternProperties": {"b" * 1500: {}}}}), "have 4500 characters"),
        (schema({"multipleOf": 5_000_011}), "json_schema: the values of `multipleOf` take over 100000 states"),
        (schema({"allOf": [{"multipleOf": step} for step in (97, 89, 83)]}), "the values of `multipleOf`"),
        (schema({"properties": {f"k{i}": {"multipleOf": 10_007} for i in range(10)}}), "the values of `multipleOf`"),
        (schema({"multipleOf": 10**1000 + 7}), "the values of `multipleOf`"),
        (lark('start: a\na: %json {"multipleOf": 5000011}'), "grammar: the values of `multipleOf`"),
        (regex("a?" * MAX_REGEX_CHARS), "regex has 8192 characters, at most 4096"),
        (regex(""), "regex is empty"),
        (lark("start: " + '"a"' * 4000), "grammar without its JSON schemas has 12007 characters, at most 8192"),
        (lark('start: %json {"title": "' + "x" * 70_000 + '"}'), "grammar: its JSON schemas have 70013 characters"),
        (lark('start: %json {"title": "' + "x" * 80_000 + '"}'), "grammar has 80026 characters, at most 73728"),
        (lark('start: %json {"pattern": "' + "a?" * 3000 + '"}'), "grammar: the patterns have 6000 characters"),
        *((lark(f"start: {before}%json{LONG}{after}"), "without its JSON schemas has") for before, after in NO_SCHEMAS),
        (choice(), "choice must have 1 to 1024 texts, got 0"),
        (choice("a", ""), "choice: a text is empty"),
    ],
)  # fmt: skip
def test_what_is_too_much_is_not_even_tried(structure: Structure, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        SamplingParams(structure=structure).validate(100)


@pytest.mark.parametrize(
    ("structure", "complaint"),
    [
        (schema({"type": "array", "uniqueItems": True}), "json_schema cannot be used: .*uniqueItems"),
        (schema({"propertyNames": {"pattern": "^a"}}), "json_schema cannot be used: .*propertyNames"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum .3. is greater than maximum"),
        (schema({"$ref": "http://example.org/schema"}), "json_schema cannot be used"),
        (schema({"type": "nonsense"}), "json_schema cannot be used"),
        (regex("(a"), "regex cannot be used: .*invalid regex"),
        (regex("(?=a)b"), "regex cannot be used"),
        (regex("yes\\"), "regex cannot be used: the pattern ends in a backslash that escapes nothing"),
        (schema({"type": "string", "pattern": "^a\\\\\\"}), "json_schema cannot be used: the pattern ends in a back"),
        (schema({"patternProperties": {"a\\": True}}), "json_schema cannot be used: the pattern ends in a backslash"),
        (regex(r"[^\s\S]"), "regex cannot be used: no text fits it"),
        (schema({"$ref": "#"}), "json_schema cannot be used: no text fits it, or none that ends"),
        (lark("start: start"), "grammar cannot be used: no text fits it, or none that ends"),
        (lark("start: nobody"), "grammar cannot be used: .*unknown name"),
        (lark("start: " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
        (lark(f'start: A\n{TRIPLED}\nS: "x"'), "too big"),
        (lark("start: A\nA: /a/ & /b/"), "grammar cannot be used"),
        (lark("root ::= other"), "grammar cannot be used: read as GBNF.*Rule 'other' not found"),
        (lark('start ::= "a"'), "grammar cannot be used: read as GBNF.*No 'root' rule found"),
        (lark('root ::= "\\ud83d"'), r"read as GBNF.*\\ud83d is half of a character"),
        (lark('root ::= "\\U00110000"'), "grammar cannot be used: read as GBNF"),
        (lark("root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "grammar cannot be used: read as GBNF"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_words(
    compiler: GrammarCompiler, structure: Structure, complaint: str
) -> None:
    structure.validate()
    with pytest.raises(InvalidRequest, match=complaint):
        compiler.compile(structure)


def test_long_chains_of_rules_break_no_stack(compiler: GrammarCompiler) -> None:
    """The longest that fit: a process that overflows its stack would be gone, and this test with it."""
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(700)) + '\nr700: "a"'
    terminals = rules.replace("r", "R").replace("staRt", "start")
    for chain in (lark(rules), lark(terminals)):
        chain.validate()
        assert accepts(compiler, chain, "a")
    refs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1400)} | {"d1400": {}}
    references = Structure(StructureKind.JSON_SCHEMA, json.dumps({"$defs": refs, "$ref": "#/$defs/d0"}))
    references.validate()
    assert accepts(compiler, references, "[[[]]]")


def test_only_as_much_is_kept_as_may_be(folder: Path) -> None:
    compiler = GrammarCompiler(folder, max_cached_size=60)
    first, *others = [regex(f"[a-{letter}]" * 5) for letter in "bcdefgh"]
    for structure in (first, others[0], first, *others[:2]):
        compiler.compile(structure)
    assert compiler.cached_size <= 60
    assert accepts(compiler, first, "abbab")
    large = regex("a" * 100)
    assert accepts(compiler, large, "a" * 100)
    assert compiler.cached_size == 100


def test_automata_count_as_what_they_take(folder: Path, repaired: Repaired) -> None:
    """47 characters of source, and 41 MiB once compiled."""
    compiler = GrammarCompiler(folder, max_cached_size=3000)
    for step in (2003, 2011, 2017):
        compiler.compile(schema({"type": "integer", "multipleOf": step}))
    compiler.compile(lark('start: a\na: %json {"multipleOf": 1999}'))
    assert 1900 < compiler.cached_size <= 3000
    assert schema({"multipleOf": 0.99990}).num_multiple_states == 9999
    assert schema({"items": {"multipleOf": 50}, "allOf": [{"$ref": "#"}, {"multipleOf": 7}]}).num_multiple_states == 105
    repaired("D33", "half a character for each state of its automaton: at most 5 such entries are kept")


def test_unclosed_texts_cost_no_more_than_closed_ones(compiler: GrammarCompiler, repaired: Repaired) -> None:
    worst_ms = 0.0
    for text in ("[" * 8000, "[\\" * 4000, '"\\' * 4000, "[\\[" * 2600, '"[' * 4000, "[" * 7999 + "\\"):
        began_s = time.process_time()
        with pytest.raises(InvalidRequest, match="grammar cannot be used"):
            compiler.compile(lark(f"root ::= {text}"))
        worst_ms = max(worst_ms, 1000 * (time.process_time() - began_s))
    assert worst_ms < 100
    repaired("D35", f"refused in {worst_ms:.0f} ms")


def test_ignore_eos_contradicts() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos contradicts json_object"):
        SamplingParams(structure=Structure(StructureKind.JSON_OBJECT), ignore_eos=True).validate(100)


def test_the_tokenizers_own_end_token_ends_a_structure(tmp_path: Path) -> None:
    """As it ends any other answer, whether config.json names another one or none."""
    folder = write_checkpoint(tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    for configured in (None, BOS_ID):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": configured}))
        matcher = GrammarCompiler(folder).compile(choice("a"))
        ids = byte_level_tokenizer().encode("a", add_special_tokens=False).ids
        assert matcher.consume_tokens([*ids, EOS_ID])


def test_a_model_without_an_end_has_no_structures(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "endless")
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        GrammarCompiler(folder).compile(choice("a"))


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    """Gemma 3 1B has no number for the last one, which stands for images. Such a token is in no mask, and ends
    nothing.
    """
    folder = write_checkpoint(tmp_path / "more")
    tokenizer = byte_level_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    ends = [EOS_ID, vocab_size, vocab_size + 5]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size, "eos_token_id": ends}))
    compiler = GrammarCompiler(folder)
    assert accepts(compiler, schema(OBJECT), '{"a": 1}')
    assert not accepts(compiler, schema(OBJECT), '{"a": "1"}')
    assert len(compiler.compile(lark("start: /.*/")).compute_bitmask()) * 8 < vocab_size + 32
    with pytest.raises(InvalidRequest, match="unknown special token"):
        compiler.compile(lark("start: <image>"))


def _sentencepiece() -> Tokenizer:
    """As Llama 2 has it: words begin with ▁, and bytes that are no token are spelt <0xNN>."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'yeso{}":', "▁yes", "yes"]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def test_sentencepiece(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "pieces")
    tokenizer = _sentencepiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    matcher = GrammarCompiler(folder).compile(choice("yes", "é"))
    allowed = [
        tokenizer.id_to_token(id_) for id_ in range(tokenizer.get_vocab_size()) if matcher.validate_tokens([id_])
    ]
    assert sorted(allowed) == ["<0x79>", "<0xC3>", "y", "yes"]
    spelt = [tokenizer.token_to_id(token) for token in ("<0xC3>", "<0xA9>")]
    assert matcher.consume_tokens([*spelt, EOS_ID])


def test_a_tokenizer_nobody_can_read_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "odd")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="cannot use this model's tokenizer"):
        GrammarCompiler(folder).compile(choice("a"))


def test_the_time_tells_nobody_what_another_tenant_uses(folder: Path, repaired: Repaired) -> None:
    """Work is counted, not time: a structure that another scope has had compiled is compiled again."""
    compiler, compiled = GrammarCompiler(folder), list[Structure]()

    def counting(structure: Structure, tokenizer: LLTokenizer) -> LLMatcher:
        compiled.append(structure)
        return compile_structure(structure, tokenizer)

    compile_structure = grammar._compile
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grammar, "_compile", counting)
        for scope in ("alice", "alice", "bob", "bob", "alice"):
            compiler.compile(schema(OBJECT), scope)
    assert compiled == [schema(OBJECT)] * 2, "once for each"
    repaired("D18", "bob's first use of alice's schema is compiled anew at router and workers, like any fresh one")


def test_white_space_cannot_go_on(compiler: GrammarCompiler, repaired: Repaired) -> None:
    """However much a model likes to write blanks, line breaks or tabs: behind one blank only JSON can come."""
    matcher = compiler.compile(schema(OBJECT))
    blank, *others = (byte_level_tokenizer().encode(each).ids[0] for each in " \n\t")
    assert matcher.try_consume_tokens(byte_level_tokenizer().encode("{").ids) == 1
    assert matcher.try_consume_tokens([others[0]]) == matcher.try_consume_tokens([others[1]]) == 0
    assert matcher.try_consume_tokens([blank, blank]) == 1
    repaired("F11", "JSON has at most one blank between two tokens, and no line breaks")


VLLM_GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


def test_white_space_that_may_be_what_follows(compiler: GrammarCompiler) -> None:
    """llama.cpp's own example, its white space as a rule that recurs, and other spellings."""
    equations = "a=1\n(b_2) *3 =4\n\n"
    recurring = ARITHMETIC.replace(r"[ \t\n]*", r"([ \t\n] ws)?")
    for source in (ARITHMETIC, recurring, ARITHMETIC.replace(r'"\n"', r'"\x0A"') + "# end"):
        assert accepts(compiler, lark(source), equations)
        assert not accepts(compiler, lark(source), equations.rstrip("\n"))
    once = lark('root ::= "a" blanks "\\n"\nblanks ::= [\\n-]+ # some')
    assert accepts(compiler, once, "a-\n\n")
    assert not accepts(compiler, once, "a\n")


def test_the_notation_of_vllms_users(compiler: GrammarCompiler, repaired: Repaired) -> None:
    statement = "SELECT col_1  from table_2  where col_2 = 1 "
    assert accepts(compiler, lark(VLLM_GRAMMAR), statement)
    assert not accepts(compiler, lark(VLLM_GRAMMAR), statement.replace("1", "3"))
    repaired(
        "F10", "guided_grammar in GBNF is converted to Lark by llguidance, or refused with the place and the dialect"
    )
