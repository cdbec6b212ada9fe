"""Compiles structured output to llguidance grammars. Routers use them to refuse requests, workers to mask tokens.

The cost is bounded by the size limits of mesh.domain.structure and by llguidance's budgets. Budgets count work, not
time, so that router and workers reach the same result.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from checkpoint.gbnf import lark_of
from checkpoint.model_facts import read_model_facts
from checkpoint.tokenizer_files import load_tokenizer, own_end_token
from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import Structure, StructureKind, schemas_in

T = TypeVar("T")

# White space between JSON tokens: at most one blank. With more, weak models write blanks until they run out of tokens.
_JSON_WHITESPACE = " ?"
# An escape, or the beginning of a negated class: the dashes, or the bracket, that are its first members.
_NEGATED_CLASS = re.compile(r"\\.|\[\^(?:-+|\]?)", re.DOTALL)
_NUL = r"\x00-\x00"
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
# Keywords that assert nothing with these values, which schema generators write and llguidance refuses.
_ASSERT_NOTHING: dict[str, tuple[object, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
}
# Those that llguidance enforces. JSON Schema takes any other as an annotation.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
# llguidance may refuse a schema that has these and, in the same object or another one, a pattern for all names.
_NO_OTHER_PATTERN = frozenset({"patternProperties", "minProperties", "maxProperties"})
# The compiler recurses along chains of rules and references. The longest chain that fits into a structure needs about
# 50 MiB of stack; untouched stack takes no memory.
_STACK_BYTES = 256 << 20
# What llguidance says of a grammar without any text.
_NO_TEXT = "NoExtensionBias"
_MAX_CACHED_SIZE = 256 << 10
_MAX_MESSAGE_CHARS = 300
_stack_size = threading.Lock()


def _limits() -> LLParserLimits:
    """Budgets of about 20 ms per mask and 20 MiB per sequence; most texts need less than a hundredth."""
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_items_in_row=2_000,
        max_lexer_states=10_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


class GrammarCompiler:
    """Compiles structures for one model, with an LRU cache. May be called on any thread. The tokenizer is loaded when
    it is first needed.

    Each `scope` (tenant) has separate cache entries, so that compile times do not reveal another tenant's structures.
    """

    def __init__(self, model_dir: Path, *, max_cached_size: int = _MAX_CACHED_SIZE) -> None:
        self._model_dir = model_dir
        self._max_cached_size = max_cached_size
        self._cache: OrderedDict[tuple[str, Structure], LLMatcher] = OrderedDict()
        self._sizes: dict[tuple[str, Structure], int] = {}
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()  # guards the cache
        self._loading = threading.Lock()

    def compile(self, structure: Structure, scope: str = "") -> LLMatcher:
        """Return a matcher at the start of a text, which the caller may advance. Raises InvalidRequest."""
        key = scope, structure
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                return cached.deep_copy()
        tokenizer = self._load_tokenizer()
        matcher = _on_deep_stack(lambda: _compile(structure, tokenizer))
        # A state of `multipleOf` takes half as much memory as a character of the source, and needs none of those.
        size = structure.num_chars + structure.num_multiple_states // 2
        with self._lock:
            self._cache[key], self._sizes[key] = matcher, size
            while self.cached_size > self._max_cached_size and len(self._cache) > 1:
                del self._sizes[self._cache.popitem(last=False)[0]]
            return matcher.deep_copy()

    @property
    def cached_size(self) -> int:
        """Total size of the cached structures; compiled, they take up to a thousand times as many bytes."""
        return sum(self._sizes.values())

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                facts, tokenizer = read_model_facts(self._model_dir), load_tokenizer(self._model_dir)
                named = facts.eos_token_ids | own_end_token(tokenizer, self._model_dir)
                ends = sorted(id_ for id_ in named if id_ < facts.vocab_size)
                if not ends:
                    raise InvalidRequest("this model has no end-of-sequence token, which every structure needs")
                try:
                    self._tokenizer = LLTokenizer(_known_part(tokenizer, facts.vocab_size), facts.vocab_size, ends)
                except ValueError as error:
                    raise InvalidRequest(f"structured output cannot use this model's tokenizer: {error}") from error
            return self._tokenizer


def _known_part(tokenizer: Tokenizer, vocab_size: int) -> str:
    """The tokenizer as JSON, without the added tokens that the model has no numbers for, as those for images of a
    model that is served, or was published, without that part: llguidance refuses them.
    """
    source = tokenizer.to_str()
    if tokenizer.get_vocab_size() <= vocab_size:
        return source
    content = json.loads(source)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    return json.dumps(content)


def _compile(structure: Structure, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile, and compute the first mask, because llguidance defers a part of the work to it."""
    try:
        matcher = LLMatcher(tokenizer, _source(structure), log_level=0, limits=_limits())
    except ValueError as error:
        raise _refused(structure, str(error)) from None
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise _refused(structure, matcher.get_error())
    if not any(mask):
        raise _refused(structure, "no text fits it")
    return matcher


