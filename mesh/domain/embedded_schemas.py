"""JSON schemas inside a Lark grammar: each follows the word `%json`."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

# `%json`, and the lexemes in which these characters mean nothing: strings, regular expressions, comments and special
# tokens, as llguidance lexes them. An unclosed lexeme goes on to the end: otherwise the search for its end would be
# repeated for each of many.
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
