"""Structured output: the form that a text must have, with the checks of every public API. Limits on its size bound the
cost of compiling it, which `checkpoint/grammar.py` does.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

from mesh.domain.errors import InvalidRequest

MAX_SCHEMA_CHARS = 64 << 10
MAX_REGEX_CHARS = 4 << 10
# Of a grammar without the JSON schemas in it, which may have MAX_SCHEMA_CHARS together.
MAX_GRAMMAR_CHARS = 8 << 10
# States of the automata for `multipleOf`: about a second and 100 MB to compile.
MAX_MULTIPLE_STATES = 100_000
MAX_OPTION_CHARS = 16 << 10
MAX_OPTIONS = 1024

# `%json`, and the lexemes in which these characters mean nothing: strings, regular expressions, comments and special
# tokens, as llguidance lexes them. An unclosed lexeme goes on to the end: otherwise the search for its end would be
# repeated for each of many.
_LEXEME = re.compile(
    r'%json\s*|"(?:\\.|[^"\\])*+(?:"|\\?\Z)|/(?:\\.|[^/\\])++(?:/|\\?\Z)|(?:\#|//)[^\n]*|<[^<>\s]+>', re.DOTALL
)


class StructureKind(StrEnum):
    """The notation of a structure."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of a text: `source` is a JSON schema, a regular expression or a Lark grammar; `choices` lists the texts
    of a choice. The kind JSON_OBJECT needs neither.
    """

    kind: StructureKind
    source: str = ""
    choices: tuple[str, ...] = ()

    @property
    def num_chars(self) -> int:
        """Size of the text that must be compiled."""
        return len(self.source) + sum(map(len, self.choices))

    @property
    def num_multiple_states(self) -> int:
        """States of the automata for `multipleOf`; see `_multiple_states`. For structures that can be compiled."""
        if self.kind is StructureKind.JSON_SCHEMA:
            return _multiple_states(_objects(json.loads(self.source)))
        return _multiple_states(_embedded_objects(self.source)) if self.kind is StructureKind.GRAMMAR else 0

    @property
    def num_embedded_chars(self) -> int:
        """Size of the JSON schemas in a grammar."""
        return sum(schema.end - schema.start for schema in schemas_in(self.source))

    def validate(self) -> None:
        """Raise InvalidRequest if the structure is too large or empty. Compilation may still fail later."""
        if self.kind is StructureKind.JSON_SCHEMA:
            _at_most(f"{self.kind} has", self.num_chars, MAX_SCHEMA_CHARS)
            _check_schema(self.source)
            _check_multiples(self)
        elif self.kind is StructureKind.REGEX:
            _at_most(f"{self.kind} has", self.num_chars, MAX_REGEX_CHARS)
        elif self.kind is StructureKind.GRAMMAR:
            _check_grammar(self)
            _check_multiples(self)
        elif self.kind is StructureKind.CHOICE:
            _check_choices(self)
        if self.kind in (StructureKind.REGEX, StructureKind.GRAMMAR) and not self.source:
            raise InvalidRequest(f"{self.kind} is empty")


def _at_most(has: str, num_chars: int, limit: int) -> None:
    if num_chars > limit:
        raise InvalidRequest(
            f"{has} {num_chars} characters, at most {limit} are allowed: larger ones take too long to compile"
        )


def _check_grammar(structure: Structure) -> None:
    _at_most(f"{structure.kind} has", structure.num_chars, MAX_GRAMMAR_CHARS + MAX_SCHEMA_CHARS)
    num_embedded = structure.num_embedded_chars
    _at_most(f"{structure.kind} without its JSON schemas has", structure.num_chars - num_embedded, MAX_GRAMMAR_CHARS)
    _at_most(f"{structure.kind}: its JSON schemas have", num_embedded, MAX_SCHEMA_CHARS)
    _check_patterns(structure.kind, _embedded_objects(structure.source))


def _check_choices(structure: Structure) -> None:
    _at_most(f"{structure.kind} has", structure.num_chars, MAX_OPTION_CHARS)
    if not 1 <= len(structure.choices) <= MAX_OPTIONS:
        raise InvalidRequest(f"choice must have 1 to {MAX_OPTIONS} texts, got {len(structure.choices)}")
    if not all(structure.choices):
        raise InvalidRequest("choice: a text is empty")


def _check_schema(source: str) -> None:
    try:
        schema = json.loads(source)
        objects = list(_objects(schema))
    except (ValueError, RecursionError):
        raise InvalidRequest("json_schema is not valid JSON, or nested too deeply") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema must be a JSON object")
    _check_patterns(StructureKind.JSON_SCHEMA, objects)


def _check_patterns(kind: StructureKind, objects: Iterable[dict[str, object]]) -> None:
    num_chars = sum(map(_pattern_chars, objects))
    if num_chars > MAX_REGEX_CHARS:
        raise InvalidRequest(f"{kind}: the patterns have {num_chars} characters, at most {MAX_REGEX_CHARS} are allowed")


def _embedded_objects(grammar: str) -> Iterator[dict[str, object]]:
    for schema in schemas_in(grammar):
        with suppress(RecursionError):  # deeper than the compiler takes
            yield from _objects(schema.value)


def _objects(schema: object) -> Iterator[dict[str, object]]:
    """All JSON objects in a schema, from the outside in."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _objects(part)


def _pattern_chars(schema: dict[str, object]) -> int:
    """Count the characters of the regular expressions of an object; they cost most to compile."""
    pattern, properties = schema.get("pattern"), schema.get("patternProperties")
    num_chars = len(pattern) if isinstance(pattern, str) else 0
    return num_chars + (sum(map(len, properties)) if isinstance(properties, dict) else 0)


def _check_multiples(structure: Structure) -> None:
    """Refuse values of `multipleOf` whose automata are too large. The compiler's budgets do not count their states."""
    if structure.num_multiple_states > MAX_MULTIPLE_STATES:
        raise InvalidRequest(
            f"{structure.kind}: the values of `multipleOf` take over {MAX_MULTIPLE_STATES} states to follow: "
            "use smaller or fewer"
        )


def _multiple_states(objects: Iterable[dict[str, object]]) -> int:
    """Count the states of the automata for `multipleOf`: one for each remainder. Where `allOf`, references and the like
    combine them, it is the remainders of a common multiple.
    """
    objects = list(objects)
    steps = [step for schema in objects if (step := _digits(schema.get("multipleOf")))]
    num_places = len(steps) + sum("$ref" in schema for schema in objects)
    return math.lcm(*steps) * num_places if steps else 0


def _digits(step: object) -> int:
    """A step without its sign, decimal point and trailing zeros, which cost no states; 0 if it is no number."""
    if isinstance(step, bool) or not isinstance(step, int | float):
        return 0
    decimal = Decimal(repr(step))
    return int("".join(map(str, decimal.as_tuple().digits)).rstrip("0") or "0") if decimal.is_finite() else 0


class EmbeddedSchema(NamedTuple):
    """A JSON object at `grammar[start:end]`."""

    start: int
    end: int
    value: dict[str, object]


def schemas_in(grammar: str) -> Iterator[EmbeddedSchema]:
    """The JSON objects behind `%json`, in order. Others are left out: the compiler refuses them, or they are as small
    as `true`.
    """
    decoder, place = json.JSONDecoder(), 0
    while found := _LEXEME.search(grammar, place):
        place = found.end()
        if not found[0].startswith("%"):
            continue
        try:
            value, end = decoder.raw_decode(grammar, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield EmbeddedSchema(place, end, value)
            place = end
