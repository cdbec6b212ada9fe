"""JSON that others have written, which may be nested more deeply than Python reads."""

import json
from typing import Any


def parse_json(text: str | bytes, **options: Any) -> Any:
    """As json.loads. Its error, a ValueError, also stands for text that is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
