"""TLS: the certificate a service shows, and whose certificates it believes.

Inside the mesh TLS is mutual: servers and clients show certificates of one CA, and a server's must name the address it
is reached at (or `peer_name`). On the public port only the router shows one.
"""

import contextlib
import ipaddress
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import grpc

from mesh.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A certificate chain and its private key, PEM. `load` is the way to make one.

    `ca` holds the certificates of the CA that peers' certificates must come from; without it, clients need none.
    `name` is one that the own certificate carries. `peer_name`, if set, is looked for in peers' certificates instead
    of the address they are reached at.
    """

    chain: bytes
    key: bytes = field(repr=False)
    ca: bytes | None = None
    name: str = ""
    peer_name: str = ""

    @classmethod
    def load(cls, cert: str, key: str, ca: str = "", *, peer_name: str = "") -> Self:
        """Read PEM files. Raises ConfigurationError if they are unreadable, expired, or do not belong together."""
        chain, secret, authority = _read(cert), _read(key), _read(ca) if ca else None
        try:
            name = _own_name(cert, key, ca)
        except ssl.SSLCertVerificationError as error:
            # Without a CA the certificate vouches for itself, so only its dates can be wrong.
            of = f" of {ca}" if ca else ""
            raise ConfigurationError(f"{cert} is no valid certificate{of}: {error.verify_message}") from error
        except (ssl.SSLError, ValueError) as error:
            files = ", ".join(filter(None, (cert, key, ca)))
            reason = getattr(error, "reason", None) or "not PEM"
            raise ConfigurationError(f"{files} cannot be used together for TLS: {reason}") from error
        if not name:
            raise ConfigurationError(f"{cert} names no host: clients look for its subjectAltName, DNS or IP")
        return cls(chain, secret, authority, name, peer_name)

    def for_itself(self) -> "TlsIdentity":
        """What a client on the same machine needs to reach the server that shows this certificate."""
        return replace(self, ca=self.ca or self.chain, peer_name=self.name)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server; with a CA it refuses clients that show no certificate of it."""
        return grpc.ssl_server_credentials([(self.key, self.chain)], self.ca, self.ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    def channel_options(self) -> list[tuple[str, Any]]:
        """Options that go with the credentials."""
        return [("grpc.ssl_target_name_override", self.peer_name)] if self.peer_name else []


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def _own_name(cert: str, key: str, ca: str) -> str:
    """A host that the certificate is for, "" if none. Found by a handshake with itself in memory, as server and, with a
    CA, as client: that also finds what any other handshake would fail at. Raises ssl.SSLError.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    server.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask at a terminal
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(ca or cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for end in (*ends, *ends):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    names: Any = (ends[0].getpeercert() or {}).get("subjectAltName", ())
    hosts = [value.replace("*", "any") for kind, value in names if kind == "DNS"]
    addresses = [str(ipaddress.ip_address(value)) for kind, value in names if kind == "IP Address"]
    return next(iter([*hosts, *addresses]), "")
