"""The manifest of a model that is partitioned ahead of time; `engine/loading/partition.py` has the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import xxhash

from checkpoint.files import checkpoint_files, is_of_weights
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json
from mesh.domain.kv import Degrees

MANIFEST = "tandem-partition.json"
VERSION = 17
"""Counts changes of the manifest, and of the layout of packed weights (engine/kernels/cpu/products/packing.py)."""
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class RankFile:
    """The weights of a rank."""

    name: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the checkpoint that a partition was made of, as it was then."""

    num_bytes: int
    changed_ns: int
    xxh3: str

    def is_still(self, path: Path) -> bool:
        """Whether `path` has these contents. A file of weights, which is large, is read only if it has another time
        than then, as a copy has. Raises OSError.
        """
        status = path.stat()
        if status.st_size != self.num_bytes:
            return False
        return (is_of_weights(path) and status.st_mtime_ns == self.changed_ns) or checksum(path) == self.xxh3


@dataclass(frozen=True, slots=True)
class Partition:
    """A partitioned model. `weights_digest` identifies the weights it was made of, see `engine.loading.resolve`.
    `dtype` is that of weights which are not quantised. `source` has each file of the checkpoint, by its path.
    """

    folder: Path
    weights_digest: str
    quantize: str
    dtype: str
    source: Mapping[str, SourceFile]
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

    def require_source(self, model_dir: Path) -> None:
        """Raise ConfigurationError unless the partition was made of the files in `model_dir` as they are now."""
        if changed := changed_files(self.source, model_dir):
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


def source_of(model_dir: Path) -> dict[str, SourceFile]:
    """The files of a checkpoint as they are now, by their path in it; reads each of them. Raises ConfigurationError."""
    try:
        return {name: _source_file(path) for name, path in _paths(model_dir).items()}
    except OSError as error:
        raise ConfigurationError(f"cannot read {model_dir}: {error}") from error


def changed_files(source: Mapping[str, SourceFile], model_dir: Path) -> list[str]:
    """Paths of files that differ between `source` and `model_dir`, or that only one of them has. Raises
    ConfigurationError.
    """
    paths = _paths(model_dir)
    try:
        same = {name for name, path in paths.items() if name in source and source[name].is_still(path)}
    except OSError as error:
        raise ConfigurationError(f"cannot read {model_dir}: {error}") from error
    return sorted((source.keys() | paths.keys()) - same)


def _paths(model_dir: Path) -> dict[str, Path]:
    return {str(path.relative_to(model_dir)): path for path in checkpoint_files(model_dir)}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of weights in `folder` at one moment, by name. `digest` covers all their bytes; a partition has the
    digest of the checkpoint that it was made of.
    """

    folder: Path
    files: Mapping[str, SourceFile]

    @classmethod
    def read(cls, folder: Path) -> "WeightFiles":
        """Reads them all, except those of a partition. Raises ConfigurationError."""
        partition = read_partition(folder)
        files = source_of(folder) if partition is None else partition.source
        return cls(folder, {name: file for name, file in files.items() if is_of_weights(Path(name))})

    @property
    def digest(self) -> str:
        return blake2b(repr([(name, file.xxh3) for name, file in sorted(self.files.items())]).encode()).hexdigest()

    def require_unchanged(self) -> None:
        """Raise ConfigurationError if they have changed since. A partition's are verified when they are loaded."""
        if read_partition(self.folder) is not None:
            return
        try:
            changed = [name for name, file in self.files.items() if not file.is_still(self.folder / name)]
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.folder}: {error}") from error
        if changed:
            raise ConfigurationError(f"{self.folder}: {changed[0]} has changed while it was loaded: start again")


def _source_file(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(status.st_size, status.st_mtime_ns, checksum(path))


def checksum(path: Path) -> str:
    """The xxh3 of a file's contents. Raises OSError."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return str(digest.hexdigest())


def read_partition(model_dir: Path) -> Partition | None:
    """The partition in a folder, or None if it holds a checkpoint. Raises ConfigurationError."""
    path = model_dir / MANIFEST
    try:
        manifest = parse_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
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
        facts["source"] = {name: SourceFile(**file) for name, file in manifest["source"].items()}
        return Partition(model_dir, **facts, degrees=degrees, files=files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not the manifest of a partitioned model: {error!r}") from error


def _described(degrees: Degrees, quantize: str, dtype: str) -> str:
    return (
        f"tensor_parallel {degrees.tensor}, pipeline_parallel {degrees.pipeline}, dtype {dtype} and quantize {quantize}"
    )
