"""Models for all arms: one checkpoint per shape, and its conversions for peers, cached in a folder."""

import shutil
import subprocess
from pathlib import Path

from bench.peers.catalog import AS_IT_IS, Peer, interpreter


def checkpoint_of(shape: str, envs: Path) -> Path:
    """The folder of the checkpoint, which Tandem serves and all conversions start from. Written on first use."""
    folder = envs / "models" / shape
    if not (folder / "model.safetensors").exists():
        from bench.peers.checkpoint import (
            write_checkpoint,
        )  # loads torch and transformers, which a driver need not have

        write_checkpoint(shape, folder.parent)
    return folder


def model_for(peer: Peer, shape: str, precision: str, envs: Path) -> Path:
    """The model folder for the runner of a peer, converted on first use. Exits for an unsupported precision."""
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
    """Convert to a temporary name and rename at the end, so that no incomplete conversion remains under the name."""
    partial = target.parent / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    module = f"bench.peers.convert_{engine}"
    line = [str(python), "-m", module, str(source.absolute()), str(partial.absolute()), target.name.rpartition("-")[2]]
    subprocess.run(line, check=True, cwd=Path(__file__).resolve().parents[2])
    partial.rename(target)
