"""djl_python's Input: the request that a handler receives."""

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

_BODY = "data"


class Input:
    """A request. Its properties are headers, query parameters and the operator's own; their names ignore case."""

    def __init__(self, properties: Mapping[str, str], body: bytes | None = None, function_name: str = "handle") -> None:
        self._properties = dict(properties)
        self._lower = {key.lower(): value for key, value in properties.items()}
        self._content = {} if body is None else {_BODY: body}
        self._function_name = function_name

    def get_function_name(self) -> str:
        return self._function_name

    def get_properties(self) -> dict[str, str]:
        return dict(self._properties)

    def get_property(self, key: str, default: str | None = None) -> str | None:
        return self._lower.get(key.lower(), default)

    def is_empty(self) -> bool:
        """True for the first call, in which a handler loads its model."""
        return not self._content

    def is_batch(self) -> bool:
        """False: each call has one request."""
        return False

    def get_batch_size(self) -> int:
        """1, or 0 for the first call, which is empty."""
        return len(self.get_batches())

    def get_batches(self) -> list["Input"]:
        """The requests of this call: this one, or none for the first call."""
        return [] if self.is_empty() else [self]

    def get_content(self) -> dict[str, bytes]:
        return dict(self._content)

    def contains_key(self, key: str) -> bool:
        """True for the body's key, and for members of a JSON body."""
        return key in self._content or key in self._members()

    def get_as_bytes(self, key: str | None = None) -> bytes:
        """Return the body, or with a key that member of a JSON body, as JSON. Raises KeyError."""
        if key is None or key in self._content:
            return self._content[_BODY if key is None else key]
        value = self._members()[key]
        return value.encode() if isinstance(value, str) else json.dumps(value).encode()

    def get_as_string(self, key: str | None = None) -> str:
        return self.get_as_bytes(key).decode()

    def get_as_json(self, key: str | None = None) -> Any:
        """Parse the body, or return that member of it. Raises ValueError or KeyError."""
        if key is None or key in self._content:
            return json.loads(self.get_as_bytes(key))
        return self._members()[key]

    def get_as_csv(self, key: str | None = None) -> Iterator[dict[str, str]]:
        return csv.DictReader(io.StringIO(self.get_as_string(key)))

    def get_as_numpy(self, key: str | None = None) -> Any:
        """Read an array in .npy format. Raises ValueError for object arrays."""
        return _array(io.BytesIO(self.get_as_bytes(key)))

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        """Read the arrays of an .npz archive. Raises ValueError for object arrays."""
        with zipfile.ZipFile(io.BytesIO(self.get_as_bytes(key))) as archive:
            return [_array(io.BytesIO(archive.read(name))) for name in archive.namelist()]

    def get_as_image(self, key: str | None = None) -> Any:
        """Decode an image with Pillow, which the user must install."""
        from PIL import Image

        return Image.open(io.BytesIO(self.get_as_bytes(key)))

    def _members(self) -> Mapping[str, Any]:
        try:
            members = json.loads(self._content.get(_BODY, b"{}"))
        except ValueError:
            return {}
        return members if isinstance(members, dict) else {}


def _array(file: BinaryIO) -> Any:
    """Read an array without unpickling, which could run code."""
    import numpy as np

    return np.lib.format.read_array(file, allow_pickle=False)
