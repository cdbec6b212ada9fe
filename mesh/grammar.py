"""Structures to grammars: which tokens may come next, by llguidance. Routers refuse with it, workers mask with it.

Compiling is bounded: by the size of what is compiled (mesh.domain.structure), and by llguidance's own budgets, which
count work and not time, so that router and workers come to the same verdict.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import Structure, StructureKind
from mesh.model_files import read_model_facts
from mesh.tokenizer_files import load_tokenizer

T = TypeVar("T")

# Between the tokens of JSON: one line break with an indentation, or a few spaces. Without a bound, a weak model may
# write spaces until it runs out of tokens.
_JSON_WHITESPACE = r"(\r?\n)?[ \t]{0,24}"
# The compiler recurses along chains of rules and references. The longest that fits into a structure takes some 50 MiB;
# only what is touched is real memory.
_STACK_BYTES = 256 << 20
_MAX_KEPT_CHARS = 256 << 10
_MAX_SHOWN = 300
_stack_size = threading.Lock()


def _limits() -> LLParserLimits:
    """About 20 ms of work for one mask, and 20 MiB of states for one sequence; a text rarely needs a hundredth."""
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
    """Compiled structures of one model, the most recently used ones kept. Any thread may call it; the tokenizer is
    read when it is first needed.
    """

    def __init__(self, model_dir: Path, *, max_kept_chars: int = _MAX_KEPT_CHARS) -> None:
        self._model_dir = model_dir
        self._max_kept_chars = max_kept_chars
        self._kept: OrderedDict[Structure, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()  # of what is kept
        self._loading = threading.Lock()

    def compile(self, structure: Structure) -> LLMatcher:
        """At the start of a text; the caller's own. Raises InvalidRequest that says what is wrong."""
        with self._lock:
            found = self._kept.get(structure)
            if found is not None:
                self._kept.move_to_end(structure)
                return found.deep_copy()
        tokenizer = self._load_tokenizer()
        matcher = _on_deep_stack(lambda: _compile(structure, tokenizer))
        with self._lock:
            self._kept[structure] = matcher
            while self.num_kept_chars > self._max_kept_chars and len(self._kept) > 1:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    @property
    def num_kept_chars(self) -> int:
        """Size of the structures that are kept compiled; each takes up to a thousand times as many bytes."""
        return sum(structure.num_chars for structure in self._kept)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                facts = read_model_facts(self._model_dir)
                if not facts.eos_token_ids:
                    raise InvalidRequest("this model has no end-of-sequence token, so no structure could end")
                try:
                    tokenizer = load_tokenizer(self._model_dir).to_str()
                    self._tokenizer = LLTokenizer(tokenizer, facts.vocab_size, sorted(facts.eos_token_ids))
                except ValueError as error:
                    raise InvalidRequest(f"structured output cannot use this model's tokenizer: {error}") from error
            return self._tokenizer


def _compile(structure: Structure, tokenizer: LLTokenizer) -> LLMatcher:
    """Also takes the first step, in which parts of the work are done that were put off."""
    try:
        matcher = LLMatcher(tokenizer, _source(structure), log_level=0, limits=_limits())
    except ValueError as error:
        raise _refused(structure, str(error)) from None
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise _refused(structure, matcher.get_error())
    if not any(first):
        raise _refused(structure, "no text fits it")
    return matcher


def _source(structure: Structure) -> str:
    if structure.kind is StructureKind.REGEX:
        return LLMatcher.grammar_from_regex(structure.source)
    if structure.kind is StructureKind.GRAMMAR:
        return LLMatcher.grammar_from_lark(structure.source)
    if structure.kind is StructureKind.CHOICE:
        return LLMatcher.grammar_from_regex("|".join(map(_literally, structure.choices)))
    schema = structure.source if structure.kind is StructureKind.JSON_SCHEMA else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_WHITESPACE})


def _literally(text: str) -> str:
    """A regular expression for just this text."""
    return "".join(char if char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _refused(structure: Structure, message: str) -> InvalidRequest:
    shown = message.strip().partition("\n<")[0]
    return InvalidRequest(f"{structure.kind} cannot be used: {shown[:_MAX_SHOWN]}")


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own with room for deep recursion; returns or raises what it does."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except (
            BaseException
        ) as error:  # a panic of the library's is no Exception, and its caller must not wait for ever
            future.set_exception(error)

    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return future.result()
