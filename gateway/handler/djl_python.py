"""djl_python for custom handlers: Input, the request that a handler receives, and Output, the answer that it returns.

Handlers written for LMI import these classes from modules of djl_python, which `install_djl_python` provides.
"""

import csv
import io
import json
import sys
import zipfile
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from PIL.Image import Image

    Array = NDArray[np.generic]

_BODY = "data"
_ERROR_MESSAGE = "invoke handler failure"
_BATCH_ITEM = "batch_000."

FORMATTER_MARK = "_tandem_formatter"
"""Attribute of a function that its decorator marks as a formatter."""

Function = Callable[..., Any]
StreamFormatter = Callable[[Any], str | bytes]


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

    def get_as_numpy(self, key: str | None = None) -> "Array":
        """Read an array in .npy format. Raises ValueError for object arrays."""
        return _array(io.BytesIO(self.get_as_bytes(key)))

    def get_as_npz(self, key: str | None = None) -> "list[Array]":
        """Read the arrays of an .npz archive. Raises ValueError for object arrays."""
        with zipfile.ZipFile(io.BytesIO(self.get_as_bytes(key))) as archive:
            return [_array(io.BytesIO(archive.read(name))) for name in archive.namelist()]

    def get_as_image(self, key: str | None = None) -> "Image":
        """Decode an image with Pillow, which the user must install."""
        from PIL import Image

        return Image.open(io.BytesIO(self.get_as_bytes(key)))

    def _members(self) -> Mapping[str, object]:
        try:
            members = json.loads(self._content.get(_BODY, b"{}"))
        except ValueError:
            return {}
        return members if isinstance(members, dict) else {}


def _array(file: BinaryIO) -> "Array":
    """Read an array without unpickling, which could run code."""
    import numpy as np

    return np.lib.format.read_array(file, allow_pickle=False)


class Output:
    """An answer: status code, properties (its headers), and content, which is values by key or a stream."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content: list[tuple[str, bytes]] = []
        self.stream: Iterable[object] | AsyncIterable[object] | None = None
        self.stream_formatter: StreamFormatter = outputs_line
        self.on_end: Callable[[], object] | None = None

    def error(self, error: str, code: int = 424, message: str = _ERROR_MESSAGE) -> "Output":
        """Turn this answer into an error, in LMI's format."""
        self.code, self.message = code, message
        self.content = []
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add_property(self, key: str, value: str) -> "Output":
        """Set a header of the answer."""
        self.properties[key] = value
        return self

    def add(self, value: object, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add a value: bytes and strings unchanged, anything else as JSON."""
        if isinstance(value, bytes | bytearray):
            return self._append(bytes(value), key, batch_index)
        if isinstance(value, str):
            return self._append(value.encode(), key, batch_index)
        return self.add_as_json(value, key, batch_index)

    def add_as_json(self, value: object, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add a value as JSON, and set the content type if it is not set."""
        self.properties.setdefault("Content-Type", "application/json")
        return self._append(json.dumps(value, ensure_ascii=False).encode(), key, batch_index)

    def add_as_numpy(self, arrays: "ArrayLike", key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add an array in .npy format. Raises ValueError for object arrays."""
        import numpy as np

        file = io.BytesIO()
        np.save(file, arrays, allow_pickle=False)
        self.properties.setdefault("Content-Type", "tensor/npy")
        return self._append(file.getvalue(), key, batch_index)

    def add_as_npz(
        self, arrays: "Iterable[ArrayLike]", key: str | None = None, batch_index: int | None = None
    ) -> "Output":
        """Add arrays as an .npz archive."""
        import numpy as np

        file = io.BytesIO()
        np.savez(file, *arrays)
        self.properties.setdefault("Content-Type", "tensor/npz")
        return self._append(file.getvalue(), key, batch_index)

    def add_stream_content(
        self, stream: Iterable[object] | AsyncIterable[object], output_formatter: StreamFormatter | None = None
    ) -> "Output":
        """Stream the answer. By default each item becomes a line {"outputs": item}."""
        self.stream = stream
        if callable(output_formatter):
            self.stream_formatter = output_formatter
        self.properties.setdefault("Content-Type", "application/jsonlines")
        return self

    def finalize(self, function: Callable[..., object], *arguments: object) -> "Output":
        """Call `function(*arguments)` once the answer has been sent."""
        self.on_end = lambda: function(*arguments)
        return self

    def body(self) -> bytes:
        """The body of an answer that is not a stream: the value under "data", or the first value."""
        values = {key.removeprefix(_BATCH_ITEM): value for key, value in reversed(self.content)}
        return values.get("data", self.content[0][1] if self.content else b"")

    def _append(self, value: bytes, key: str | None, batch_index: int | None) -> "Output":
        if batch_index not in (None, 0):
            raise ValueError(f"each call has one request, so there is no batch item {batch_index}")
        self.content.append((key or "data", value))
        return self


def outputs_line(item: object) -> str:
    """Format an item of a stream as DJLServing does."""
    text = item.decode(errors="replace") if isinstance(item, bytes) else item
    return json.dumps({"outputs": text}, ensure_ascii=False) + "\n"


def create_non_stream_output(
    data: object, properties: dict[str, str] | None = None, error: str | None = None, code: int | None = None
) -> Output:
    """Build the complete answer of an asynchronous handler."""
    output = Output(code or 200)
    output.properties.update(properties or {})
    return output.error(error, code or 424) if error else output.add(data)


def create_stream_chunk_output(data: object, last_chunk: bool = False) -> Output:
    """Build one part of the answer of an asynchronous generator."""
    output = Output().add(data)
    output.properties["last_chunk"] = str(last_chunk).lower()
    return output


def install_djl_python() -> None:
    """Register modules for `from djl_python import Input, Output` and the other imports of handlers."""
    modules: dict[str, dict[str, Any]] = {
        "djl_python": {"Input": Input, "Output": Output},
        "djl_python.inputs": {"Input": Input},
        "djl_python.outputs": {"Output": Output},
        "djl_python.input_parser": {"input_formatter": _marks("input_formatter")},
        "djl_python.output_formatter": {"output_formatter": _marks("output_formatter")},
        "djl_python.async_utils": {
            "create_non_stream_output": create_non_stream_output,
            "create_stream_chunk_output": create_stream_chunk_output,
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    vars(sys.modules["djl_python"])["__path__"] = []


def _marks(kind: str) -> Function:
    def decorate(function: Function) -> Function:
        setattr(function, FORMATTER_MARK, kind)
        return function

    return decorate
