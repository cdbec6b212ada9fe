"""The certificate that clients see, over gRPC (the router) and HTTP (the gateway)."""

import ssl
from dataclasses import dataclass

from mesh.certificates import host_in, read_pem
from mesh.domain.errors import ConfigurationError
from mesh.settings import setting


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
