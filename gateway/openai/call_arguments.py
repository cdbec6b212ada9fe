"""Parses the arguments of a tool call, for APIs that send an object. Models may write invalid JSON."""

import json
import math
import re
from typing import Any

from pydantic_core import from_json

from gateway.schema import Json
from mesh.domain.json_text import parse_json

# An escape in JSON text: of a character outside of 16 bits, of one half of such a character, or any other.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def parsed_arguments(arguments: str) -> Json:
    """Parse as many arguments as are valid JSON, for an answer may be cut off. NaN and infinity become null."""
    text = _ESCAPE.sub(lambda escape: r"\ufffd" if escape["half"] else escape[0], arguments)
    for part in (text, _mended(text)):
        try:
            value = from_json(part, allow_partial=True)
        except ValueError:  # also for a text that has not begun
            continue
        return _finite(value) if isinstance(value, dict) else {}
    return {}


def _mended(text: str) -> str:
    """Escape line breaks within strings, or cut the text off where it stops being JSON."""
    try:
        return json.dumps(parse_json(text, strict=False))
    except json.JSONDecodeError as error:
        return text[: error.pos]
    except ValueError:
        return ""


def _finite(value: Any) -> Any:
    """Return the value with null in place of NaN and infinity."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
