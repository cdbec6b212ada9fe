"""The certificate that clients see, over gRPC (the router) and HTTP (the gateway)."""

import asyncio
import itertools
import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from mesh.certificate_expiry import ExpiryReports
from mesh.certificates import host_in, read_pem, read_validities
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import is_loopback
from mesh.settings import setting

T = TypeVar("T")

log = structlog.get_logger(__name__)

_CHECK_INTERVAL_S = 1.0
_EXPIRY_TURNS = 60
"""The dates of the certificate in use are checked once in so many intervals."""


@dataclass(frozen=True, kw_only=True)
class PublicTlsSettings:
    """Router and gateway have them both, so that one pair of files serves gRPC and HTTP."""

    public_tls_cert: str = setting("", "PEM file: certificate chain that clients see; turns on TLS for them")
    public_tls_key: str = setting("", "PEM file: the certificate's private key")

    def public_tls_files(self) -> tuple[str, str] | None:
        """Return certificate and key, None if there are none. Raises ConfigurationError if there is only one."""
        if bool(self.public_tls_cert) != bool(self.public_tls_key):
            raise ConfigurationError("public_tls_cert and public_tls_key belong together: one of them is not set")
        return (self.public_tls_cert, self.public_tls_key) if self.public_tls_cert else None


class CertificateReloader(Generic[T]):
    """A value that `load` makes of certificate and key, the files of `public_tls_files`, and that `follow` makes again
    when they are replaced. Raises ConfigurationError as `load` does.
    """

    def __init__(self, files: tuple[str, str], load: Callable[[str, str], T]) -> None:
        self._files = files
        self._load = load
        self._used = self._version()
        self._is_usable = True
        self.latest = load(*files)
        self._reports = ExpiryReports("replace its files before, or clients will refuse it")

    async def follow(self) -> None:
        """Keep `latest` up to date until cancelled. Files that cannot be used, or have expired, are reported once,
        and those that will soon expire once a day.
        """
        seen = self._used
        for turn in itertools.count(1):
            await asyncio.sleep(_CHECK_INTERVAL_S)
            before, seen = seen, self._version()
            if seen == before and seen != self._used:  # certificate and key are not replaced at the same moment
                self._used = seen
                self._load_again("the new certificate cannot be used, clients still see the one before", is_new=True)
            elif self._is_usable and seen == self._used and turn % _EXPIRY_TURNS == 0:
                self._load_again("clients refuse the certificate: replace its files", is_new=False)
                self._warn_of_expiry()

    def _load_again(self, failure: str, *, is_new: bool) -> None:
        cert, key = self._files
        try:
            loaded = self._load(cert, key)
        except (ConfigurationError, OSError) as error:  # OSError: files that were replaced again while they were read
            self._is_usable = False
            log.error(failure, error=str(error))
            return
        self._is_usable = True
        if is_new:
            self.latest = loaded
            log.info("certificate read again, new connections use it", public_tls_cert=cert)

    def _warn_of_expiry(self) -> None:
        with suppress(ConfigurationError):  # files that were replaced meanwhile: the next turn reads them
            self._reports.warn(read_validities(*self._files)[0], time.time())

    def _version(self) -> list[tuple[int, int, int] | None]:
        """Return a value that changes with the files, also where they are symbolic links."""
        return [_version_of(path) for path in self._files]


def _version_of(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def warn_of_open_keys(host: str, settings: PublicTlsSettings) -> None:
    """Warn of API keys that travel unencrypted: to a service that listens beyond loopback without a certificate."""
    if not settings.public_tls_cert and not is_loopback(host):
        log.warning(
            "API keys and prompts are sent unencrypted: set public_tls_cert and public_tls_key, or listen on 127.0.0.1 "
            "behind a proxy that terminates TLS",
            host=host,
        )


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS of an HTTP server with this certificate. Raises ConfigurationError."""
    for path in (cert, key):
        read_pem(path)
    host_in(cert, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key)
    return context
