"""Files that must stay as they are while a model is made of them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError

_State = tuple[int, int, int, int]
"""Device, inode, size and time of the last change. Another file under a name, or other contents, have another state."""


@dataclass(frozen=True, slots=True)
class WatchedFiles:
    """Files with their states when they were opened. The state of a file that is gone is None."""

    states: Mapping[Path, _State | None]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "WatchedFiles":
        return cls({path: _state(path) for path in paths})

    def and_of(self, paths: Iterable[Path]) -> "WatchedFiles":
        """These files, and others in their present state."""
        return WatchedFiles({path: _state(path) for path in paths} | dict(self.states))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise ConfigurationError if a file changes in the block. It replaces an error of the block itself, which
        would only name an effect of the change, such as pages that cannot be read.
        """
        try:
            yield
        except ConfigurationError:
            self.require_unchanged()
            raise
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raise ConfigurationError if a file has changed: the result would be made of two models, and a file that was
        cut off ends the process when the rest of its pages are read (`engine/bus_errors.py`).
        """
        if (path := self.first_changed()) is not None:
            raise has_changed(path)

    def first_changed(self) -> Path | None:
        """The first file that has changed, or None."""
        return next((path for path, state in self.states.items() if _state(path) != state), None)


def has_changed(path: Path) -> ConfigurationError:
    """The error for a file that has changed while a model was made of it."""
    return ConfigurationError(
        f"{path} has changed since the run began, so nothing is written: run it again once the checkpoint stays "
        "as it is"
    )


def _state(path: Path) -> _State | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
