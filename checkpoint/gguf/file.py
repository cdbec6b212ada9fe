"""Reads GGUF files with the package `gguf` of llama.cpp's authors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.domain.errors import ConfigurationError, missing_extra

if TYPE_CHECKING:
    import numpy as np
    from gguf import ReaderTensor

_SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model, in one file or several. Tensors are mapped, and read when they are asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, "ReaderTensor"]

    def require(self, key: str) -> Any:
        """A value of the metadata. Raises ConfigurationError if there is none."""
        if key not in self.metadata:
            raise ConfigurationError(f"{self.path} does not say {key}: it is no whole model of llama.cpp")
        return self.metadata[key]

    def type_of(self, name: str) -> str:
        """The name of a tensor's type, such as Q4_K."""
        return self.tensors[name].tensor_type.name

    def read(self, name: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """A tensor's numbers in fp32, dequantised as llama.cpp does. Raises ConfigurationError."""
        from gguf.quants import dequantize

        tensor = self._with_numbers(name)
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ConfigurationError(f"{self.path}: tensor {name} of type {self.type_of(name)}: {error}") from error

    def read_blocks(self, name: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """A quantised tensor's bytes, [..., outputs, bytes of a row]. Raises ConfigurationError."""
        return self._with_numbers(name).data

    @contextmanager
    def naming_bad_metadata(self) -> Iterator[None]:
        """Raise ConfigurationError for metadata of a wrong type or value, which raises whatever comes."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.path}: its metadata has a wrong type or value: {error!r}") from error

    def _with_numbers(self, name: str) -> "ReaderTensor":
        tensor = self.tensors[name]
        if not tensor.n_elements:
            raise ConfigurationError(f"{self.path}: tensor {name} has no numbers, in shape {tensor.shape.tolist()}")
        return tensor


def is_gguf(path: Path) -> bool:
    """True if the name is that of a file in GGUF."""
    return path.suffix.lower() == _SUFFIX


def hint_at_gguf(folder: Path) -> str:
    """Advice for the first model in GGUF in a folder, to be added to a message; empty if there is none."""
    found = sorted(filter(is_gguf, folder.iterdir()))
    return f"; {found[0].name} is in llama.cpp's format: run tandem convert {found[0]} OUT" if found else ""


def open_gguf(path: Path) -> GgufFile:
    """Open a model. If it lies in several files, `path` may be any of them. Raises ConfigurationError."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise missing_extra("reading GGUF needs gguf", "gguf") from error
    metadata: dict[str, Any] = {}
    tensors: dict[str, ReaderTensor] = {}
    for part in gguf_parts(path):
        try:
            reader = gguf.GGUFReader(part)
            values = {key: field.contents() for key, field in reader.fields.items()}
        except OSError as error:
            raise ConfigurationError(f"cannot read {part}: {error.strerror or error}") from error
        except Exception as error:  # the reader checks little: cut or damaged files raise whatever comes
            raise ConfigurationError(f"{part} is truncated or no GGUF file: {error or type(error).__name__}") from error
        _require_apart(part, reader.tensors)
        metadata = values | metadata  # the first part describes the model
        tensors |= {tensor.name: tensor for tensor in reader.tensors}
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ConfigurationError(f"{path} has {len(tensors)} of {expected} tensors: parts of the model are missing")
    return GgufFile(path, metadata, tensors)


def _require_apart(part: Path, tensors: Iterable["ReaderTensor"]) -> None:
    """Raise ConfigurationError if tensors overlap: the package reads each one wherever its offset says."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: int(tensor.data_offset)):
        if int(tensor.data_offset) < end:
            raise ConfigurationError(
                f"{part} is damaged: tensor {tensor.name} overlaps {before}: download or write it again"
            )
        end, before = int(tensor.data_offset) + int(tensor.n_bytes), tensor.name


def gguf_parts(path: Path) -> Iterator[Path]:
    """All files of the model, in order. Raises ConfigurationError."""
    part = _PART.search(path.name)
    names = [path.name]
    if part:
        stem, count = path.name[: part.start()], int(part[2])
        names = [f"{stem}-{number:05}-of-{count:05}{path.suffix}" for number in range(1, count + 1)]
    for name in names:
        if not path.with_name(name).is_file():
            raise ConfigurationError(f"there is no file {path.with_name(name)}")
        yield path.with_name(name)
