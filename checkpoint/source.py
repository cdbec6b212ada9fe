"""Locations of a model's files: a local folder, a repository of the Hugging Face hub, or a prefix in S3.

    --model ./folder                     the folder
    --model org/name [--revision TAG]    the hub's cache, after downloading missing files
    --model s3://bucket/prefix           Tandem's cache, after downloading all files (checkpoint/s3.py)

`tandem up` locates the model once and passes the folder to its services. A service that is started alone locates its
model itself; several services that start together download it once. Only weights and text are downloaded, never code.
"""

import io
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.config_json import require_searchable
from checkpoint.gguf.file import hint_at_gguf, is_gguf
from mesh.domain.errors import ConfigurationError, missing_extra

Progress = Callable[[float], None]
"""Called with the downloaded fraction of all bytes, up to 1.0."""

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Patterns of a checkpoint's files, at its top level."""

NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
"""Pattern of chat templates that are not the default one, in the folder in which transformers saves them."""

NOT_FILES = (
    "*/*/*",
    *(f"*/{pattern}" for pattern in FILES if pattern != "*.jinja"),
    "consolidated*.safetensors",
    "*.onnx.json",
)
"""Patterns of files to skip: what is in folders, except templates, and copies of the weights in other formats. `*`
matches slashes, too."""

_NAMED = re.compile(r"([\w.-]+)=(.+?)(?=,[\w.-]+=|$)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REPORT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name. `revision` is a branch, tag or commit on the hub; `cache_dir` is the folder for models from
    S3."""

    name: str
    revision: str = ""
    cache_dir: str = "~/.cache/tandem"

    @property
    def is_remote(self) -> bool:
        """True if locating the model may need the network."""
        return self.name.startswith("s3://") or self._is_on_hub

    @property
    def _is_on_hub(self) -> bool:
        return bool(_HUB_NAME.fullmatch(self.name)) and not Path(self.name).exists()

    @property
    def short_name(self) -> str:
        """The last part of the name: the default name of the served model."""
        if self.is_remote:
            return self.name.rstrip("/").rpartition("/")[2]
        return _resolved(home_expanded(self.name)).name.removesuffix(".gguf")

    def locate(self, on_progress: Progress = lambda fraction: None) -> Path:
        """Return the folder with the files, downloaded if needed, which may take long. Raises ConfigurationError."""
        on_progress = _by_percent(on_progress)
        if self.revision and not self._is_on_hub:
            raise ConfigurationError(f"revision is for models on the Hugging Face hub; {self.name} is not one")
        if self.name.startswith("s3://"):
            from checkpoint.s3 import download

            return _with_config(download(self.name, home_expanded(self.cache_dir), on_progress), self.name)
        if self._is_on_hub:
            return _with_config(_hub_snapshot(self.name, self.revision, on_progress), self.name)
        folder = home_expanded(self.name)
        require_searchable(folder)
        if folder.is_file() and is_gguf(folder):
            raise ConfigurationError(f"{self.name} is in llama.cpp's format: run tandem convert {self.name} OUT")
        if folder.is_file():
            raise ConfigurationError(f"{self.name} is a file: name the folder that it is in")
        if not folder.is_dir():
            raise ConfigurationError(f"there is no model folder {self.name}")
        return _with_config(_resolved(folder), f"the folder {self.name}")


def home_expanded(path: str) -> Path:
    """The path with its `~` or `~user` replaced. Raises ConfigurationError if there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{path}: there is no home folder for {path.partition('/')[0]}") from error


def _resolved(path: Path) -> Path:
    """The absolute path without symbolic links. Raises ConfigurationError."""
    try:
        resolved = path.resolve()
    except FileNotFoundError as error:
        raise ConfigurationError("the current folder has been deleted: change to another") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle, until Python 3.13
        raise ConfigurationError(f"{path} cannot be followed: {getattr(error, 'strerror', None) or error}") from error
    try:
        str(resolved).encode()
    except UnicodeEncodeError as error:  # libraries in C++ and Rust, and names of models in messages, take UTF-8 only
        raise ConfigurationError(
            f"the path {os.fsencode(resolved)!r} is not UTF-8: rename it, or set a UTF-8 locale (LC_ALL=C.UTF-8)"
        ) from error
    return resolved


def split_models(text: str) -> list[tuple[str, str]]:
    """Parse `NAME=MODEL,NAME=MODEL` into (served name, source) pairs. A single model without a name gets the name "".

    Raises ConfigurationError for duplicate names.
    """
    if not _NAMED.match(text):
        return [("", text)]
    models = [(name, model.rstrip(",")) for name, model in _NAMED.findall(text)]
    names = [name for name, _ in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two models are named {name}")
    return models


def _hub_snapshot(name: str, revision: str, on_progress: Progress) -> Path:
    """Download one revision from the hub if needed and return its folder. Raises ConfigurationError.

    The files are in huggingface_hub's cache, which other programs share. With HF_HUB_OFFLINE, or if the hub is
    unreachable, a complete snapshot in the cache is used. HF_HOME, HF_TOKEN and HF_ENDPOINT have their usual meaning.
    The library's file locks allow several processes to download at once.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]
    except ImportError as error:
        raise missing_extra("models of the hub need huggingface_hub", "hub") from error
    what = f"model {name}" + (f" at revision {revision}" if revision else "")
    try:
        folder: Path | str = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(FILES),
            ignore_patterns=list(NOT_FILES),
            tqdm_class=_reporting(tqdm, on_progress),
        )
    except GatedRepoError:
        raise ConfigurationError(f"{what} is gated on the hub: ask for access there, and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ConfigurationError(f"the hub has no {what}") from None
    except RepositoryNotFoundError:
        raise ConfigurationError(
            f"{name} is neither a folder here nor a model of the hub (a private one needs HF_TOKEN)"
        ) from None
    except Exception as error:  # of the library, its HTTP client or the system: whatever it is, the files are missing
        raise ConfigurationError(f"cannot get {what} from the hub: {' '.join(str(error).split())}") from error
    return Path(folder)


def _reporting(progress_bar: Any, on_progress: Progress) -> type[Any]:
    """Return a progress bar class for huggingface_hub that reports bytes and draws nothing."""

    class Reporting(progress_bar):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            refreshed = super().update(n)
            if not self.disable and self.unit == "B" and self.total:
                on_progress(min(1.0, self.n / self.total))
            return refreshed

    return Reporting


def _by_percent(on_progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Limit calls of `on_progress` to one per percent, because bytes arrive in many small pieces. There is also one
    every _REPORT_EVERY_S while bytes arrive, because a percent of a large model may take long.
    """
    last_percent, last_s = -1, clock()

    def report(fraction: float) -> None:
        nonlocal last_percent, last_s
        percent, now_s = int(fraction * 100), clock()
        if percent > last_percent or now_s - last_s >= _REPORT_EVERY_S:
            last_percent, last_s = max(last_percent, percent), now_s
            on_progress(fraction)

    return report


def _with_config(folder: Path, what: str) -> Path:
    config = folder / "config.json"
    if config.is_symlink() and not config.exists():
        raise ConfigurationError(f"{config} is a link that leads nowhere: download the model again")
    if not config.is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = "; it holds a LoRA adapter: serve its base model with --adapter NAME=FOLDER" if is_adapter else ""
        if (folder / "snapshots").is_dir():
            name = folder.name.removeprefix("models--").replace("--", "/")
            hint = f"; it is a folder of Hugging Face's cache: give the name {name}, or a folder in its snapshots"
        raise ConfigurationError(f"{what} holds no model: it has no config.json{hint or hint_at_gguf(folder)}")
    return folder
