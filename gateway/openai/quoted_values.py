"""Values of arguments as Gemma 4 writes them, such as `{days:[1,2],city:<|"|>Paris<|"|>}`: JSON with bare keys, and
with special marks around texts in place of quotes and escapes.
"""

import json
import re

from mesh.domain.json_text import parse_json

_CLOSING = {"[": "]", "{": "}"}
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}
_BARE = re.compile(r"[^\[\]{},:]+")


class QuotedValue:
    """Reads one value, up to the comma or bracket after it, which it leaves. Returns the value once it is complete."""

    def __init__(self, quote: str) -> None:
        self.is_done = False
        self._quote = quote
        self._written: list[str] = []
        self._is_open = False  # within a text
        self._num_since_quote = 0
        self._closings: list[str] = []

    def read(self, buffer: str) -> tuple[str, int]:
        """Return the JSON text if the buffer completes the value, and the number of characters that are read."""
        for number, char in enumerate(buffer):
            if not self._is_open and (char in "]}" or (char == "," and not self._closings)):
                if not self._closings:
                    self.is_done = True
                    return self.last(""), number
                self._closings.pop()
            self._written.append(char)
            self._track_text(char)
        return "", len(buffer)

    def last(self, text: str) -> str:
        """Return the value's JSON, where `text` is the rest of it. Open texts and brackets are closed. Anything that is
        no such value becomes a text.
        """
        written = "".join([*self._written, text]).strip()
        closing = (self._quote if self._is_open else "") + "".join(reversed(self._closings))
        parts = (written + closing).split(self._quote)
        in_json = "".join(_quoted(part) if number % 2 else _with_quotes(part) for number, part in enumerate(parts))
        try:
            parse_json(in_json)
        except ValueError:
            return _quoted(written.replace(self._quote, ""))
        return in_json

    def _track_text(self, char: str) -> None:
        self._num_since_quote += 1
        size = len(self._quote)
        if char == self._quote[-1] and self._num_since_quote >= size:
            if "".join(self._written[-size:]) == self._quote:
                self._is_open, self._num_since_quote = not self._is_open, 0
        elif char in _CLOSING and not self._is_open:
            self._closings.append(_CLOSING[char])


def _with_quotes(text: str) -> str:
    """Text between strings, with quotes around its bare words."""
    return _BARE.sub(lambda found: _bare(found[0], is_key=text[found.end() : found.end() + 1] == ":"), text)


def _bare(word: str, *, is_key: bool) -> str:
    stripped = word.strip()
    if not stripped:
        return ""
    if is_key:
        return _quoted(stripped)
    if stripped.lower() in _LITERALS:
        return _LITERALS[stripped.lower()]
    try:
        parse_json(stripped, parse_constant=_quoted)
    except ValueError:
        return _quoted(stripped)
    return stripped


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
