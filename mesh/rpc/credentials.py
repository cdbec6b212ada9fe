"""Credentials for calls between members of the mesh (mesh key, certificates), and where servers may listen."""

import hmac
from dataclasses import dataclass, field
from typing import Protocol

from mesh.domain.addresses import is_loopback
from mesh.domain.errors import ConfigurationError, Unauthenticated
from mesh.rpc.tls import TlsIdentity

Metadata = tuple[tuple[str, str | bytes], ...]

_HEADER = "authorization"
_MIN_KEY_CHARS = 16


class Guard(Protocol):
    """Authenticates the calls to a server. Plug point: MeshKey inside the mesh, KeysFile on the public port."""

    def check(self, metadata: Metadata | None) -> None:
        """Raise Unauthenticated unless `metadata` of the call contains a valid credential."""
        ...


@dataclass(frozen=True, slots=True)
class MeshKey:
    """The secret that all members of the mesh share. It is never printed or logged."""

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < _MIN_KEY_CHARS:
            raise ConfigurationError(
                f"the mesh key has fewer than {_MIN_KEY_CHARS} characters; make one with: openssl rand -hex 32"
            )

    def metadata(self) -> Metadata:
        """Return the metadata for outgoing calls."""
        return ((_HEADER, f"Bearer {self.secret}"),)

    def check(self, metadata: Metadata | None) -> None:
        """Raise Unauthenticated unless incoming `metadata` carries this key."""
        for key, value in metadata or ():
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if key == _HEADER and hmac.compare_digest(text.encode(), f"Bearer {self.secret}".encode()):
                return
        raise Unauthenticated("this service accepts calls from the mesh only: the mesh key is missing or wrong")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a member of the mesh: the mesh key, mutual TLS, or both. Every server of the mesh requires all
    of them and every channel presents all of them. With neither, servers listen on loopback only.
    """

    key: MeshKey | None = None
    tls: TlsIdentity | None = None

    def metadata(self) -> Metadata:
        """Return the metadata for outgoing calls."""
        return self.key.metadata() if self.key is not None else ()


def require_safe_bind(host: str, *, advice: str) -> None:
    """Raise ConfigurationError with `advice` if `host` is reachable from other machines."""
    if not is_loopback(host):
        raise ConfigurationError(f"refusing to listen on {host} without credentials: {advice}, or listen on 127.0.0.1")
