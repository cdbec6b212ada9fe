"""Models of the Hugging Face hub, in huggingface_hub's own cache: what other programs have downloaded is found there.

With HF_HUB_OFFLINE, or when the hub cannot be reached, a complete snapshot in the cache is enough. HF_HOME, HF_TOKEN
and HF_ENDPOINT hold as everywhere. The library's file locks let several processes ask at once.
"""

import io
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.model_source import FILES, NOT_FILES, Progress

try:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]
except ImportError as error:
    raise ConfigurationError("models of the hub need huggingface_hub: install tandem-serve[hub]") from error


def snapshot(name: str, revision: str, on_progress: Progress) -> Path:
    """The folder of one revision, complete. Raises ConfigurationError."""
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
    except Exception as error:  # of the library, its HTTP client and the system: all mean that the files are not there
        raise ConfigurationError(f"cannot get {what} from the hub: {' '.join(str(error).split())}") from error
    return Path(folder)


def _reporting(on_progress: Progress) -> type[Any]:
    """A progress bar of the library's kind that reports bytes and draws nothing."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if not self.disable and self.unit == "B" and self.total:
                on_progress(min(1.0, self.n / self.total))
            return shown

    return Reporting
