"""Certificates for tests, made by the openssl program when they are needed. Nothing of it is ever kept."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.rpc.credentials import TlsIdentity

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_OTHER_KEYS = {"ed25519": ("-newkey", "ed25519", "-nodes")}
LOOPBACK = "IP:127.0.0.1,DNS:localhost"


@dataclass(frozen=True)
class Issued:
    cert: Path
    key: Path
    ca: Path

    @property
    def identity(self) -> TlsIdentity:
        """Unchecked, as a stranger might use it."""
        return TlsIdentity(self.cert.read_bytes(), self.key.read_bytes(), self.ca.read_bytes())

    @property
    def settings(self) -> dict[str, str]:
        """As settings of a member of the mesh."""
        return {"mesh_tls_cert": str(self.cert), "mesh_tls_key": str(self.key), "mesh_tls_ca": str(self.ca)}

    @property
    def flags(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]


class LivePair:
    """Certificate and key of a public port at paths that stay, while what lies there is replaced."""

    def __init__(self, folder: Path, first: Issued) -> None:
        self.cert, self.key = folder / "live.pem", folder / "live.key"
        self.replace(first.cert, first.key)

    @property
    def settings(self) -> dict[str, str]:
        return {"public_tls_cert": str(self.cert), "public_tls_key": str(self.key)}

    def replace(self, cert: Path | None = None, key: Path | None = None) -> None:
        for path, new in ((self.cert, cert), (self.key, key)):
            if new is not None:
                link = path.with_suffix(".new")
                link.symlink_to(new)
                link.replace(path)


class Authority:
    """A CA of its own in `folder`, whose certificates have what Python 3.13 asks for (X509_V_FLAG_X509_STRICT). Skips
    the test where there is no openssl.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        if shutil.which("openssl") is None:
            pytest.skip("needs the openssl program")
        self.folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        self._extensions = folder / "extensions"
        self._extensions.write_text("authorityKeyIdentifier = keyid\n")
        _openssl("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={folder.name}", "-keyout", self._key,
                 "-addext", "keyUsage = critical, keyCertSign", "-out", self.cert)  # fmt: skip

    def issue(self, name: str, *, names: str = LOOPBACK, days: int = 2, usage: str = "", algorithm: str = "") -> Issued:
        """A new certificate for `names`; with 0 `days` one that has expired. `usage` limits what it is for.
        `algorithm` is that of the key, an elliptic curve without one.
        """
        cert, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extensions = {"subjectAltName": names, "extendedKeyUsage": usage}
        extension = [word for kind, value in extensions.items() if value for word in ("-addext", f"{kind}={value}")]
        new_key = _OTHER_KEYS.get(algorithm, _NEW_KEY)
        _openssl("req", *new_key, "-subj", f"/CN={name}", *extension, "-keyout", key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial",
                 "-days", days, "-copy_extensions", "copy", "-extfile", self._extensions, "-out", cert)  # fmt: skip
        return Issued(cert, key, self.cert)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
