"""Opens a Hugging Face checkpoint: which safetensors file holds which tensor. Only the headers are read."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from checkpoint.config_json import parse_json_object, read_json
from checkpoint.gguf.file import hint_at_gguf
from mesh.domain.errors import ConfigurationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_SAMPLE_BYTES = 64
_PART_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
_MAX_ELEMENTS = (1 << 63) - 1
_AGAIN = "download or write it again"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of a number, by the names of types in the format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor: bytes `[offset, offset + num_bytes)` of `path`. For a part of another tensor, `whole`
    is that tensor's name in the file, and `first` the place of the part's first number in it. With a `column_step`, the
    numbers of a row are that far apart in it, and those of a column are adjacent.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    whole: str | None = None
    first: int = 0
    column_step: int = 0


def open_checkpoint(model_dir: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a checkpoint, single or sharded, by name. Raises ConfigurationError for a missing or
    truncated file."""
    model_dir = Path(model_dir)
    index_path = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).exists():
        return read_header(model_dir / SINGLE_FILE)
    if not index_path.exists():
        if link := next((path for path in (model_dir / SINGLE_FILE, index_path) if path.is_symlink()), None):
            raise ConfigurationError(f"{link} is a link that leads nowhere: {_AGAIN}")
        hint = _hint_at_pickles(model_dir) or hint_at_gguf(model_dir)
        raise ConfigurationError(f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    return _read_sharded(model_dir, index_path)


def _hint_at_pickles(folder: Path) -> str:
    """Advice for a folder that has pickles and no safetensors; empty without pickles. Raises ConfigurationError."""
    if (pickle := next(iter(sorted(folder.glob("*.bin"))), None)) is None:
        return ""
    require_readable_pickle(folder, pickle)
    return f"; {pickle.name} is in a format that can run code: run tandem convert {folder} OUT"


def require_readable_pickle(folder: Path, pickle: Path) -> None:
    """Raise ConfigurationError for a pickle of torchao's tensors, which are objects that only its own code can read."""
    quantization = read_json(folder / "config.json", optional=True).get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "torchao":
        raise ConfigurationError(
            f"{pickle} has tensors of torchao in a format that can run code, and is not read: save the model again "
            "with transformers 5 and torchao 0.15 or later, which write safetensors, or serve the original checkpoint"
        )


def read_sample(tensor: StoredTensor) -> bytes:
    """Read a few bytes from the middle of a tensor, to distinguish it from others cheaply."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset + max(0, tensor.num_bytes - _SAMPLE_BYTES) // 2)
        return file.read(min(_SAMPLE_BYTES, tensor.num_bytes))


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """True if two tensors have the same dtype, shape and bytes; they are read to the first difference. Raises
    ConfigurationError.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(one == other for one, other in zip(_parts(first), _parts(second), strict=True))


def _parts(tensor: StoredTensor) -> Iterator[bytes]:
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, tensor.num_bytes, _PART_BYTES):
                part = file.read(min(_PART_BYTES, tensor.num_bytes - start))
                if not part:
                    raise ConfigurationError(f"{tensor.path} is truncated: {_AGAIN}")
                yield part
    except OSError as error:
        raise ConfigurationError(f"cannot read {tensor.path}: {error}") from error


def _read_sharded(model_dir: Path, index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(f"{index_path} is not a safetensors index: weight_map must map tensors to file names")
    files: dict[str, dict[str, StoredTensor]] = {}
    for file_name, name in sorted({file_name: name for name, file_name in weight_map.items()}.items()):
        if Path(file_name).name != file_name:
            raise ConfigurationError(f"{index_path} names a file outside its folder: {file_name!r}")
        if not (model_dir / file_name).is_file():
            raise ConfigurationError(f"{model_dir / file_name} is missing: it has tensor {name}, {INDEX_FILE} says")
        files[file_name] = read_header(model_dir / file_name)
    for name, file_name in weight_map.items():
        if name not in files[file_name]:
            raise ConfigurationError(f"{model_dir / file_name}: tensor {name} is in the index but not in the file")
    unlisted = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    return unlisted | {name: files[file_name][name] for name, file_name in weight_map.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name. Raises ConfigurationError if the header is damaged: each tensor must
    have the size of its shape, and all together must be the rest of the file.
    """
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ConfigurationError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ConfigurationError(f"{path} is truncated or not a safetensors file ({size} bytes)")
            header = parse_json_object(file.read(length), path)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    tensors = {name: _stored(path, name, entry, data_start) for name, entry in header.items()}
    _require_gapless(path, tensors, data_start, size)
    return tensors


def _require_gapless(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """Raise ConfigurationError unless the tensors follow each other from `data_start` to the end of the file."""
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset + tensor.num_bytes > size:
            raise ConfigurationError(f"{path} is truncated: {size} bytes, tensor {name} ends beyond them: {_AGAIN}")
        if tensor.offset != end:
            what = "overlaps another" if tensor.offset < end else "has bytes of no tensor before it"
            raise ConfigurationError(f"{path} is damaged: tensor {name} {what}: {_AGAIN}")
        end += tensor.num_bytes
    if end != size:
        raise ConfigurationError(f"{path} is damaged: {size - end} bytes after its last tensor: {_AGAIN}")


def _stored(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    try:
        return _parse_entry(path, entry, data_start)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: the header describes tensor {name} wrongly: {error}: {_AGAIN}") from error


def _parse_entry(path: Path, entry: object, data_start: int) -> StoredTensor:
    """Read an entry of the header. Raises ConfigurationError that says what is wrong with it."""
    if not isinstance(entry, dict):
        raise ConfigurationError(f"it must be an object, got {entry!r:.100}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ConfigurationError(f"dtype must be one of {', '.join(_BITS)}, got {dtype!r:.100}")
    if not _are_counts(shape) or math.prod(max(1, extent) for extent in shape) > _MAX_ELEMENTS:
        raise ConfigurationError(f"shape must be a list of integers from 0 on, got {shape!r:.100}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConfigurationError(f"data_offsets must be two ascending integers from 0 on, got {offsets!r:.100}")
    start, end = offsets
    if (end - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ConfigurationError(f"{end - start} bytes are not the size of shape {shape!r:.100} in {dtype}")
    return StoredTensor(path, dtype, tuple(shape), data_start + start, end - start)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
