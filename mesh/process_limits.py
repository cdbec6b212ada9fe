"""Limits that the system sets for a process: on its open files (`ulimit -n`) and on its address space (`ulimit -v`)."""

import asyncio
import errno
import mmap
import os
import resource

import structlog

from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

_MAX_OPEN_FILES = 1 << 20
_FILES_CHECK_S = 1.0
_FILES_PAUSE_S = 60.0
"""After a line about open files, until the next look at them."""
_NUM_THREADS = 32
"""Threads that a service's libraries start beside those of its engine."""
_USUAL_STACK_BYTES = 8 << 20
_WORDS_OF_LACK = ("can't start new thread", "can't allocate memory", "Cannot allocate memory")


def raise_open_files() -> int:
    """Raise the limit on open files as far as the system allows, and return it. Every connection takes one file, and
    the usual soft limit of 1,024 is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


async def watch_open_files() -> None:
    """Log, until cancelled, when no further file can be opened. gRPC's core only says that it tries again, while
    clients wait.
    """
    while True:
        await asyncio.sleep(_FILES_CHECK_S)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                continue
            log.error(
                "no more files can be opened, so new connections are not accepted: raise the limit of open files "
                "(ulimit -n, LimitNOFILE) and start again, or close idle connections",
                limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                reason=error.strerror,
            )
            await asyncio.sleep(_FILES_PAUSE_S)


def require_room_for_threads() -> None:
    """Raise ConfigurationError if the address space that is left holds no stacks of the threads that a server starts.
    gRPC would write the same line each second, and end the process.
    """
    if _address_space() is None:
        return
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack_bytes = _USUAL_STACK_BYTES if stack_bytes == resource.RLIM_INFINITY else stack_bytes
    try:
        mmap.mmap(-1, _NUM_THREADS * stack_bytes, prot=mmap.PROT_READ).close()
    except OSError as error:
        raise ConfigurationError(f"no room for the stacks of {_NUM_THREADS} threads: {_advice()}") from error


def lack_of_memory(error: BaseException) -> str | None:
    """A sentence for an error that a limit on the address space has caused; None for any other."""
    is_lack = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    is_lack = is_lack or (
        isinstance(error, OSError | RuntimeError) and any(map(str(error).__contains__, _WORDS_OF_LACK))
    )
    return f"out of memory: {_advice()}" if is_lack and _address_space() is not None else None


def _advice() -> str:
    return (
        f"ulimit -v allows this process {(_address_space() or 0) / 2**30:.2f} GiB of address space, of which mapped "
        "files and stacks take much more than they use; start it after ulimit -v unlimited"
    )


def _address_space() -> int | None:
    """The limit in bytes; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
