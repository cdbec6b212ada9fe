"""API keys of the public port. Only their SHA-256 digests are kept; a file has one line for each:

    <64 hex digits> = { tenant = "alice" }
    <64 hex digits> = { tenant = "ops", operator = true, max_concurrent_requests = 8 }

A plain `<64 hex digits> = "alice"` will do too. A tenant may have several keys, all with the same rights. Keys are 256
random bits (`tandem keys new`), so a fast hash is enough: there is nothing to guess.
"""

import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError, Unauthenticated
from mesh.rpc.credentials import Metadata
from router.tenants import ANONYMOUS, Tenant

_PREFIX = "tandem-"
_BEARER = "bearer "
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPES = {"tenant": str, "operator": bool, "max_concurrent_requests": int}


def new_key() -> str:
    """A fresh key."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


class ApiKeys:
    """Who a key belongs to. Guards every method of the public port, health excepted."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        """`tenants` by the hex digest of a key. Raises ConfigurationError if a tenant has two sets of rights."""
        by_name: dict[str, Tenant] = {}
        for digest, tenant in tenants.items():
            if not _DIGEST.fullmatch(digest):
                raise ConfigurationError(f"not the SHA-256 of a key, in 64 lower-case hex digits: {digest[:8]}...")
            if by_name.setdefault(tenant.name, tenant) != tenant:
                raise ConfigurationError(f"the keys of tenant {tenant.name} differ in their rights or limits")
        self._entries = [(digest.encode(), tenant) for digest, tenant in tenants.items()]

    @classmethod
    def load(cls, path: Path) -> "ApiKeys":
        """Raises ConfigurationError that says what is wrong with the file."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read the API keys file {path}: {error}") from error
        if not content:
            raise ConfigurationError(f"the API keys file {path} has no keys; make one with: tandem keys new TENANT")
        return cls({digest: _tenant(digest, entry) for digest, entry in content.items()})

    def with_key(self, digest: str, tenant: Tenant) -> "ApiKeys":
        """The same and one more."""
        return ApiKeys({entry.decode(): owner for entry, owner in self._entries} | {digest: tenant})

    def check(self, metadata: Metadata | None) -> None:
        """Raise Unauthenticated unless the call carries a known key."""
        self.tenant_of(metadata)

    def tenant_of(self, metadata: Metadata | None) -> Tenant:
        """Whose call it is. Raises Unauthenticated. Takes equally long for every key, known or not."""
        digest = digest_of(_key_in(metadata)).encode()
        found: Tenant | None = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is missing or wrong: send it as authorization: Bearer KEY")
        return found


class NoKeys:
    """Stands in while no keys are configured: every caller is the anonymous tenant."""

    def tenant_of(self, metadata: Metadata | None) -> Tenant:
        """Whose call it is."""
        return ANONYMOUS


def _key_in(metadata: Metadata | None) -> str:
    """The key of `authorization: Bearer KEY`, else of `x-api-key`; "" if there is none."""
    given = {name: value for name, value in metadata or () if isinstance(value, str)}
    authorization = given.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return given.get("x-api-key", "")


def _tenant(digest: str, entry: Any) -> Tenant:
    """One entry of the file. Messages show the digest's beginning only."""
    if isinstance(entry, str):
        entry = {"tenant": entry}
    if not isinstance(entry, dict) or not entry.get("tenant") or entry.keys() - _TYPES.keys():
        raise ConfigurationError(
            f'API key {digest[:8]}...: want {{ tenant = "NAME" }}, and optionally operator, max_concurrent_requests'
        )
    for name, value in entry.items():
        if type(value) is not _TYPES[name]:
            raise ConfigurationError(f"API key {digest[:8]}...: {name} must be {_TYPES[name].__name__}, got {value!r}")
    fields = dict(entry)
    return Tenant(fields.pop("tenant"), **fields)
