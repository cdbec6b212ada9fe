"""The JSON schemas in a grammar of Lark's notation, which are behind `%json`."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

# `%json`, and what may hide one that is none: texts, regular expressions, comments and special tokens, as llguidance
# lexes them. Unclosed ones go on to the end: otherwise each of many would be looked for there in turn.
_LEXEME = re.compile(
    r'%json\s*|"(?:\\.|[^"\\])*+(?:"|\\?\Z)|/(?:\\.|[^/\\])++(?:/|\\?\Z)|(?:\#|//)[^\n]*|<[^<>\s]+>', re.DOTALL
)


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
