"""Values of arguments in calls that are written as in Python, such as `[f(city="Paris", days=[1, 2])]`."""

import ast
import json
import re

_QUOTES = "'\""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# What may follow a backslash. Models also write regular expressions and paths, whose backslashes Python keeps, too.
_ESCAPED = frozenset("\n\\'\"abfnrtv01234567xuUN")
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
_LITERALS = {"true": True, "false": False, "null": None}
"""JSON's names of values, which some models write."""
_HALF = re.compile("[\ud800-\udfff]")


class PythonValue:
    """Reads one value, up to the comma or the bracket behind it, which it leaves. Returns it once it is complete."""

    def __init__(self) -> None:
        self.is_done = False
        self._texts: list[str] = []
        self._quote = ""  # of the text that is open
        self._is_escaped = False
        self._closings: list[str] = []

    def read(self, buffer: str) -> tuple[str, int]:
        """Return the JSON text if the buffer completes the value, and the number of characters that are read."""
        for number, char in enumerate(buffer):
            if not self._quote and (char in ")]}" or (char == "," and not self._closings)):
                if not self._closings:
                    self.is_done = True
                    return self.last(""), number
                self._closings.pop()
            self._texts.append(self._in_text(char) if self._quote else self._outside(char))
        return "", len(buffer)

    def last(self, text: str) -> str:
        """Return the value's JSON, where `text` is the rest of it. Open texts and brackets are closed."""
        written = "".join([*self._texts, text]).strip() + self._quote + "".join(reversed(self._closings))
        try:
            return _in_json(_literal(written))
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            is_quoted = len(written) > 1 and written[0] == written[-1] and written[0] in _QUOTES
            return _in_json(written[1:-1] if is_quoted else written)

    def _outside(self, char: str) -> str:
        if char in _QUOTES:
            self._quote = char
        elif char in _CLOSING:
            self._closings.append(_CLOSING[char])
        return char

    def _in_text(self, char: str) -> str:
        """Return the character as Python's text has it: models break lines in texts without escapes."""
        if self._is_escaped:
            self._is_escaped = False
            return char if char in _ESCAPED else f"\\{char}"
        self._is_escaped = char == "\\"
        if char == self._quote:
            self._quote = ""
        return _CONTROLS.get(char, char)


class _Names(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node


def _literal(text: str) -> object:
    """Evaluate a literal, and nothing else."""
    value: object = ast.literal_eval(_Names().visit(ast.parse(text, mode="eval")))
    return value


def _in_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
