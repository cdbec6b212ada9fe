"""Writes safetensors while the tensors are made: a file is written when it is full, so memory holds one."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.tensors import INDEX_FILE, SINGLE_FILE
from mesh.domain.errors import ConfigurationError

_SHARD_BYTES = 1 << 30
_READABLE = 0o644


class ShardWriter:
    """Writes the weights of a checkpoint to `folder`. Call `finish` at the end. Raises ConfigurationError if a file
    cannot be written.
    """

    def __init__(self, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        self.names: set[str] = set()
        self.num_bytes = 0
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, now or with others; it must not change any more."""
        self.names.add(name)
        self._pending[name] = tensor.contiguous()
        if sum(waiting.nbytes for waiting in self._pending.values()) >= self._shard_bytes:
            self.flush()

    def finish(self) -> None:
        """Write what is left, and the index if there are several files."""
        self.flush()
        if len(self._shards) == 1:
            self._path(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._path(number).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")

    def flush(self) -> None:
        """Write what waits for a file to be full."""
        if not self._pending:
            return
        try:
            path = self._path(len(self._shards))
            save_file(self._pending, path, {"format": "pt"})
            path.chmod(_READABLE)  # safetensors keeps it from other users
        except (SafetensorError, OSError) as error:
            is_full = shutil.disk_usage(self._folder).free < sum(tensor.nbytes for tensor in self._pending.values())
            advice = ": make room there, or write elsewhere" if is_full else ""
            raise ConfigurationError(f"cannot write to {self._folder.parent}: {error}{advice}") from error
        self._shards.append(list(self._pending))
        self.num_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._pending = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
