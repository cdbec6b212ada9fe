"""A request, as a handler sees it: djl_python's Input."""

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

_BODY = "data"


class Input:
    """Properties are texts, and found whatever their case: headers and query of the request, and the operator's own."""

    def __init__(self, properties: Mapping[str, str], body: bytes | None = None, function_name: str = "handle") -> None:
        self._properties = dict(properties)
        self._lower = {key.lower(): value for key, value in properties.items()}
        self._content = {} if body is None else {_BODY: body}
        self._function_name = function_name

    def get_function_name(self) -> str:
        """The function that is called."""
        return self._function_name

    def get_properties(self) -> dict[str, str]:
        """All of them."""
        return dict(self._properties)

    def get_property(self, key: str, default: str | None = None) -> str | None:
        """One, or the default."""
        return self._lower.get(key.lower(), default)

    def is_empty(self) -> bool:
        """True for the first call, which is for loading."""
        return not self._content

    def is_batch(self) -> bool:
        """Each request comes alone."""
        return False

    def get_batch_size(self) -> int:
        """One, unless it is empty."""
        return len(self.get_batches())

    def get_batches(self) -> list["Input"]:
        """The requests of this call."""
        return [] if self.is_empty() else [self]

    def get_content(self) -> dict[str, bytes]:
        """The body, under its key."""
        return dict(self._content)

    def contains_key(self, key: str) -> bool:
        """True for the body's key, and for members of a JSON body."""
        return key in self._content or key in self._members()

    def get_as_bytes(self, key: str | None = None) -> bytes:
        """The body; with a key, that member of a JSON body, as JSON. Raises KeyError."""
        if key is None or key in self._content:
            return self._content[_BODY if key is None else key]
        value = self._members()[key]
        return value.encode() if isinstance(value, str) else json.dumps(value).encode()

    def get_as_string(self, key: str | None = None) -> str:
        """As text."""
        return self.get_as_bytes(key).decode()

    def get_as_json(self, key: str | None = None) -> Any:
        """As JSON; with a key, that member of it."""
        if key is None or key in self._content:
            return json.loads(self.get_as_bytes(key))
        return self._members()[key]

    def get_as_csv(self, key: str | None = None) -> Iterator[dict[str, str]]:
        """Rows by the names of columns."""
        return csv.DictReader(io.StringIO(self.get_as_string(key)))

    def get_as_numpy(self, key: str | None = None) -> Any:
        """An array in NumPy's own format."""
        return _array(io.BytesIO(self.get_as_bytes(key)))

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        """Arrays of a NumPy archive."""
        with zipfile.ZipFile(io.BytesIO(self.get_as_bytes(key))) as archive:
            return [_array(io.BytesIO(archive.read(name))) for name in archive.namelist()]

    def get_as_image(self, key: str | None = None) -> Any:
        """A picture, where Pillow is installed."""
        from PIL import Image

        return Image.open(io.BytesIO(self.get_as_bytes(key)))

    def _members(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self._content.get(_BODY, b"{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def _array(file: BinaryIO) -> Any:
    """Arrays of numbers only: nothing that would run code."""
    import numpy as np

    return np.lib.format.read_array(file, allow_pickle=False)
