"""What can go wrong, and what each dialect says to it: one table.

Messages of errors that are the client's to mend are shown as they are. Those of others could name addresses of the
mesh, so the client gets a fixed text, and the log the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import tandem
from tandem import TandemError


class BodyTooLarge(Exception):
    """The request's body is over the cap."""


class BodyTooSlow(Exception):
    """The request's body did not come in time."""


class UnsupportedMediaType(Exception):
    """The request's content type is none the route reads."""


@dataclass(frozen=True, slots=True)
class OpenAIRow:
    """Status, and `type` and `code` of the body."""

    status: int
    type: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class LmiRow:
    """Status; with a `type` the body is {code, type, message}, else {code, error}."""

    status: int
    type: str = ""


@dataclass(frozen=True, slots=True)
class TgiRow:
    """Status and `error_type`."""

    status: int
    error_type: str


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of error looks in each dialect. `shown` replaces its message."""

    openai: OpenAIRow
    lmi: LmiRow
    tgi: TgiRow
    shown: str = ""


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_UNREACHABLE = "the model cannot be reached now; try again later"

TABLE: Mapping[type[Exception], Row] = MappingProxyType(
    {
        tandem.InvalidRequest: Row(OpenAIRow(400, _INVALID), LmiRow(424), TgiRow(422, "validation")),
        tandem.ModelNotFound: Row(
            OpenAIRow(404, _INVALID, "model_not_found"), LmiRow(404, "ModelNotFoundException"), TgiRow(404, "not_found")
        ),
        tandem.Unauthenticated: Row(
            OpenAIRow(401, _INVALID, "invalid_api_key"),
            LmiRow(401, "UnauthorizedException"),
            TgiRow(401, "unauthorized"),
        ),
        tandem.PermissionDenied: Row(
            OpenAIRow(403, "permission_error"), LmiRow(403, "ForbiddenException"), TgiRow(403, "forbidden")
        ),
        tandem.Overloaded: Row(
            OpenAIRow(429, "rate_limit_error", "rate_limit_exceeded"),
            LmiRow(503, "WlmCapacityException"),
            TgiRow(429, "overloaded"),
        ),
        tandem.NoWorkers: Row(
            OpenAIRow(503, _SERVER, "unavailable"), LmiRow(503, "WlmException"), TgiRow(503, "unhealthy")
        ),
        tandem.DeadlineExceeded: Row(
            OpenAIRow(504, _SERVER, "timeout"),
            LmiRow(504, "TimeoutException"),
            TgiRow(504, "generation"),
            shown="no complete answer within the time allowed",
        ),
        tandem.Cancelled: Row(
            OpenAIRow(503, _SERVER, "unavailable"),
            LmiRow(503, "WlmException"),
            TgiRow(503, "unhealthy"),
            shown="the service is stopping; try again",
        ),
        tandem.ConnectionFailed: Row(
            OpenAIRow(503, _SERVER, "unavailable"),
            LmiRow(503, "WlmException"),
            TgiRow(503, "unhealthy"),
            shown=_UNREACHABLE,
        ),
        tandem.ServerMisconfigured: Row(
            OpenAIRow(503, _SERVER, "unavailable"),
            LmiRow(503, "WlmException"),
            TgiRow(503, "unhealthy"),
            shown=_UNREACHABLE,
        ),
        tandem.InternalError: Row(
            OpenAIRow(500, _SERVER),
            LmiRow(424),
            TgiRow(424, "generation"),
            shown="something went wrong while generating; the service's log has the details",
        ),
        BodyTooLarge: Row(
            OpenAIRow(413, _INVALID), LmiRow(413, "RequestEntityTooLargeException"), TgiRow(413, "validation")
        ),
        BodyTooSlow: Row(OpenAIRow(408, _INVALID), LmiRow(408, "TimeoutException"), TgiRow(408, "validation")),
        UnsupportedMediaType: Row(
            OpenAIRow(415, _INVALID), LmiRow(415, "UnsupportedMediaTypeException"), TgiRow(415, "validation")
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error, ready to be told to a client."""

    row: Row
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: Exception) -> "Problem":
        """Unknown kinds are internal errors."""
        row = TABLE.get(type(error)) or TABLE[tandem.InternalError]
        retry_after_s = error.retry_after_s if isinstance(error, tandem.Overloaded) else None
        return cls(row, row.shown or str(error), retry_after_s)

    @property
    def retry_after_ms(self) -> int:
        """When to come back; 0 if there is nothing to wait for."""
        return math.ceil((self.retry_after_s or 0.0) * 1000)

    @property
    def headers(self) -> dict[str, str]:
        """`retry-after`, in whole seconds as HTTP has it, and in milliseconds for clients that know it."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(math.ceil(self.retry_after_s)), "retry-after-ms": str(self.retry_after_ms)}


def is_ours(error: Exception) -> bool:
    """True for mistakes of the gateway itself, whose traceback belongs into the log."""
    return not isinstance(error, TandemError) and type(error) not in TABLE
