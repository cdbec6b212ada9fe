"""The manifest of a model that is partitioned ahead of time; `engine/partition.py` has the weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from checkpoint.new_folder import checkpoint_files, is_of_weights
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees

MANIFEST = "tandem-partition.json"
VERSION = 8
"""Counts changes of the manifest, and of the layout of packed weights (engine/kernels/cpu/packing.py)."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """The weights of a rank."""

    name: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Partition:
    """A partitioned model. `weights_digest` identifies the weights it was made of, see `engine.resolve`. Those that
    are not quantised are of `dtype`. `source` is what `source_of` has said of the checkpoint.
    """

    folder: Path
    weights_digest: str
    quantize: str
    dtype: str
    source: Mapping[str, str]
    degrees: Degrees
    files: tuple[RankFile, ...]

    @property
    def identity(self) -> str:
        """Equal for all processes that map these files, whatever path they see them under."""
        status = (self.folder / MANIFEST).stat()
        return f"{status.st_dev}:{status.st_ino}"

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def require(self, degrees: Degrees, quantize: str, dtype: str) -> None:
        """Raise ConfigurationError unless the partition is for these settings."""
        if (degrees, quantize, dtype) != (self.degrees, self.quantize, self.dtype):
            raise ConfigurationError(
                f"{self.folder} is partitioned for {_described(self.degrees, self.quantize, self.dtype)}, not for "
                f"{_described(degrees, quantize, dtype)}: set these, serve the original checkpoint, or "
                "partition it into another folder"
            )

    def require_source(self, model_dir: Path, source: Mapping[str, str]) -> None:
        """Raise ConfigurationError unless the partition was made of the files in `model_dir` as they are now."""
        names = sorted(self.source.keys() | source.keys())
        if changed := [name for name in names if self.source.get(name) != source.get(name)]:
            raise ConfigurationError(
                f"{self.folder} is a partition of another checkpoint than {model_dir}, where {', '.join(changed)} "
                f"{'differs' if len(changed) == 1 else 'differ'}: remove the folder, or choose another one"
            )

    def require_file(self, file: RankFile) -> None:
        """Raise ConfigurationError unless this file is there in its whole length."""
        path = self.folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise self.damage(path)

    def damage(self, path: Path) -> ConfigurationError:
        """The error for a file that is not as it was written."""
        return ConfigurationError(
            f"{path} is missing, truncated or changed since it was written: remove the folder and run "
            "`tandem partition` again"
        )


def source_of(model_dir: Path) -> dict[str, str]:
    """The identity of each file of a checkpoint, by name: a hash of its contents, or for weights, which are large, the
    size and the time of the last change. Raises ConfigurationError.
    """
    try:
        return {path.name: _identity(path) for path in checkpoint_files(model_dir)}
    except OSError as error:
        raise ConfigurationError(f"cannot read {model_dir}: {error}") from error


def _identity(path: Path) -> str:
    if is_of_weights(path):
        status = path.stat()
        return f"{status.st_size}:{status.st_mtime_ns}"
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def read_partition(model_dir: Path) -> Partition | None:
    """The partition in a folder, or None if it holds a checkpoint. Raises ConfigurationError."""
    path = model_dir / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    try:
        if manifest["version"] != VERSION:
            raise ConfigurationError(
                f"{model_dir} was partitioned in version {manifest['version']} of the format, not {VERSION}: "
                "remove it and run `tandem partition` again"
            )
        files = tuple(RankFile(**file) for file in manifest["files"])
        if any(Path(file.name).name != file.name for file in files):
            raise ConfigurationError(f"{path} names a file outside its folder")
        degrees = Degrees(manifest["tensor_parallel"], manifest["pipeline_parallel"])
        if degrees.num_ranks != len(files):
            raise ConfigurationError(f"{path} names {len(files)} files for {degrees.num_ranks} ranks")
        facts = {name: manifest[name] for name in ("weights_digest", "quantize", "dtype")}
        facts["source"] = dict(manifest["source"])
        return Partition(model_dir, **facts, degrees=degrees, files=files)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not the manifest of a partitioned model: {error!r}") from error


def _described(degrees: Degrees, quantize: str, dtype: str) -> str:
    return (
        f"tensor_parallel {degrees.tensor}, pipeline_parallel {degrees.pipeline}, dtype {dtype} and quantize {quantize}"
    )
