"""Tenants: on whose behalf a request runs, and what that one may do."""

import re
from dataclasses import dataclass
from enum import IntEnum

from mesh.domain.errors import ConfigurationError, InvalidRequest, PermissionDenied

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Priority(IntEnum):
    """A request's class in the queue; the higher one goes first."""

    BATCH = 1
    STANDARD = 2
    INTERACTIVE = 3

    def share_of(self, places: int) -> int:
        """How many of all places may be taken with one more of this class: batch work leaves a quarter to others."""
        return max(1, places * 3 // 4) if self is Priority.BATCH else places


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller. `max_concurrent_requests` caps the choices it has in service at a time; None: only the router's cap.

    `priority` is what its requests have unless they ask for less; more they get only up to `max_priority`, where there
    is one.
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
        """Goes into all prefix hashes, so that no other tenant's are ever equal to this one's."""
        return f"{model}\n{self.name}" if self.name else model

    def priority_of(self, asked: Priority | None) -> Priority:
        """What a request gets that asks for this. Raises InvalidRequest if it is too much: nobody is demoted unseen."""
        ceiling = self.max_priority or self.priority
        if asked is not None and asked > ceiling:
            raise InvalidRequest(f"priority must be at most {ceiling.name.lower()} for you, got {asked.name.lower()}")
        return asked or self.priority

    def require_operator(self) -> None:
        """Raise PermissionDenied for those who may only generate."""
        if not self.operator:
            raise PermissionDenied("only operators may do this: the API key needs operator = true")


TRIAL = Tenant("tandem-up")
"""`tandem up` itself, for the request it tries a new mesh with."""

ANONYMOUS = Tenant("", operator=True, max_priority=Priority.INTERACTIVE)
"""Everybody, while no API keys are configured."""
