"""Errors and the responses to them: one table from error class to the status and body of each dialect.

The message of an error that the client can fix is shown unchanged. Other messages could name addresses inside the mesh:
the client gets a fixed text, and the log has the message.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

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
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "overloaded_error",
    504: "timeout_error",
}
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code of requests that are longer than the model's context."""
# The router's sentences about such requests, in the names of the client's members.
_LONG_PROMPT = re.compile(r"the prompt has (?:(\d+) tokens, at most (\d+) )?")
_LONG_ANSWER = re.compile(r"prompt tokens \((\d+)\) \+ \w+ \((\d+)\) must be <= \D*\((\d+)\)")
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
class Reply:
    """The answer to an error in one dialect: the HTTP status, and `type` and `code` of the body."""

    status: int
    type: str = ""
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The answer to one error class in each dialect; Anthropic's follows from OpenAI's. `shown`, if set, replaces the
    error's message.
    """

    openai: Reply
    lmi: Reply
    tgi: Reply
    shown: str = ""


_BAD_REQUEST = Row(Reply(400, _INVALID), Reply(424), Reply(422, "validation"))
_UNAVAILABLE = Row(Reply(503, _SERVER, "unavailable"), Reply(503, "WlmException"), Reply(503, "unhealthy"))

TABLE: Mapping[type[Exception], Row] = MappingProxyType(
    {
        tandem.InvalidRequest: _BAD_REQUEST,
        InvalidField: _BAD_REQUEST,
        tandem.ModelNotFound: Row(
            Reply(404, _INVALID, "model_not_found"), Reply(404, "ModelNotFoundException"), Reply(404, "not_found")
        ),
        tandem.Unauthenticated: Row(
            Reply(401, _INVALID, "invalid_api_key"), Reply(401, "UnauthorizedException"), Reply(401, "unauthorized")
        ),
        tandem.PermissionDenied: Row(
            Reply(403, "permission_error"), Reply(403, "ForbiddenException"), Reply(403, "forbidden")
        ),
        tandem.Overloaded: Row(
            Reply(429, "rate_limit_error", "rate_limit_exceeded"),
            Reply(503, "WlmCapacityException"),
            Reply(429, "overloaded"),
        ),
        tandem.NoWorkers: _UNAVAILABLE,
        tandem.DeadlineExceeded: Row(
            Reply(504, _SERVER, "timeout"),
            Reply(504, "TimeoutException"),
            Reply(504, "generation"),
            shown="no complete answer within the time allowed",
        ),
        tandem.SlowReader: Row(
            Reply(408, _INVALID, "slow_reader"), Reply(408, "TimeoutException"), Reply(408, "generation")
        ),
        tandem.Cancelled: replace(_UNAVAILABLE, shown="the service is stopping; try again"),
        tandem.ConnectionFailed: replace(_UNAVAILABLE, shown=_UNREACHABLE),
        tandem.ModelFailed: Row(
            Reply(500, _SERVER, "model_failed"), Reply(424, "ModelException"), Reply(424, "generation")
        ),
        tandem.ServerMisconfigured: replace(_UNAVAILABLE, shown=_UNREACHABLE),
        tandem.InternalError: Row(
            Reply(500, _SERVER),
            Reply(424),
            Reply(424, "generation"),
            shown="something went wrong while generating; the service's log has the details",
        ),
        BodyTooLarge: Row(Reply(413, _INVALID), Reply(413, "RequestEntityTooLargeException"), Reply(413, "validation")),
        BodyTooSlow: Row(Reply(408, _INVALID), Reply(408, "TimeoutException"), Reply(408, "validation")),
        NotStored: Row(
            Reply(404, _INVALID, "not_found"), Reply(404, "ResourceNotFoundException"), Reply(404, "not_found")
        ),
        UnsupportedMediaType: Row(
            Reply(415, _INVALID), Reply(415, "UnsupportedMediaTypeException"), Reply(415, "validation")
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


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family of clients. `name` labels logs and metrics, `error_response` makes the response to an error, and
    `id_header` is the header in which the clients look for the request's id, beside x-request-id.
    """

    name: str
    error_response: Callable[[Problem], Response]
    id_header: str = "x-request-id"


# Each `..._error_body` is the body of an error response, and the last event of a stream that fails.


def openai_error_body(problem: Problem) -> dict[str, dict[str, object]]:
    row = problem.row.openai
    code = problem.code or row.code
    message = problem.message
    if code == CONTEXT_LENGTH_EXCEEDED and (_LONG_PROMPT.match(message) or _LONG_ANSWER.match(message)):
        message = f"This model's maximum context length is exceeded: {message}"  # litellm and others look for the words
    return {"error": {"message": message, "type": row.type, "param": problem.field, "code": code}}


def anthropic_error_body(problem: Problem) -> dict[str, object]:
    kind = _ANTHROPIC_TYPES.get(problem.row.openai.status, "api_error")
    message = _in_anthropics_words(problem.message) if problem.code == CONTEXT_LENGTH_EXCEEDED else problem.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def _in_anthropics_words(message: str) -> str:
    """The message about a request that is too long. Anthropic has no code for it, so agents read the sentence to know
    that they have to shorten a conversation, or to ask for fewer tokens.
    """
    if found := _LONG_ANSWER.match(message):
        sizes = "{} + {} > {}".format(*found.groups())
        advice = "decrease input length or `max_tokens` and try again"
        return f"input length and `max_tokens` exceed context limit: {sizes}, {advice}"
    if found := _LONG_PROMPT.match(message):
        has_tokens = found[1] is not None
        return "prompt is too long: " + (f"{found[1]} tokens > {found[2]} maximum" if has_tokens else message)
    return message


def lmi_error_body(problem: Problem) -> dict[str, object]:
    """{"code", "type", "message"} if the table has a type, {"code", "error"} otherwise."""
    row = problem.row.lmi
    if row.type:
        return {"code": row.status, "type": row.type, "message": problem.message}
    prefix = "Input Parsing failed. " if problem.row.tgi.type == "validation" else ""
    return {"code": row.status, "error": prefix + problem.message}


def tgi_error_body(problem: Problem) -> dict[str, object]:
    """The type is TGI's `error_type`, which text-generation and huggingface_hub look at."""
    error_type = problem.row.tgi.type
    message = "Model is overloaded" if error_type == "overloaded" else problem.message
    return {"error": _TGI_PREFIXES.get(error_type, "") + message, "error_type": error_type}


def _openai_error(problem: Problem) -> Response:
    return JSONResponse(openai_error_body(problem), problem.row.openai.status, problem.headers)


def _anthropic_error(problem: Problem) -> Response:
    status = problem.row.openai.status
    return JSONResponse(anthropic_error_body(problem), _ANTHROPIC_STATUS.get(status, status), problem.headers)


def _lmi_error(problem: Problem) -> Response:
    return JSONResponse(lmi_error_body(problem), problem.row.lmi.status, problem.headers)


def _tgi_error(problem: Problem) -> Response:
    return JSONResponse(tgi_error_body(problem), problem.row.tgi.status, problem.headers)


OPENAI = Dialect("openai", _openai_error)
ANTHROPIC = Dialect("anthropic", _anthropic_error, id_header="request-id")
LMI = Dialect("lmi", _lmi_error)
TGI = Dialect("tgi", _tgi_error)
