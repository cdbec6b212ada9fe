"""Tenants, the callers of the public port: their rights and priorities, and the API keys that identify them.

Only the SHA-256 digests of keys are kept; a file has one line for each:

    <64 hex digits> = { tenant = "alice" }
    <64 hex digits> = { tenant = "ops", operator = true, max_concurrent_requests = 8, priority = "batch" }

`<64 hex digits> = "alice"` is a short form. A tenant may have several keys, all with the same rights. Keys are 256
random bits (`tandem keys new`), which nobody can guess, so a fast hash is enough.

The file is read again when it has changed. A removed key is refused from then on; its running streams continue. While
the file is broken or missing, the keys read last stay valid; one that cannot be read is tried again every second.
"""

import hmac
import math
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

import structlog

from mesh.domain.errors import ConfigurationError, InvalidRequest, PermissionDenied, Unauthenticated
from mesh.rpc.credentials import Metadata

log = structlog.get_logger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_PREFIX = "tandem-"
_BEARER = "bearer "
# gRPC takes about 8 KiB of metadata in a call.
MAX_KEY_CHARS = 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPES = {"tenant": str, "operator": bool, "max_concurrent_requests": int, "priority": str}
# Minimum time between two checks of the file.
_CHECK_INTERVAL_S = 1.0
_COMPLAINT_INTERVAL_S = 60.0


