"""Opens a Hugging Face checkpoint: which safetensors file holds which tensor. Only the headers are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.model_files import parse_json_object, read_json
from mesh.domain.errors import ConfigurationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor: bytes `[offset, offset + num_bytes)` of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def open_checkpoint(model_dir: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a checkpoint, single or sharded, by name. Raises ConfigurationError for a missing or
    truncated file."""
    model_dir = Path(model_dir)
    index_path = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).exists():
        return read_header(model_dir / SINGLE_FILE)
    if not index_path.exists():
        pickled = sorted(path.name for path in model_dir.glob("*.bin"))
        hint = f"; {pickled[0]} is in a format that can run code: run tandem convert {model_dir} OUT" if pickled else ""
        if gguf := sorted(path.name for path in model_dir.glob("*.gguf")):
            hint = hint or f"; {gguf[0]} is in llama.cpp's format: run tandem convert {model_dir / gguf[0]} OUT"
        raise ConfigurationError(f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    return _read_sharded(model_dir, index_path)


def read_sample(tensor: StoredTensor) -> bytes:
    """Read a few bytes from the middle of a tensor, to distinguish it from others cheaply."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset + max(0, tensor.num_bytes - _SAMPLE_BYTES) // 2)
        return file.read(min(_SAMPLE_BYTES, tensor.num_bytes))


def _read_sharded(model_dir: Path, index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(f"{index_path} is not a safetensors index: weight_map must map tensors to file names")
    tensors: dict[str, StoredTensor] = {}
    for file_name, name in sorted({file_name: name for name, file_name in weight_map.items()}.items()):
        if Path(file_name).name != file_name:
            raise ConfigurationError(f"{index_path} names a file outside its folder: {file_name!r}")
        if not (model_dir / file_name).is_file():
            raise ConfigurationError(f"{model_dir / file_name} is missing: it has tensor {name}, {INDEX_FILE} says")
        tensors.update(read_header(model_dir / file_name))
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise ConfigurationError(f"{model_dir / file_name}: tensor {name} is in the index but not in the file")
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= size - _LENGTH_BYTES:
                raise ConfigurationError(f"{path} is truncated or not a safetensors file ({size} bytes)")
            header = parse_json_object(file.read(length), path)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, _LENGTH_BYTES + length) for name, entry in header.items()}
    for name, tensor in tensors.items():
        if tensor.offset + tensor.num_bytes > size:
            raise ConfigurationError(f"{path} is truncated: {size} bytes, tensor {name} ends beyond them")
    return tensors


def _stored(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    try:
        start, end = entry["data_offsets"]
        return StoredTensor(path, entry["dtype"], tuple(entry["shape"]), data_start + start, end - start)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}: the header describes tensor {name} wrongly: {error!r}") from error
