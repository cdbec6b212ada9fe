"""Downloads models from the Hugging Face hub into huggingface_hub's cache, which other programs share.

With HF_HUB_OFFLINE, or if the hub is unreachable, a complete snapshot in the cache is used. HF_HOME, HF_TOKEN and
HF_ENDPOINT have their usual meaning. The library's file locks allow several processes to download at once.
"""

import io
from pathlib import Path
from typing import Any

from checkpoint.source import FILES, NOT_FILES, Progress
from mesh.domain.errors import ConfigurationError

try:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]
except ImportError as error:
    raise ConfigurationError("models of the hub need huggingface_hub: install tandem-serve[hub]") from error


def snapshot(name: str, revision: str, on_progress: Progress) -> Path:
    """Download one revision if needed and return its folder. Raises ConfigurationError."""
    what = f"model {name}" + (f" at revision {revision}" if revision else "")
    try:
        folder: Path | str = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(FILES),
            ignore_patterns=list(NOT_FILES),
            tqdm_class=_reporting(on_progress),
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


def _reporting(on_progress: Progress) -> type[Any]:
    """Return a progress bar class for huggingface_hub that reports bytes and draws nothing."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            refreshed = super().update(n)
            if not self.disable and self.unit == "B" and self.total:
                on_progress(min(1.0, self.n / self.total))
            return refreshed

    return Reporting
