"""Credentials of the mesh's members (TLS identities and the mesh key), and where servers may listen without them.

Inside the mesh TLS is mutual: servers and clients present certificates of one CA, and a server's certificate must
contain the address that clients connect to (or `peer_name`). On the public port only the router presents one.
"""

import hmac
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import grpc

from mesh.certificates import host_in, read_pem
from mesh.domain.errors import ConfigurationError, Unauthenticated
from mesh.domain.host import is_loopback

Metadata = tuple[tuple[str, str | bytes], ...]

_HEADER = "authorization"
_MIN_KEY_CHARS = 16


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A certificate chain and its private key, PEM. Use `load` to create one.

    `ca` holds the CA certificates that sign all peers' certificates; without it, clients need no certificate. `name` is
    a host name in this service's certificate. `peer_name`, if set, must be in a peer's certificate in place of the
    peer's address.
    """

    chain: bytes
    key: bytes = field(repr=False)
    ca: bytes | None = None
    name: str = ""
    peer_name: str = ""

    @classmethod
    def load(cls, cert: str, key: str, ca: str = "", *, peer_name: str = "") -> Self:
        """Read PEM files. Raises ConfigurationError if they are unreadable, expired, do not belong together, or
        lack `peer_name`, which certificates of all peers contain.
        """
        chain, secret, authority = read_pem(cert), read_pem(key), read_pem(ca) if ca else None
        return cls(chain, secret, authority, host_in(cert, key, ca, peer_name), peer_name)

    def for_itself(self) -> "TlsIdentity":
        """Return the identity of a client on the same machine that connects to a server with this certificate."""
        return replace(self, ca=self.ca or self.chain, peer_name=self.name)

    def server_credentials(self) -> grpc.ServerCredentials:
        """With a CA, the server refuses clients without a certificate of that CA."""
        return grpc.ssl_server_credentials([(self.key, self.chain)], self.ca, self.ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    def channel_options(self) -> list[tuple[str, str]]:
        """Channel options that must accompany `channel_credentials`."""
        return [("grpc.ssl_target_name_override", self.peer_name)] if self.peer_name else []


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


def require_trusted_fabric(host: str, *, is_trusted: bool, name: str) -> None:
    """Raise ConfigurationError unless `host`, of the setting `name`, is on this machine or the operator trusts the
    network to it.
    """
    if not is_loopback(host) and not is_trusted:
        raise ConfigurationError(
            f"{name} {host} is not on this machine: ranks exchange activations over gloo, which asks for no credential "
            "and does not encrypt, so whoever reaches this network could read prompts and change answers; use a "
            "network that only these machines share, and set trust_fabric (--trust-fabric)"
        )
