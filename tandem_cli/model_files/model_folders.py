"""Folders of models: the bundled ones, those that a name finds, and those of a configuration without weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from checkpoint.gguf.file import is_gguf
from checkpoint.source import ModelSource, Progress, home_expanded
from mesh.domain.errors import ConfigurationError

BUNDLED_MODELS = Path(__file__).resolve().parents[2] / "demo_model"
BUNDLED = BUNDLED_MODELS / "tandem-small"


def find_model(source: ModelSource, on_progress: Progress = lambda fraction: None) -> Path:
    """The folder of a model: bundled, local, downloaded, or made once of a file in GGUF. Raises ConfigurationError if
    the model cannot be found.
    """
    names = sorted(config.parent.name for config in BUNDLED_MODELS.glob("*/config.json"))
    if source.name in names:
        return BUNDLED_MODELS / source.name
    if not source.is_remote and is_gguf(path := home_expanded(source.name)) and not path.is_dir():
        from tandem_cli.model_files.convert_gguf import converted_once  # which takes seconds to import

        return converted_once(path, home_expanded(source.cache_dir))
    try:
        return source.locate(on_progress)
    except ConfigurationError as error:
        hint = f"; bundled are: {', '.join(names)}" if names and not source.is_remote else ""
        raise ConfigurationError(f"{error}{hint}") from error


def load_format_of(model_dir: Path) -> str:
    """The load format of a folder, which may have no weights."""
    return "auto" if any(model_dir.glob("*.safetensors")) else "dummy"


def write_without_weights(folder: Path, config: Mapping[str, object]) -> Path:
    """Write a model without weights, with the bundled tokenizer, into `folder`, which is made if it is not there.
    Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    return folder
