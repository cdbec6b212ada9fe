"""Structured output: the form that a generated text must have. Limits on size bound the cost of compilation."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mesh.domain.errors import InvalidRequest

MAX_SCHEMA_CHARS = 64 << 10
MAX_REGEX_CHARS = 4 << 10
MAX_GRAMMAR_CHARS = 8 << 10
MAX_CHOICE_CHARS = 16 << 10
MAX_CHOICE_TEXTS = 1024


class StructureKind(StrEnum):
    """The notation of a structure."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """`source` is a JSON schema, a regular expression or a Lark grammar; `choices` lists the texts of a choice. The
    kind JSON_OBJECT needs neither.
    """

    kind: StructureKind
    source: str = ""
    choices: tuple[str, ...] = ()

    @property
    def num_chars(self) -> int:
        """Size of the text that must be compiled."""
        return len(self.source) + sum(map(len, self.choices))

    def validate(self) -> None:
        """Raise InvalidRequest if the structure is too large or empty. Compilation may still fail later."""
        if self.kind is StructureKind.JSON_SCHEMA:
            _at_most(self, MAX_SCHEMA_CHARS)
            _check_schema(self.source)
        elif self.kind is StructureKind.REGEX:
            _at_most(self, MAX_REGEX_CHARS)
        elif self.kind is StructureKind.GRAMMAR:
            _at_most(self, MAX_GRAMMAR_CHARS)
        elif self.kind is StructureKind.CHOICE:
            _check_choices(self)
        if self.kind in (StructureKind.REGEX, StructureKind.GRAMMAR) and not self.source:
            raise InvalidRequest(f"{self.kind} is empty")


def _at_most(structure: Structure, limit: int) -> None:
    if structure.num_chars > limit:
        raise InvalidRequest(
            f"{structure.kind} has {structure.num_chars} characters, at most {limit} are allowed: "
            "larger ones take too long to compile"
        )


def _check_choices(structure: Structure) -> None:
    _at_most(structure, MAX_CHOICE_CHARS)
    if not 1 <= len(structure.choices) <= MAX_CHOICE_TEXTS:
        raise InvalidRequest(f"choice must have 1 to {MAX_CHOICE_TEXTS} texts, got {len(structure.choices)}")
    if not all(structure.choices):
        raise InvalidRequest("choice: a text is empty")


def _check_schema(source: str) -> None:
    try:
        schema = json.loads(source)
        num_chars = _pattern_chars(schema)
    except (ValueError, RecursionError):
        raise InvalidRequest("json_schema is not valid JSON, or nested too deeply") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema must be a JSON object")
    if num_chars > MAX_REGEX_CHARS:
        raise InvalidRequest(
            f"json_schema: the patterns have {num_chars} characters, at most {MAX_REGEX_CHARS} are allowed"
        )


def _pattern_chars(schema: Any) -> int:
    """Count the characters of all regular expressions in a schema; they cost most to compile."""
    if isinstance(schema, list):
        return sum(map(_pattern_chars, schema))
    if not isinstance(schema, dict):
        return 0
    pattern, properties = schema.get("pattern"), schema.get("patternProperties")
    num_chars = len(pattern) if isinstance(pattern, str) else 0
    num_chars += sum(map(len, properties)) if isinstance(properties, dict) else 0
    return num_chars + sum(map(_pattern_chars, schema.values()))
