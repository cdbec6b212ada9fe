"""A folder that is being written appears when it is complete, or not at all."""

import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mesh.domain.errors import ConfigurationError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's share of it, that has no room left."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write to, which becomes `out` at the end of the block. Raises ConfigurationError if
    `out` exists or another process writes it, and in place of any OSError.

    The folder is removed if the block fails, with the parents that were made for it; so are, now, folders of processes
    that were killed. A lock tells them from those of processes that write.
    """
    require_absent(out)
    made: list[Path] = []
    try:
        with ExitStack() as stack:
            made = [parent for parent in out.parents if not parent.exists()]
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = _begin(out, stack)
            try:
                yield partial
                _require_still_absent(out)
                partial.rename(out)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except BaseException as error:
        for parent in made:
            with suppress(OSError):  # it was not made, or somebody else uses it now
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        advice = ": make room there, or write elsewhere" if error.errno in FULL else ""
        raise ConfigurationError(f"cannot write {out}: {error}{advice}") from error


def require_absent(out: Path) -> None:
    """Raise ConfigurationError if a folder that is to be written exists, or a link that leads nowhere; `..` does as
    soon as its parent is made.
    """
    if os.path.lexists(out) or out.name == "..":
        raise ConfigurationError(f"{out} exists already: remove it, or choose another folder")


def _require_still_absent(out: Path) -> None:
    """Raise ConfigurationError if something else has made `out`: an empty folder would be replaced."""
    if os.path.lexists(out):
        raise ConfigurationError(
            f"{out} has appeared since the run began, so nothing is written: remove it, or choose another folder, and "
            "run it again"
        )


def _begin(out: Path, stack: ExitStack) -> Path:
    """Make the folder to write to. `stack` gets its lock. Raises ConfigurationError if another process writes `out`."""
    with _alone_in(out.parent):
        for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.partial")):
            _remove_abandoned(path, out)
        partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
        partial.mkdir()
        stack.enter_context(_locked(partial))
    return partial


def _remove_abandoned(partial: Path, out: Path) -> None:
    """Remove the folder of a process that was killed. Raises ConfigurationError if its process still writes."""
    try:
        with _locked(partial):
            shutil.rmtree(partial, ignore_errors=True)
    except BlockingIOError as error:
        raise ConfigurationError(
            f"another run is writing {out}, into {partial.name} beside it: wait for its end, or choose another folder"
        ) from error
    except OSError:  # no folder, or one of another user
        pass


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other processes that begin to write in `folder`: they could take each other's new folders, which have no
    lock yet, for abandoned ones. A folder that may not be read shows no others' folders either.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases however the process ends. Raises BlockingIOError if it is
    taken, and OSError.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
