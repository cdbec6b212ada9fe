"""Certificate files of TLS servers, checked before anything starts."""

import base64
import binascii
import codecs
import contextlib
import ipaddress
import re
import ssl
from pathlib import Path
from typing import Any

from mesh.certificate_expiry import Validity
from mesh.domain.errors import ConfigurationError

_PRIVATE_KEY = re.compile(rb"-----BEGIN PRIVATE KEY-----(.+?)-----END", re.DOTALL)
_UNUSABLE_KEYS = {b"\x06\x03+ep": "Ed25519", b"\x06\x03+eq": "Ed448", b"\x06\x09*\x86H\x86\xf7\r\x01\x01\n": "RSA-PSS"}
"""Object identifiers of kinds of keys that Python's OpenSSL takes and gRPC's BoringSSL refuses."""
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which `ssl` does not name
_KIND_BYTES = 24  # the identifier is among the first bytes of a key


def read_pem(path: str) -> bytes:
    """Raises ConfigurationError."""
    try:
        return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)  # OpenSSL passes over it, gRPC does not
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def host_in(cert: str, key: str, ca: str = "", expected: str = "") -> str:
    """Return a host name in the certificate. Raises ConfigurationError if readable files have expired, do not belong
    together, cannot be used by gRPC, or name no host, or not the `expected` one.
    """
    _require_usable_key(key)
    try:
        name = _host_of(_shown_certificate(cert, key, ca, expected))
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


def _require_usable_key(key: str) -> None:
    """Raise ConfigurationError for an encrypted key, and for a kind of key that gRPC refuses."""
    pem = read_pem(key)
    if b"ENCRYPTED" in pem:
        raise ConfigurationError(f"{key} is encrypted: write it without a passphrase, openssl pkey -in {key} -out FILE")
    found = _PRIVATE_KEY.search(pem)
    with contextlib.suppress(binascii.Error):
        start = base64.b64decode(found[1])[:_KIND_BYTES] if found else b""
        for identifier, kind in _UNUSABLE_KEYS.items():
            if identifier in start:
                raise ConfigurationError(f"{key} is an {kind} key, which gRPC cannot use: make an RSA or EC key")


def read_validities(cert: str, key: str, ca: str = "") -> list[Validity]:
    """The dates of a service's certificate, expired or not, and of its CA: of several in that file the last to expire.
    Raises ConfigurationError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca:
            context.load_verify_locations(ca)
        own = _validity(cert, _shown_certificate(cert, key, "", "", checks_time=False))
        of_cas = [_validity(ca, each) for each in context.get_ca_certs()]
    except (ssl.SSLError, OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"the dates of {cert} cannot be read: {error}") from error
    return [own, *sorted(of_cas, key=lambda each: each.ends_s)[-1:]]


def _validity(path: str, certificate: dict[str, Any]) -> Validity:
    begins_s, ends_s = (ssl.cert_time_to_seconds(certificate[name]) for name in ("notBefore", "notAfter"))
    return Validity(path, begins_s, ends_s)


def _shown_certificate(cert: str, key: str, ca: str, expected: str, *, checks_time: bool = True) -> dict[str, Any]:
    """Return the contents of the certificate. Raises ssl.SSLError.

    They are read from an in-memory handshake of the certificate with itself, as server and, with a CA, as client. The
    handshake also finds every error that real handshakes would fail with.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = bool(expected)
    server.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask at a terminal
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if not checks_time:
            context.verify_flags |= _NO_CHECK_TIME
        context.load_verify_locations(ca or cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    peers = (client.wrap_bio(down, up, server_hostname=expected or None), server.wrap_bio(up, down, server_side=True))
    for peer in (*peers, *peers):
        with contextlib.suppress(ssl.SSLWantReadError):
            peer.do_handshake()
    return peers[0].getpeercert() or {}


def _host_of(certificate: dict[str, Any]) -> str:
    names = certificate.get("subjectAltName", ())
    hosts = [value.replace("*", "any") for kind, value in names if kind == "DNS"]
    addresses = [str(ipaddress.ip_address(value)) for kind, value in names if kind == "IP Address"]
    return next(iter([*hosts, *addresses]), "")
