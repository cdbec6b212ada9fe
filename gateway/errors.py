"""Errors and the responses to them: one table from error class to the status and body of each dialect.

The message of an error that the client can fix is shown unchanged. Other messages could name addresses inside the mesh:
the client gets a fixed text, and the log has the message.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from starlette.responses import JSONResponse, Response

import tandem
from tandem import TandemError

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_UNREACHABLE = "the model cannot be reached now; try again later"
# Anthropic's own API answers 529 when it is overloaded; 429 is for the limits of one customer.
_ANTHROPIC_STATUS = {429: 529}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "overloaded_error",
    504: "timeout_error",
}
_TGI_PREFIXES = {"validation": "Input validation error: ", "generation": "Request failed during generation: "}


class BodyTooLarge(Exception):
    """The request's body is longer than `max_body_bytes`."""


class BodyTooSlow(Exception):
    """The request's body did not arrive within `body_timeout_s`."""


class UnsupportedMediaType(Exception):
    """The route does not read the request's content type."""


class NotStored(Exception):
    """The caller has no file or batch of this id."""


class InvalidField(tandem.InvalidRequest):
    """A member of the body is invalid. `field` is its path in the body, `code` OpenAI's name for the violated rule."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


@dataclass(frozen=True, slots=True)
class OpenAIRow:
    """HTTP status, and `type` and `code` of the body."""

    status: int
    type: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class LmiRow:
    """HTTP status, and the body's form: {code, type, message} with a `type`, {code, error} without."""

    status: int
    type: str = ""


@dataclass(frozen=True, slots=True)
class TgiRow:
    """HTTP status, and `error_type` of the body."""

    status: int
    error_type: str


@dataclass(frozen=True, slots=True)
class Row:
    """The response to one error class in each dialect. `shown`, if set, replaces the error's message."""

    openai: OpenAIRow
    lmi: LmiRow
    tgi: TgiRow
    shown: str = ""


_BAD_REQUEST = Row(OpenAIRow(400, _INVALID), LmiRow(424), TgiRow(422, "validation"))

TABLE: Mapping[type[Exception], Row] = MappingProxyType(
    {
        tandem.InvalidRequest: _BAD_REQUEST,
        InvalidField: _BAD_REQUEST,
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
        tandem.SlowReader: Row(
            OpenAIRow(408, _INVALID, "slow_reader"), LmiRow(408, "TimeoutException"), TgiRow(408, "generation")
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
        tandem.ModelFailed: Row(
            OpenAIRow(500, _SERVER, "model_failed"), LmiRow(424, "ModelException"), TgiRow(424, "generation")
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
        NotStored: Row(
            OpenAIRow(404, _INVALID, "not_found"), LmiRow(404, "ResourceNotFoundException"), TgiRow(404, "not_found")
        ),
        UnsupportedMediaType: Row(
            OpenAIRow(415, _INVALID), LmiRow(415, "UnsupportedMediaTypeException"), TgiRow(415, "validation")
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in the form that all dialects render. `field` and `code` are those of InvalidField."""

    row: Row
    message: str
    retry_after_s: float | None = None
    field: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: Exception) -> "Problem":
        """Look the error up in the table. Classes that are not there count as InternalError."""
        row = TABLE.get(type(error)) or TABLE[tandem.InternalError]
        retry_after_s = error.retry_after_s if isinstance(error, tandem.Overloaded) else None
        field, code = (error.field, error.code) if isinstance(error, InvalidField) else (None, None)
        return cls(row, row.shown or str(error), retry_after_s, field, code)

    @property
    def retry_after_ms(self) -> int:
        """Milliseconds after which to retry; 0 if retrying does not help."""
        return math.ceil((self.retry_after_s or 0.0) * 1000)

    @property
    def headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds, as in HTTP, and `retry-after-ms` for clients that know it."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(math.ceil(self.retry_after_s)), "retry-after-ms": str(self.retry_after_ms)}


def is_ours(error: Exception) -> bool:
    """True for bugs of the gateway itself, whose traceback belongs in the log."""
    return not isinstance(error, TandemError) and type(error) not in TABLE


class Dialect(Protocol):
    """Error responses for one family of clients. `name` labels logs and metrics."""

    @property
    def name(self) -> str: ...

    def error_response(self, problem: Problem) -> Response:
        """Return the response that replaces the answer."""
        ...


class OpenAIDialect:
    """Errors as openai-python reads them."""

    name = "openai"

    def error_response(self, problem: Problem) -> Response:
        return JSONResponse(openai_error_body(problem), problem.row.openai.status, problem.headers)


def openai_error_body(problem: Problem) -> dict[str, dict[str, object]]:
    """The body of an error response, and the last event of a stream that fails."""
    row = problem.row.openai
    code = problem.code or row.code
    return {"error": {"message": problem.message, "type": row.type, "param": problem.field, "code": code}}


class AnthropicDialect:
    """Errors as anthropic's clients read them."""

    name = "anthropic"

    def error_response(self, problem: Problem) -> Response:
        status = problem.row.openai.status
        return JSONResponse(anthropic_error_body(problem), _ANTHROPIC_STATUS.get(status, status), problem.headers)


def anthropic_error_body(problem: Problem) -> dict[str, object]:
    """The body of an error response, and the last event of a stream that fails."""
    kind = _ANTHROPIC_TYPES.get(problem.row.openai.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


class LmiDialect:
    """Errors as clients of DJLServing read them."""

    name = "lmi"

    def error_response(self, problem: Problem) -> Response:
        return JSONResponse(lmi_error_body(problem), problem.row.lmi.status, problem.headers)


def lmi_error_body(problem: Problem) -> dict[str, object]:
    """{"code", "type", "message"} if the table has a type, {"code", "error"} otherwise."""
    row = problem.row.lmi
    if row.type:
        return {"code": row.status, "type": row.type, "message": problem.message}
    prefix = "Input Parsing failed. " if problem.row.tgi.error_type == "validation" else ""
    return {"code": row.status, "error": prefix + problem.message}


class TgiDialect:
    """Errors as text-generation and huggingface_hub read them: both look at `error_type`."""

    name = "tgi"

    def error_response(self, problem: Problem) -> Response:
        return JSONResponse(tgi_error_body(problem), problem.row.tgi.status, problem.headers)


def tgi_error_body(problem: Problem) -> dict[str, object]:
    """The body of an error response, and the last event of a stream that fails."""
    error_type = problem.row.tgi.error_type
    message = "Model is overloaded" if error_type == "overloaded" else problem.message
    return {"error": _TGI_PREFIXES.get(error_type, "") + message, "error_type": error_type}
