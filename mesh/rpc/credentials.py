"""Who may call a server: holders of the mesh key, of a certificate, or of both; and where servers may listen."""

import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import Protocol

from mesh.domain.errors import ConfigurationError, Unauthenticated
from mesh.rpc.tls import TlsIdentity

Metadata = tuple[tuple[str, str | bytes], ...]

_HEADER = "authorization"
_MIN_KEY_CHARS = 16


class Guard(Protocol):
    """Decides who may call a server's methods. Plug point: MeshKey inside the mesh, KeysFile on the public port."""

    def check(self, metadata: Metadata | None) -> None:
        """Raise Unauthenticated unless the call's `metadata` carries a good credential."""
        ...


@dataclass(frozen=True, slots=True)
class MeshKey:
    """The secret. It is never printed or logged."""

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < _MIN_KEY_CHARS:
            raise ConfigurationError(
                f"the mesh key has fewer than {_MIN_KEY_CHARS} characters; make one with: openssl rand -hex 32"
            )

    def metadata(self) -> Metadata:
        """Metadata for outgoing calls."""
        return ((_HEADER, f"Bearer {self.secret}"),)

    def check(self, metadata: Metadata | None) -> None:
        """Raise Unauthenticated unless incoming `metadata` carries this key."""
        for key, value in metadata or ():
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if key == _HEADER and hmac.compare_digest(text.encode(), f"Bearer {self.secret}".encode()):
                return
        raise Unauthenticated("this service takes calls from the mesh only: the mesh key is missing or wrong")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What makes a process a member of the mesh: the mesh key, mutual TLS, or both. Every mesh server asks for all of
    it, every mesh channel shows all of it. With neither, the mesh is this machine's loopback.
    """

    key: MeshKey | None = None
    tls: TlsIdentity | None = None

    def metadata(self) -> Metadata:
        """Metadata for outgoing calls."""
        return self.key.metadata() if self.key is not None else ()


def require_safe_bind(host: str, *, advice: str) -> None:
    """Raise ConfigurationError with `advice` if `host` can be reached from other machines."""
    if host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigurationError(f"refusing to listen on {host} without credentials: {advice}, or listen on 127.0.0.1")