def _source(structure: Structure) -> str:
    if structure.kind is StructureKind.REGEX:
        return LLMatcher.grammar_from_regex(_whole_pattern(structure.source))
    if structure.kind is StructureKind.GRAMMAR:
        return LLMatcher.grammar_from_lark(_with_sound_schemas(lark_of(structure.source)))
    if structure.kind is StructureKind.CHOICE:
        return LLMatcher.grammar_from_regex("|".join(map(_escape, structure.choices)))
    schema = _sound_schema(structure.source) if structure.kind is StructureKind.JSON_SCHEMA else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_WHITESPACE})


def _sound_schema(source: str) -> str:
    """The schema, changed to mean in llguidance what it says; unchanged if it does."""
    try:
        schema = json.loads(source)
        keywords: set[str] = set()
        sound = _changed(schema, partial(_with_sound_patterns, keywords))
        sound = _changed(sound, _without_annotations)
        if not keywords & _NO_OTHER_PATTERN:
            sound = _changed(sound, _with_plain_names)
    except RecursionError:  # deeper than the compiler takes
        return source
    return source if sound == schema else json.dumps(sound)


def _with_sound_schemas(grammar: str) -> str:
    """The grammar, with the schemas in it made sound."""
    text, place = "", 0
    for schema in schemas_in(grammar):
        text += grammar[place : schema.start] + _sound_schema(grammar[schema.start : schema.end])
        place = schema.end
    return text + grammar[place:]


def _changed(schema: object, change: Callable[[dict[str, Any]], dict[str, Any]]) -> object:
    """The schema, with `change` made to it and to every schema in it, inner ones first."""
    if isinstance(schema, list):
        return [_changed(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            value = {name: _changed(part, change) for name, part in value.items()}
        elif key not in _VALUES:
            value = _changed(value, change)
        changed[key] = value
    return change(changed)


def _with_sound_patterns(keywords: set[str], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with sound patterns; `keywords` gets its keys."""
    keywords.update(schema)
    pattern, by_pattern = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema["pattern"] = _sound_pattern(pattern)
    if isinstance(by_pattern, dict):
        schema["patternProperties"] = {_sound_pattern(name): part for name, part in by_pattern.items()}
    return schema


def _without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that llguidance refuses though they assert nothing."""
    return {
        key: value
        for key, value in schema.items()
        if value not in _ASSERT_NOTHING.get(key, ())
        and not (key == "format" and isinstance(value, str) and value not in _FORMATS)
    }


def _with_plain_names(schema: dict[str, Any]) -> dict[str, Any]:
    """llguidance lets an additional name of an open object be spelt with escapes, and so be one of its properties:
    `"\\u0061"` for `"a"`. A name that matches a pattern is spelt without, and all names match the empty one.
    """
    if not schema.get("properties") or schema.get("additionalProperties", True) is not True:
        return schema
    others = {key: value for key, value in schema.items() if key != "additionalProperties"}
    # At the end, side by side: llguidance would not see them together if an `anyOf` came between them.
    return {**others, "patternProperties": {"": True}, "additionalProperties": False}


def _sound_pattern(pattern: str) -> str:
    """llguidance 1.9 lets a class with all control characters match an escaped quote and an escaped backslash, even if
    it excludes them, as `[^"]` does. So every negated class excludes one control character, U+0000.
    """
    whole = _whole_pattern(pattern)
    return _NEGATED_CLASS.sub(lambda found: found[0] if found[0][0] == "\\" else found[0] + _NUL, whole)


def _whole_pattern(pattern: str) -> str:
    """The pattern. Raises ValueError for a backslash that escapes nothing, which llguidance would drop."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("the pattern ends in a backslash that escapes nothing")
    return pattern


def _escape(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return "".join(char if char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _refused(structure: Structure, message: str) -> InvalidRequest:
    reason = message.strip().partition("\n<")[0]
    if reason == _NO_TEXT:
        reason = "no text fits it, or none that ends: does a rule or $ref need itself?"
    return InvalidRequest(f"{structure.kind} cannot be used: {reason[:_MAX_MESSAGE_CHARS]}")


def _on_deep_stack(call: Callable[[], T]) -> T:
    """Run `call` on a new thread with a stack for deep recursion. Return its result or raise its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a panic in the library is no Exception; the caller must not wait forever
            future.set_exception(error)

    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return future.result()
