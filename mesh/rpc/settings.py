"""Credential settings of every member of the mesh, router or worker."""

from dataclasses import dataclass

from mesh.certificate_expiry import watch_mesh_certificates
from mesh.certificates import read_validities
from mesh.domain.errors import ConfigurationError
from mesh.process import MetricsSettings
from mesh.rpc.credentials import Credentials, MeshKey, TlsIdentity
from mesh.settings import setting

_TLS_FILES = ("mesh_tls_cert", "mesh_tls_key", "mesh_tls_ca")


@dataclass(frozen=True, kw_only=True)
class MemberSettings(MetricsSettings):
    """The constructor reads the files, so that wrong files are reported before a model is loaded."""

    mesh_key: str = setting("", "secret shared by routers and workers", secret=True)
    mesh_tls_cert: str = setting("", "PEM file: this service's certificate; turns on mutual TLS inside the mesh")
    mesh_tls_key: str = setting("", "PEM file: the certificate's private key")
    mesh_tls_ca: str = setting("", "PEM file: the CA of all certificates of the mesh")
    mesh_tls_name: str = setting(
        "", "name that all certificates of the mesh contain; default: the address of each service"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unset = [name for name in _TLS_FILES if not getattr(self, name)]
        if 0 < len(unset) < len(_TLS_FILES) or (unset and self.mesh_tls_name):
            raise ConfigurationError(f"TLS inside the mesh needs {', '.join(_TLS_FILES)}: {unset[0]} is not set")
        self.load_credentials()

    def load_credentials(self) -> Credentials:
        """Read key and certificates. Raises ConfigurationError."""
        key = MeshKey(self.mesh_key) if self.mesh_key else None
        if not self.mesh_tls_cert:
            return Credentials(key)
        tls = TlsIdentity.load(self.mesh_tls_cert, self.mesh_tls_key, self.mesh_tls_ca, peer_name=self.mesh_tls_name)
        return Credentials(key, tls)

    async def watch_certificates(self) -> None:
        """Report in the log that certificates of the mesh expire, until cancelled."""
        files = (self.mesh_tls_cert, self.mesh_tls_key, self.mesh_tls_ca)
        await watch_mesh_certificates(read_validities(*files) if self.mesh_tls_cert else ())
