"""Tenants: the callers of the public port, with their rights and priorities."""

import re
from dataclasses import dataclass
from enum import IntEnum

from mesh.domain.errors import ConfigurationError, InvalidRequest, PermissionDenied

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Priority(IntEnum):
    """A request's priority in the queue; higher priorities go first."""

    BATCH = 1
    STANDARD = 2
    INTERACTIVE = 3

    def share_of(self, total: int) -> int:
        """Return how many of `total` slots requests of this priority may fill: batch leaves a quarter to others."""
        return max(1, total * 3 // 4) if self is Priority.BATCH else total


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
