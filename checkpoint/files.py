"""The files of a checkpoint's folder, and copies of those that are not weights."""

import os
from collections.abc import Collection
from fnmatch import filter as matching
from pathlib import Path

from checkpoint.config_json import read_bytes
from checkpoint.model_facts import require_generation_config
from checkpoint.source import FILES, NAMED_TEMPLATES
from mesh.domain.errors import ConfigurationError


def require_other_files(model_dir: Path) -> None:
    """Raise ConfigurationError, before any work, for files that `copy_other_files` could not copy, and for a
    generation_config.json with which neither the model nor the copy can be served.
    """
    for path in _other_files(model_dir):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    require_generation_config(model_dir)


def copy_other_files(model_dir: Path, folder: Path, *, but: Collection[str] = ()) -> None:
    """Copy the files of a checkpoint to `folder`, except its weights and those that `but` names. Raises
    ConfigurationError for a file that cannot be read, and OSError if a copy cannot be written.
    """
    for path in _other_files(model_dir):
        if path.name not in but:
            copy = folder / path.relative_to(model_dir)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(read_bytes(path))


def _other_files(model_dir: Path) -> list[Path]:
    paths = [path for path in checkpoint_files(model_dir) if not is_of_weights(path)]
    for path in paths:
        if not path.is_file():
            raise ConfigurationError(
                f"{path} is no file, or a link that leads nowhere: remove it, or put the model's own file there"
            )
    return paths


def checkpoint_files(model_dir: Path) -> list[Path]:
    """All files of a checkpoint, named chat templates included. Raises ConfigurationError if they cannot be listed."""
    folder, template = NAMED_TEMPLATES.split("/")
    try:
        found = {model_dir / name for pattern in FILES for name in matching(os.listdir(model_dir), pattern)}
        if (model_dir / folder).is_dir():
            found |= {model_dir / folder / name for name in matching(os.listdir(model_dir / folder), template)}
    except OSError as error:
        raise ConfigurationError(f"cannot list the files in {error.filename}: {error.strerror}") from error
    return sorted(found)


def is_of_weights(path: Path) -> bool:
    """True for a file of weights or their index."""
    return ".safetensors" in path.name
