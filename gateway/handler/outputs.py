"""An answer, as a handler makes it: djl_python's Output."""

import io
import json
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

_ERROR_MESSAGE = "invoke handler failure"
_BATCH_ITEM = "batch_000."

StreamFormatter = Callable[[Any], str | bytes]


class Output:
    """Status, properties (headers of the answer) and content: values by key, or a stream."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content: list[tuple[str, bytes]] = []
        self.stream: Iterable[Any] | AsyncIterable[Any] | None = None
        self.stream_formatter: StreamFormatter = outputs_line
        self.on_end: Callable[[], Any] | None = None

    def error(self, error: str, code: int = 424, message: str = _ERROR_MESSAGE) -> "Output":
        """Make it an error."""
        self.code, self.message = code, message
        self.content = []
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add_property(self, key: str, value: str) -> "Output":
        """A header of the answer."""
        self.properties[key] = value
        return self

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Bytes and texts as they are, all else as JSON."""
        if isinstance(value, bytes | bytearray):
            return self._append(bytes(value), key, batch_index)
        if isinstance(value, str):
            return self._append(value.encode(), key, batch_index)
        return self.add_as_json(value, key, batch_index)

    def add_as_json(self, value: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Any value that JSON has."""
        self.properties.setdefault("Content-Type", "application/json")
        return self._append(json.dumps(value, ensure_ascii=False).encode(), key, batch_index)

    def add_as_numpy(self, arrays: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """An array in NumPy's own format."""
        import numpy as np

        file = io.BytesIO()
        np.save(file, arrays, allow_pickle=False)
        self.properties.setdefault("Content-Type", "tensor/npy")
        return self._append(file.getvalue(), key, batch_index)

    def add_as_npz(self, arrays: Any, key: str | None = None, batch_index: int | None = None) -> "Output":
        """Arrays as a NumPy archive."""
        import numpy as np

        file = io.BytesIO()
        np.savez(file, *arrays)
        self.properties.setdefault("Content-Type", "tensor/npz")
        return self._append(file.getvalue(), key, batch_index)

    def add_stream_content(
        self, stream: Iterable[Any] | AsyncIterable[Any], output_formatter: StreamFormatter | None = None
    ) -> "Output":
        """An answer that is sent as it is made: by default a line {"outputs": item} for each item."""
        self.stream = stream
        if callable(output_formatter):
            self.stream_formatter = output_formatter
        self.properties.setdefault("Content-Type", "application/jsonlines")
        return self

    def finalize(self, function: Callable[..., Any], *arguments: Any) -> "Output":
        """Call this when the answer has been sent."""
        self.on_end = lambda: function(*arguments)
        return self

    def body(self) -> bytes:
        """What is sent if it is no stream: the value under "data", or the first."""
        values = {key.removeprefix(_BATCH_ITEM): value for key, value in reversed(self.content)}
        return values.get("data", self.content[0][1] if self.content else b"")

    def _append(self, value: bytes, key: str | None, batch_index: int | None) -> "Output":
        if batch_index not in (None, 0):
            raise ValueError(f"there is one request in each call, so no item {batch_index}")
        self.content.append((key or "data", value))
        return self


def outputs_line(item: Any) -> str:
    """DJLServing's line for an item of a stream."""
    shown = item.decode(errors="replace") if isinstance(item, bytes) else item
    return json.dumps({"outputs": shown}, ensure_ascii=False) + "\n"


def create_non_stream_output(
    data: Any, properties: dict[str, str] | None = None, error: str | None = None, code: int | None = None
) -> Output:
    """The whole answer of an asynchronous handler."""
    output = Output(code or 200)
    output.properties.update(properties or {})
    return output.error(error, code or 424) if error else output.add(data)


def create_stream_chunk_output(data: Any, last_chunk: bool = False) -> Output:
    """A part of the answer of an asynchronous handler that is a generator."""
    output = Output().add(data)
    output.properties["last_chunk"] = str(last_chunk).lower()
    return output
