"""The work of `tandem convert`. Pickles are read by torch with `weights_only`: they run no code."""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from checkpoint.adapters import CONFIG_FILE as ADAPTER_CONFIG
from checkpoint.adapters import WEIGHTS_FILE as ADAPTER_WEIGHTS
from checkpoint.config_json import read_config, read_json, require_searchable
from checkpoint.files import copy_other_files, require_other_files
from checkpoint.gguf.file import hint_at_gguf
from checkpoint.new_folder import new_folder
from checkpoint.tensors import SINGLE_FILE, require_readable_pickle
from checkpoint.watched_files import WatchedFiles
from engine.bus_errors import name_if_cut_off
from engine.quantizer.shards import ShardWriter
from mesh.domain.errors import ConfigurationError

_SINGLE, _INDEX, _ADAPTER = "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"
_DENSE = "save the model with dense weights of floating point, or without that tensor"


def convert_folder(folder: Path, out: Path) -> int:
    """Write the weights of `folder` to `out` as safetensors, beside copies of its other files. Returns the exit
    status. Raises ConfigurationError.
    """
    began_s = time.monotonic()
    require_searchable(folder)
    paths = _pickles(folder)
    is_adapter = paths[0].name == _ADAPTER
    if not is_adapter:
        _require_config(folder)
        require_readable_pickle(folder, paths[0])
    require_other_files(folder)
    files = WatchedFiles.of(paths)
    name_if_cut_off(paths)
    with new_folder(out) as unfinished, files.watching():
        writer = ShardWriter(unfinished, sys.maxsize) if is_adapter else ShardWriter(unfinished)
        for path in paths:
            for name, tensor in _tensors(path):
                if name in writer.names:
                    raise ConfigurationError(f"{path}: tensor {name} is in another file, too")
                writer.add(name, tensor)
            files.require_unchanged()
        if not writer.names:
            raise ConfigurationError(f"{paths[0]} has no tensors")
        writer.finish()
        if is_adapter:
            (unfinished / SINGLE_FILE).rename(unfinished / ADAPTER_WEIGHTS)
        copy_other_files(folder, unfinished)
        (unfinished / _INDEX).unlink(missing_ok=True)
    shown = quote(str(out))
    sys.stdout.write(
        f"{out}: {len(writer.names)} tensors, {writer.num_bytes / 1e6:.0f} MB in {time.monotonic() - began_s:.1f} s; "
        f"serve it with: tandem up {f'MODEL --adapter NAME={shown}' if is_adapter else shown}\n"
    )
    return 0


def _require_config(folder: Path) -> None:
    """Raise ConfigurationError if config.json is missing, without which the weights are no model, or broken."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder} has weights without config.json: copy the model's own file there, too")
    read_config(folder)


def _pickles(folder: Path) -> list[Path]:
    """The files with the weights. Raises ConfigurationError."""
    if folder.is_file():
        raise ConfigurationError(f"{folder} is a file: name the folder that it is in, {folder.parent}")
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}: download the model first")
    for name in (_ADAPTER, _SINGLE) if (folder / ADAPTER_CONFIG).is_file() else (_SINGLE,):
        if (folder / name).is_file():
            return [folder / name]
    if not (folder / _INDEX).is_file():
        if (folder / _ADAPTER).is_file():
            raise ConfigurationError(f"{folder} has {_ADAPTER} without {ADAPTER_CONFIG}: copy that file there, too")
        raise ConfigurationError(
            f"{folder} has neither {_SINGLE}, {_ADAPTER} nor {_INDEX}: there is nothing to convert"
            f"{hint_at_gguf(folder)}"
        )
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(
            f"{folder / _INDEX}: weight_map must be an object of file names by tensor, got {weight_map!r:.100}"
        )
    if not weight_map:
        raise ConfigurationError(f"{folder / _INDEX}: weight_map names no tensor: there is nothing to convert")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ConfigurationError(f"{folder / _INDEX} names a file outside its folder: {name!r}")
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder / name} is missing: {_INDEX} names it")
    return [folder / name for name in names]


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, each with memory of its own. Raises ConfigurationError."""
    storages: set[int] = set()
    for name, tensor in _load(path).items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ConfigurationError(f"{path} has {name!r}, which is no tensor: only plain weights can be converted")
        if name == "__metadata__" or not _is_text(name):
            raise ConfigurationError(
                f"{path}: a tensor is named {name!r:.100}, which safetensors cannot hold: rename it"
            )
        if kind := _unwritable(tensor):
            raise ConfigurationError(f"{path}: tensor {name} is {kind}, which cannot be converted: {_DENSE}")
        tensor = tensor.resolve_neg()  # its memory has the numbers without their sign
        storage = tensor.untyped_storage()
        # Tied weights share memory, and slices have more than they need. safetensors would refuse both.
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(storage.data_ptr())
        yield name, tensor


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unwritable(tensor: Tensor) -> str:
    """Why safetensors cannot hold the tensor, or no model could use it; an empty string if it can."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return "nested" if tensor.is_nested else f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.is_quantized or tensor.is_complex():
        kind = "quantised by PyTorch" if tensor.is_quantized else "complex"
        return f"{kind} ({str(tensor.dtype).removeprefix('torch.')})"
    return "without values (meta)" if tensor.is_meta else ""


def _load(path: Path) -> Mapping[object, object]:
    try:
        try:
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # files from before PyTorch 1.6 cannot be mapped
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch's own text advises to run the code
        raise ConfigurationError(
            f"{path} is no checkpoint of PyTorch, or has more than weights, which could run code"
        ) from error
    except PermissionError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises whatever comes
        reason = str(error) or type(error).__name__
        raise ConfigurationError(f"{path} is truncated or no checkpoint of PyTorch: {reason}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigurationError(f"{path} holds a {type(loaded).__name__}, not tensors by name")
    return loaded
