"""Models that are partitioned ahead of time: one file of packed weights per rank, in place of the checkpoint's.

    OUT/config.json, tokenizer files, ...   copies of the checkpoint's
    OUT/tandem-partition.json               degrees, arithmetic, what it was made of, checksums
    OUT/rank-0-of-2.safetensors             see engine.models.packed_weights

Workers map the files, so they load in a moment, and the workers of a machine share the pages. The checkpoint's digest
takes the place of its weights in the fingerprint, so partitioned and other workers exchange KV.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint.files import copy_other_files
from checkpoint.new_folder import new_folder
from checkpoint.partition_manifest import (
    MANIFEST,
    VERSION,
    Partition,
    RankFile,
    SourceFile,
    changed_files,
    checksum,
)
from checkpoint.watched_files import has_changed
from engine.models.packed_weights import PackedDecoder, read_packed, write_packed
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees


def read_rank(partition: Partition, rank: int, degrees: Degrees, quantize: str, dtype: str) -> PackedDecoder:
    """The weights of rank `rank`. Raises ConfigurationError if the partition is another, or broken."""
    partition.require(degrees, quantize, dtype)
    file = partition.files[rank]
    partition.require_file(file)
    path = partition.folder / file.name
    if checksum(path) != file.xxh3:
        raise partition.damage(path)
    return read_packed(path)


def write_partition(
    model_dir: Path,
    out: Path,
    ranks: Iterator[PackedDecoder],
    *,
    degrees: Degrees,
    weights_digest: str,
    quantize: str,
    dtype: str,
    source: Mapping[str, SourceFile],
) -> Partition:
    """Write a partition of the checkpoint in `model_dir`; `ranks` yields the weights of each rank. `source`: see
    `source_of`, from before the weights were read.

    The folder appears when it is complete; its weights are read-only, because a process that has mapped a file dies if
    it shrinks. Raises ConfigurationError, also if a file of the checkpoint has changed.
    """
    with new_folder(out) as partial:
        copy_other_files(model_dir, partial)
        names = [f"rank-{rank}-of-{degrees.num_ranks}.safetensors" for rank in range(degrees.num_ranks)]
        try:
            files = tuple(_write(partial / name, next(ranks)) for name in names)
        except ConfigurationError:
            _require_unchanged(source, model_dir)  # numbers may be wrong for that
            raise
        _require_unchanged(source, model_dir)
        partition = Partition(out, weights_digest, quantize, dtype, source, degrees, files)
        content: dict[str, Any] = {"version": VERSION, "weights_digest": weights_digest}
        content |= {"quantize": quantize, "dtype": dtype}
        content |= {"tensor_parallel": degrees.tensor, "pipeline_parallel": degrees.pipeline}
        content["source"] = {name: asdict(file) for name, file in source.items()}
        content["files"] = [asdict(file) for file in files]
        (partial / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")
    return partition


def _require_unchanged(source: Mapping[str, SourceFile], model_dir: Path) -> None:
    if changed := changed_files(source, model_dir):
        raise has_changed(model_dir / changed[0])


def _write(path: Path, packed: PackedDecoder) -> RankFile:
    write_packed(path, packed)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o444)
    return RankFile(path.name, path.stat().st_size, checksum(path))
