"""Models for all arms: one checkpoint for each shape, and what is converted from it for a peer, kept in a folder."""

import shutil
import subprocess
from pathlib import Path

from bench.peers.catalog import AS_IT_IS, Peer, interpreter


def checkpoint_of(shape: str, envs: Path) -> Path:
    """The folder that Tandem serves and that all conversions start from."""
    folder = envs / "models" / shape
    if not (folder / "model.safetensors").exists():
        from bench.peers.checkpoint import (
            write_checkpoint,
        )  # loads torch and transformers, which a driver need not have

        write_checkpoint(shape, folder.parent)
    return folder


def model_for(peer: Peer, shape: str, precision: str, envs: Path) -> Path:
    """What a peer's runner loads; converted on first use."""
    if precision not in peer.formats:
        raise SystemExit(f"{peer.engine} has no {precision} arm, but {', '.join(peer.formats)}")
    source = checkpoint_of(shape, envs)
    weights = peer.formats[precision]
    if weights == AS_IT_IS:
        return source
    target = envs / "models" / f"{shape}-{peer.engine}-{weights}"
    if not target.exists():
        _convert(peer.engine, interpreter(envs, peer.engine), source, target)
    return target


def _convert(engine: str, python: Path, source: Path, target: Path) -> None:
    """Under another name until it is whole, so that an interrupted conversion is not taken for one."""
    partial = target.parent / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    module = f"bench.peers.convert_{engine}"
    line = [str(python), "-m", module, str(source.absolute()), str(partial.absolute()), target.name.rpartition("-")[2]]
    subprocess.run(line, check=True, cwd=Path(__file__).resolve().parents[2])
    partial.rename(target)
