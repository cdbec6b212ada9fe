"""Hands secrets to a child process through a pipe. Environment variables would not do: every process of the same user
can read them in /proc while the child runs.
"""

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from mesh.domain.errors import ConfigurationError

_FD_NAME = "TANDEM_SECRETS_FD"


@contextmanager
def handing_over(secrets: Mapping[str, str]) -> Iterator[tuple[dict[str, str], int]]:
    """Offer `secrets`, by names of environment variables, to a child that is started within the block.

    Yields extra environment variables for the child and a file descriptor that the child must inherit. Raises
    ConfigurationError if the secrets are too long.
    """
    reading, writing = os.pipe()
    try:
        _fill(writing, json.dumps(dict(secrets)).encode())
        yield {_FD_NAME: str(reading)}, reading
    finally:
        os.close(reading)


def take_secrets(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Return the secrets from the parent process. A second call returns nothing."""
    fd = environ.pop(_FD_NAME, None)
    if fd is None:
        return {}
    with open(int(fd), "rb") as pipe:
        secrets: dict[str, str] = json.load(pipe)
    return secrets


def _fill(pipe: int, data: bytes) -> None:
    """Write `data` and close the pipe. No process reads yet, so the pipe's buffer must hold all of it."""
    os.set_blocking(pipe, False)
    try:
        if os.write(pipe, data) < len(data):
            raise BlockingIOError
    except BlockingIOError:
        raise ConfigurationError("secret settings, handler properties included, have 64 KiB at most") from None
    finally:
        os.close(pipe)
