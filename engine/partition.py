"""Models that are partitioned ahead of time: one file of packed weights per rank, in place of the checkpoint's.

    OUT/config.json, tokenizer files, ...   copies of the checkpoint's
    OUT/tandem-partition.json               degrees, arithmetic, digest of the checkpoint's weights, checksums
    OUT/rank-0-of-2.safetensors             see engine.models.packed_decoder

Workers map the files, so they load in a moment, and the workers of a machine share the pages. The checkpoint's digest
takes the place of its weights in the fingerprint, so partitioned and other workers exchange KV.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from checkpoint.source import FILES
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees

if TYPE_CHECKING:
    from engine.models.packed_decoder import PackedDecoder

MANIFEST = "tandem-partition.json"
_VERSION = 2
"""Counts changes of the manifest, and of the layout of packed weights (engine/kernels/cpu/packing.py)."""
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class RankFile:
    """The weights of a rank."""

    name: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Partition:
    """A partitioned model. `weights_digest` identifies the weights of the checkpoint that it was made of."""

    folder: Path
    weights_digest: str
    quantize: str
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

    def require(self, degrees: Degrees, quantize: str) -> None:
        """Raise ConfigurationError unless the partition is for these settings."""
        if (degrees, quantize) != (self.degrees, self.quantize):
            raise ConfigurationError(
                f"{self.folder} is partitioned for {_described(self.degrees, self.quantize)}, not for "
                f"{_described(degrees, quantize)}: set these, serve the original checkpoint, or run `tandem partition` "
                "again"
            )

    def read(self, rank: int, degrees: Degrees, quantize: str) -> "PackedDecoder":
        """The weights of rank `rank`. Raises ConfigurationError if the partition is another, or broken."""
        # torch, which a reader of the manifest alone can do without
        from engine.models.packed_decoder import read_packed

        self.require(degrees, quantize)
        file = self.files[rank]
        path = self.folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes or _checksum(path) != file.xxh3:
            raise ConfigurationError(
                f"{path} is missing, truncated or changed since it was written: run `tandem partition` again"
            )
        return read_packed(path)


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
        if manifest["version"] != _VERSION:
            raise ConfigurationError(
                f"{model_dir} was partitioned in version {manifest['version']} of the format, not {_VERSION}: "
                "run `tandem partition` again"
            )
        files = tuple(RankFile(**file) for file in manifest["files"])
        if any(Path(file.name).name != file.name for file in files):
            raise ConfigurationError(f"{path} names a file outside its folder")
        degrees = Degrees(manifest["tensor_parallel"], manifest["pipeline_parallel"])
        if degrees.num_ranks != len(files):
            raise ConfigurationError(f"{path} names {len(files)} files for {degrees.num_ranks} ranks")
        return Partition(model_dir, manifest["weights_digest"], manifest["quantize"], degrees, files)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is not the manifest of a partitioned model: {error!r}") from error


def write_partition(
    model_dir: Path,
    out: Path,
    ranks: Iterator["PackedDecoder"],
    *,
    degrees: Degrees,
    weights_digest: str,
    quantize: str,
) -> Partition:
    """Write a partition of the checkpoint in `model_dir`; `ranks` yields the weights of each rank.

    The folder appears when it is complete; its weights are read-only, because a process that has mapped a file dies if
    it shrinks. Raises ConfigurationError if `out` exists, and OSError.
    """
    if out.exists():
        raise ConfigurationError(f"{out} exists already")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir()
    try:
        for path in sorted({path for pattern in FILES for path in model_dir.glob(pattern)}):
            if ".safetensors" not in path.name:
                shutil.copyfile(path, partial / path.name)
        names = [f"rank-{rank}-of-{degrees.num_ranks}.safetensors" for rank in range(degrees.num_ranks)]
        files = tuple(_write(partial / name, next(ranks)) for name in names)
        partition = Partition(out, weights_digest, quantize, degrees, files)
        content = {"version": _VERSION, "weights_digest": weights_digest, "quantize": quantize}
        content |= {"tensor_parallel": degrees.tensor, "pipeline_parallel": degrees.pipeline}
        content["files"] = [asdict(file) for file in files]
        (partial / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partition


def _described(degrees: Degrees, quantize: str) -> str:
    return f"tensor_parallel {degrees.tensor}, pipeline_parallel {degrees.pipeline} and quantize {quantize}"


def _write(path: Path, packed: "PackedDecoder") -> RankFile:
    from engine.models.packed_decoder import write_packed

    write_packed(path, packed)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o444)
    return RankFile(path.name, path.stat().st_size, _checksum(path))


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return str(digest.hexdigest())