class Priority(IntEnum):
    """A request's priority in the queue; higher priorities go first."""

    BATCH = 1
    STANDARD = 2
    INTERACTIVE = 3

    def share_of(self, total: int) -> int:
        """Return how many of `total` slots requests of this priority may fill: batch leaves a quarter to others."""
        return max(1, total * 3 // 4) if self is Priority.BATCH else total


_PRIORITIES = {priority.name.lower(): priority for priority in Priority}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller. `max_concurrent_requests` caps its choices in service; None means only the router's cap.

    `priority` is the default of its requests. A request may choose any priority up to `max_priority`, by default
    `priority`.
    """

    name: str
    operator: bool = False
    max_concurrent_requests: int | None = None
    priority: Priority = Priority.STANDARD
    max_priority: Priority | None = None

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"a tenant's name has 1 to 64 letters, digits, '.', '_' or '-', and begins with a letter or digit; "
                f"got {self.name[:80]!r}"
            )
        if self.max_concurrent_requests is not None and self.max_concurrent_requests < 1:
            raise ConfigurationError(
                f"max_concurrent_requests of tenant {self.name} must be >= 1, got {self.max_concurrent_requests}"
            )

    def cache_namespace(self, model: str) -> str:
        """Return the namespace of all prefix hashes, which keeps tenants from sharing cached prefixes."""
        return f"{model}\n{self.name}" if self.name else model

    def priority_of(self, requested: Priority | None) -> Priority:
        """Return the priority of a request. Raises InvalidRequest above the maximum rather than lower it silently."""
        ceiling = self.max_priority or self.priority
        if requested is not None and requested > ceiling:
            raise InvalidRequest(
                f"priority must be at most {ceiling.name.lower()} for you, got {requested.name.lower()}"
            )
        return requested or self.priority

    def require_operator(self) -> None:
        """Raise PermissionDenied unless the tenant is an operator."""
        if not self.operator:
            raise PermissionDenied("only operators may do this: the API key needs operator = true")


TRIAL = Tenant("tandem-up")
"""The tenant of `tandem up`, for the request that tests a new mesh."""

ANONYMOUS = Tenant("", operator=True, max_priority=Priority.INTERACTIVE)
"""The tenant of every caller while no API keys are configured."""


def new_key() -> str:
    """Return a new random key."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key, in hex digits: the form in which keys are stored."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


class ApiKeys:
    """A fixed set of keys, each with its tenant."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        """`tenants` by the hex digest of a key. Raises ConfigurationError if a tenant has two sets of rights."""
        by_name: dict[str, Tenant] = {}
        for digest, tenant in tenants.items():
            if not _DIGEST.fullmatch(digest):
                raise ConfigurationError(f"not the SHA-256 of a key in 64 lower-case hex digits: {digest[:8]}...")
            if by_name.setdefault(tenant.name, tenant) != tenant:
                raise ConfigurationError(f"the keys of tenant {tenant.name} differ in their rights or limits")
        self._entries = [(digest.encode(), tenant) for digest, tenant in tenants.items()]

    @classmethod
    def load(cls, path: Path) -> "ApiKeys":
        """Raises ConfigurationError with the reason and the path of the file."""
        try:
            return cls.parse(path.read_bytes(), path)
        except OSError as error:
            raise ConfigurationError(f"cannot read the API keys file {path}: {error}") from error

    @classmethod
    def parse(cls, text: bytes, path: Path) -> "ApiKeys":
        """Raises ConfigurationError with the reason and the path of the file."""
        try:
            content = tomllib.loads(text.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"cannot read the API keys file {path}: {error}") from error
        if not content:
            raise ConfigurationError(f"the API keys file {path} has no keys; make one with: tandem keys new TENANT")
        return cls({digest: _tenant(digest, entry) for digest, entry in content.items()})

    def with_keys(self, tenants: Mapping[str, Tenant]) -> "ApiKeys":
        """Return a copy with more keys."""
        return ApiKeys({entry.decode(): owner for entry, owner in self._entries} | dict(tenants))

    def tenant_of(self, metadata: Metadata | None) -> Tenant:
        """Return the caller's tenant. Raises Unauthenticated. Takes constant time, for known and unknown keys alike."""
        key = _key_in(metadata)
        digest = digest_of(key).encode()
        match: Tenant | None = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                match = tenant
        if match is None or len(key) > MAX_KEY_CHARS:
            raise Unauthenticated("the API key is missing or wrong: send it as authorization: Bearer KEY")
        return match


class KeysFile:
    """The keys of a file in its current version. Guards every method of the public port except health.

    Calls check the file for changes, once a second at most; no background task runs. `more` are keys that are valid in
    addition to the file's. The constructor raises ConfigurationError if the file is broken.
    """

    def __init__(
        self, path: Path, more: Mapping[str, Tenant] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._more = more or {}
        self._clock = clock
        self._version = self._file_version()
        self._keys = ApiKeys.load(path).with_keys(self._more)
        self._checked_at_s = clock()
        self._complained_at_s = -math.inf

    def check(self, metadata: Metadata | None) -> None:
        """Raise Unauthenticated unless the call carries a known key."""
        self.tenant_of(metadata)

    def tenant_of(self, metadata: Metadata | None) -> Tenant:
        """Return the caller's tenant. Raises Unauthenticated."""
        self._refresh()
        return self._keys.tenant_of(metadata)

    def _refresh(self) -> None:
        if self._clock() - self._checked_at_s < _CHECK_INTERVAL_S:
            return
        self._checked_at_s = self._clock()
        version = self._file_version()
        if version == self._version:
            return
        try:
            text = self._path.read_bytes()
        except OSError as error:
            self._complain(error)  # and try again in a second: a key may have been taken back
            return
        self._version = version
        try:
            self._keys = ApiKeys.parse(text, self._path).with_keys(self._more)
        except ConfigurationError as error:
            log.error("the API keys file is broken, the keys read before stay valid", error=str(error))
        else:
            log.info("API keys read again", path=str(self._path))

    def _file_version(self) -> tuple[int, int, int] | None:
        """Return a value that changes with the content; None if the file is missing."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _complain(self, error: OSError) -> None:
        if self._clock() - self._complained_at_s >= _COMPLAINT_INTERVAL_S:
            self._complained_at_s = self._clock()
            log.error("cannot read the API keys file, the keys read before stay valid", error=str(error))


class NoKeys:
    """Used while no keys are configured: every caller is the anonymous tenant."""

    def tenant_of(self, metadata: Metadata | None) -> Tenant:
        return ANONYMOUS


CallerDirectory = KeysFile | NoKeys
"""Identifies callers by their credentials."""


def _key_in(metadata: Metadata | None) -> str:
    """Return the key of `authorization: Bearer KEY`, else of `x-api-key`; "" without one."""
    headers = {name: value for name, value in metadata or () if isinstance(value, str)}
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key", "")


def _tenant(digest: str, entry: object) -> Tenant:
    """Parse one entry of the file. Errors show only the beginning of the digest."""
    if isinstance(entry, str):
        entry = {"tenant": entry}
    if not isinstance(entry, dict) or not entry.get("tenant") or entry.keys() - _TYPES.keys():
        raise ConfigurationError(
            f'API key {digest[:8]}...: want {{ tenant = "NAME" }}, and optionally {", ".join(list(_TYPES)[1:])}'
        )
    for name, value in entry.items():
        if type(value) is not _TYPES[name]:
            raise ConfigurationError(f"API key {digest[:8]}...: {name} must be {_TYPES[name].__name__}, got {value!r}")
    fields = dict(entry)
    if "priority" in fields:
        fields["priority"] = _priority(digest, fields["priority"])
    return Tenant(fields.pop("tenant"), **fields)


def _priority(digest: str, name: str) -> Priority:
    if name not in _PRIORITIES:
        raise ConfigurationError(
            f"API key {digest[:8]}...: priority must be one of {', '.join(_PRIORITIES)}, got {name[:80]!r}"
        )
    return _PRIORITIES[name]
