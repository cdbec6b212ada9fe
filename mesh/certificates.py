"""Certificate files of TLS servers, checked before anything starts, and those that clients see, over gRPC and HTTP."""

import contextlib
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class PublicTlsSettings:
    """The certificate of a port for clients; the router and the HTTP gateway have the same settings."""

    public_tls_cert: str = setting("", "PEM file: certificate chain that clients see; turns on TLS for them")
    public_tls_key: str = setting("", "PEM file: the certificate's private key")

    def public_tls_files(self) -> tuple[str, str] | None:
        """Return certificate and key, None if there are none. Raises ConfigurationError if there is only one."""
        if bool(self.public_tls_cert) != bool(self.public_tls_key):
            raise ConfigurationError("public_tls_cert and public_tls_key belong together: one of them is not set")
        return (self.public_tls_cert, self.public_tls_key) if self.public_tls_cert else None


def read_pem(path: str) -> bytes:
    """Raises ConfigurationError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def host_in(cert: str, key: str, ca: str = "") -> str:
    """Return a host name in the certificate. Raises ConfigurationError if readable files have expired, do not belong
    together, or name no host.
    """
    try:
        name = _own_name(cert, key, ca)
    except ssl.SSLCertVerificationError as error:
        # Without a CA the certificate is verified against itself, so only its dates can be wrong.
        issuer = f" of {ca}" if ca else ""
        raise ConfigurationError(f"{cert} is no valid certificate{issuer}: {error.verify_message}") from error
    except (ssl.SSLError, ValueError) as error:
        files = ", ".join(filter(None, (cert, key, ca)))
        reason = getattr(error, "reason", None) or "not PEM"
        raise ConfigurationError(f"{files} cannot be used together for TLS: {reason}") from error
    if not name:
        raise ConfigurationError(f"{cert} names no host: clients need a subjectAltName, DNS or IP")
    return name


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """What an HTTP server with this certificate needs. Raises ConfigurationError."""
    for path in (cert, key):
        read_pem(path)
    host_in(cert, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key)
    return context


def _own_name(cert: str, key: str, ca: str) -> str:
    """Return a host name in the certificate, "" if there is none. Raises ssl.SSLError.

    The name is read from an in-memory handshake of the certificate with itself, as server and, with a CA, as client.
    The handshake also finds every error that real handshakes would fail with.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    server.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask at a terminal
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(ca or cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    peers = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for peer in (*peers, *peers):
        with contextlib.suppress(ssl.SSLWantReadError):
            peer.do_handshake()
    names: Any = (peers[0].getpeercert() or {}).get("subjectAltName", ())
    hosts = [value.replace("*", "any") for kind, value in names if kind == "DNS"]
    addresses = [str(ipaddress.ip_address(value)) for kind, value in names if kind == "IP Address"]
    return next(iter([*hosts, *addresses]), "")
