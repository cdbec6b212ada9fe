"""Values of arguments in calls that are written as in Python, such as `[f(city="Paris", days=[1, 2])]`."""

import ast
import json
import re

from gateway.openai.call_reader import escape_halves

_QUOTES = "'\""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
# Models also write regular expressions and paths, whose backslashes are no escapes.
_ESCAPE = re.compile(
    r"""\\(?:[\n\\'"abfnrtv0-7]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|(?P<none>))""",
)
_LITERALS = {"true": True, "false": False, "null": None}
"""JSON's names of values, which some models write."""


class PythonValue:
    """Reads one value, up to the comma or bracket after it, which it leaves. Returns the value once it is complete."""

    def __init__(self) -> None:
        self.is_done = False
        self._written: list[str] = []
        self._python: list[str] = []  # the same, with line breaks in texts as escapes
        self._quote = ""  # of the text that is open
        self._is_escaped = False
        self._is_apostrophe = False  # the last character may be one within a word, such as it's
        self._closings: list[str] = []

    def read(self, buffer: str) -> tuple[str, int]:
        """Return the JSON text if the buffer completes the value, and the number of characters that are read."""
        for number, char in enumerate(buffer):
            if self._is_apostrophe and char.isalpha():
                self._quote, self._python[-1] = "'", "\\'"
            self._is_apostrophe = False
            if not self._quote and (char in ")]}" or (char == "," and not self._closings)):
                if not self._closings:
                    self.is_done = True
                    return self.last(""), number
                self._closings.pop()
            self._written.append(char)
            self._python.append(_CONTROLS.get(char, char) if self._quote and not self._is_escaped else char)
            self._track_text(char)
        return "", len(buffer)

    def last(self, text: str) -> str:
        """Return the value's JSON, where `text` is the rest of it. Open texts and brackets are closed. Anything
        but a literal becomes a text.
        """
        closing = self._quote + "".join(reversed(self._closings))
        try:
            return _in_json(_literal("".join([*self._python, text]).strip() + closing))
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            written = "".join([*self._written, text]).strip()
            is_quoted = len(written) > 1 and written[0] == written[-1] and written[0] in _QUOTES
            return _in_json(written[1:-1] if is_quoted else written)

    def _track_text(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            if char == self._quote:
                self._is_apostrophe = char == "'" and self._written[-2].isalnum()
                self._quote = ""
        elif char in _QUOTES:
            self._quote = char
        elif char in _CLOSING:
            self._closings.append(_CLOSING[char])


class _Names(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node


def _literal(text: str) -> object:
    """Evaluate a literal, and nothing else."""
    text = _ESCAPE.sub(lambda escape: escape[0] if escape["none"] is None else r"\\", text)
    value: object = ast.literal_eval(_Names().visit(ast.parse(text, mode="eval")))
    return value


def _in_json(value: object) -> str:
    return escape_halves(json.dumps(value, ensure_ascii=False, allow_nan=False))
