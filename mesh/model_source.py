"""Where a model's files are: a folder of this machine, a repository of the Hugging Face hub, or a prefix in S3.

    --model ./folder                     the folder
    --model org/name [--revision TAG]    the hub's cache, after a download of what is missing (mesh/model_hub.py)
    --model s3://bucket/prefix           a cache of our own, after a download of all (mesh/model_s3.py)

Whoever starts a mesh locates its model once and gives its services the folder; a service that is started by itself
locates its own, and several that do so at once download once. No code is ever fetched: only weights and text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError

Progress = Callable[[float], None]
"""Called with the fraction of bytes that are there, up to 1.0."""

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""What a checkpoint is made of, at its top level."""

NOT_FILES = ("*/*", "consolidated*.safetensors", "*.onnx.json")
"""Folders, and second copies of the weights in other layouts."""

_NAMED = re.compile(r"([\w.-]+)=(.+?)(?=,[\w.-]+=|$)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by its name. `revision`: branch, tag or commit on the hub. `cache_dir`: where S3's models are kept."""

    name: str
    revision: str = ""
    cache_dir: str = "~/.cache/tandem"

    @property
    def is_remote(self) -> bool:
        """True if locating it may need the network."""
        return self.name.startswith("s3://") or self._is_on_hub

    @property
    def _is_on_hub(self) -> bool:
        return bool(_HUB_NAME.fullmatch(self.name)) and not Path(self.name).exists()

    @property
    def short_name(self) -> str:
        """The last part: what the model is called where nobody says otherwise."""
        if self.is_remote:
            return self.name.rstrip("/").rpartition("/")[2]
        return Path(self.name).expanduser().resolve().name

    def locate(self, on_progress: Progress = lambda fraction: None) -> Path:
        """The folder with the files, downloaded if need be. May take long. Raises ConfigurationError."""
        on_progress = _by_percent(on_progress)
        if self.revision and not self._is_on_hub:
            raise ConfigurationError(f"revision is for models on the Hugging Face hub, and {self.name} is none")
        if self.name.startswith("s3://"):
            from mesh.model_s3 import download

            return _with_config(download(self.name, Path(self.cache_dir).expanduser(), on_progress), self.name)
        if self._is_on_hub:
            from mesh.model_hub import snapshot

            return _with_config(snapshot(self.name, self.revision, on_progress), self.name)
        folder = Path(self.name).expanduser()
        if not folder.is_dir():
            raise ConfigurationError(f"there is no model folder {self.name}")
        return _with_config(folder.resolve(), f"the folder {self.name}")


def split_models(text: str) -> list[tuple[str, str]]:
    """Served name and source of each model in `NAME=MODEL,NAME=MODEL`. One without a name has "" for it.

    Raises ConfigurationError if two have the same name.
    """
    if not _NAMED.match(text):
        return [("", text)]
    models = [(name, model.rstrip(",")) for name, model in _NAMED.findall(text)]
    names = [name for name, _ in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two models are named {name}")
    return models


def _by_percent(on_progress: Progress) -> Progress:
    """Tell of whole percents only: bytes come in by many small pieces."""
    told = -1

    def report(fraction: float) -> None:
        nonlocal told
        percent = int(fraction * 100)
        if percent > told:
            told = percent
            on_progress(fraction)

    return report


def _with_config(folder: Path, what: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{what} holds no model: it has no config.json")
    return folder
