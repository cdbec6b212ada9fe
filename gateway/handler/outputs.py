"""djl_python's Output: the answer that a handler returns."""

import io
import json
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

_ERROR_MESSAGE = "invoke handler failure"
_BATCH_ITEM = "batch_000."

StreamFormatter = Callable[[Any], str | bytes]


class Output:
    """An answer: status code, properties (its headers), and content, which is values by key or a stream."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content: list[tuple[str, bytes]] = []
        self.stream: Iterable[Any] | AsyncIterable[Any] | None = None
        self.stream_formatter: StreamFormatter = outputs_line
        self.on_end: Callable[[], Any] | None = None

    def error(self, error: str, code: int = 424, message: str = _ERROR_MESSAGE) -> "Output":
        """Turn this answer into an error, in LMI's format."""
        self.code, self.message = code, message
        self.content = []
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add_property(self, key: str, value: str) -> "Output":
        """Set a header of the answer."""
        self.properties[key] = value
        return self

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add a value: bytes and strings unchanged, anything else as JSON."""
        if isinstance(value, bytes | bytearray):
            return self._append(bytes(value), key, batch_index)
        if isinstance(value, str):
            return self._append(value.encode(), key, batch_index)
        return self.add_as_json(value, key, batch_index)

    def add_as_json(self, value: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add a value as JSON, and set the content type if it is not set."""
        self.properties.setdefault("Content-Type", "application/json")
        return self._append(json.dumps(value, ensure_ascii=False).encode(), key, batch_index)

    def add_as_numpy(self, arrays: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add an array in .npy format. Raises ValueError for object arrays."""
        import numpy as np

        file = io.BytesIO()
        np.save(file, arrays, allow_pickle=False)
        self.properties.setdefault("Content-Type", "tensor/npy")
        return self._append(file.getvalue(), key, batch_index)

    def add_as_npz(self, arrays: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Add arrays as an .npz archive."""
        import numpy as np

        file = io.BytesIO()
        np.savez(file, *arrays)
        self.properties.setdefault("Content-Type", "tensor/npz")
        return self._append(file.getvalue(), key, batch_index)

    def add_stream_content(
        self, stream: Iterable[Any] | AsyncIterable[Any], output_formatter: StreamFormatter | None = None
    ) -> "Output":
        """Stream the answer. By default each item becomes a line {"outputs": item}."""
        self.stream = stream
        if callable(output_formatter):
            self.stream_formatter = output_formatter
        self.properties.setdefault("Content-Type", "application/jsonlines")
        return self

    def finalize(self, function: Callable[..., Any], *arguments: Any) -> "Output":
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


def outputs_line(item: Any) -> str:
    """Format an item of a stream as DJLServing does."""
    text = item.decode(errors="replace") if isinstance(item, bytes) else item
    return json.dumps({"outputs": text}, ensure_ascii=False) + "\n"


def create_non_stream_output(
    data: Any, properties: dict[str, str] | None = None, error: str | None = None, code: int | None = None
) -> Output:
    """Build the complete answer of an asynchronous handler."""
    output = Output(code or 200)
    output.properties.update(properties or {})
    return output.error(error, code or 424) if error else output.add(data)


def create_stream_chunk_output(data: Any, last_chunk: bool = False) -> Output:
    """Build one part of the answer of an asynchronous generator."""
    output = Output().add(data)
    output.properties["last_chunk"] = str(last_chunk).lower()
    return output
