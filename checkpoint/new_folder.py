"""Writing a model's folder: it appears when it is complete, or not at all."""

import fcntl
import glob
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from checkpoint.source import FILES, NAMED_TEMPLATES
from mesh.domain.errors import ConfigurationError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write to, which becomes `out` at the end of the block. Raises ConfigurationError if
    `out` exists, and in place of any OSError.

    The folder is removed if the block fails; so are, now, those of processes that were killed. A lock tells them from
    those of processes that write.
    """
    require_absent(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
            with suppress(OSError), _locked(path):
                shutil.rmtree(path, ignore_errors=True)
        partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
        partial.mkdir()
        with _locked(partial):
            try:
                yield partial
                partial.rename(out)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error}") from error


def require_absent(out: Path) -> None:
    """Raise ConfigurationError if a folder that is to be written exists, or a link that leads nowhere."""
    if os.path.lexists(out):
        raise ConfigurationError(f"{out} exists already")


def copy_other_files(model_dir: Path, folder: Path, *, but: Collection[str] = ()) -> None:
    """Copy the files of a checkpoint to `folder`, except its weights and those that `but` names."""
    for path in checkpoint_files(model_dir):
        if not is_of_weights(path) and path.name not in but:
            copy = folder / path.relative_to(model_dir)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def checkpoint_files(model_dir: Path) -> list[Path]:
    """All files of a checkpoint, named chat templates included."""
    return sorted({path for pattern in (*FILES, NAMED_TEMPLATES) for path in model_dir.glob(pattern)})


def is_of_weights(path: Path) -> bool:
    """True for a file of weights or their index."""
    return ".safetensors" in path.name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases however the process ends. Raises OSError if it is taken."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
