"""When a call of a router is retried: gRPC's errors as errors of this package, deadlines, backoff. The retries
themselves are in _connection.py.

Only calls that have delivered nothing are retried. If a router cannot be reached, is stopping or has no workers, the
client tries the next router at once. It does not do so for an overloaded router: routers of one mesh share a limit, so
the next router would refuse as well, and all refused clients would arrive there together. The client waits for as long
as the router asks, and then tries again.
"""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc

from tandem import exceptions
from tandem._fields import wrong_value
from tandem.exceptions import ConnectionFailed, InvalidRequest, NoWorkers, Overloaded, TandemError

ERROR_KEY = "tandem-error"
RETRY_AFTER_KEY = "retry-after-ms"
_STOPPING = "RouterStopping"
_NO_CONNECTION = "failed to connect"
# Messages of gRPC for a connection that was established and lost. Proxies have other messages. A server that stops says
# "Cancelling all calls" in its last GOAWAY.
_BROKEN_SIGNS = (
    *("Socket closed", "Connection reset", "Broken pipe", "Connection timed out", "keepalive", "GOAWAY"),
    "Cancelling all calls",
)
# Messages for a stream that something between router and client has reset, often with a misleading status code. A
# router itself says how a call ends.
_RESET_SIGNS = ("RST_STREAM", "Stream removed")
_TLS_SIGNS = ("Socket closed", "Tls handshake failed", "Hostname Verification")
_REASONS = {
    "address lookup failed": "its host name is not known",
    "Failed parsing HTTP/2": "what listens there does not speak gRPC (is it the port for HTTP?)",
    "Connection refused": "nothing listens there",
    "unreachable": "there is no route to it",
    "No route to host": "there is no route to it",
    "imed out": "it does not answer",
    "Handshake read failed": "it ended the connection before TLS was agreed",
}
"""What gRPC's messages about a connection that was not made mean, by a part of the message."""

ERROR_BY_NAME: Mapping[str, type[TandemError]] = MappingProxyType(
    {
        "InvalidRequest": exceptions.InvalidRequest,
        "TooLarge": exceptions.InvalidRequest,
        "ModelNotFound": exceptions.ModelNotFound,
        "Unauthenticated": exceptions.Unauthenticated,
        "PermissionDenied": exceptions.PermissionDenied,
        "Overloaded": exceptions.Overloaded,
        "NoWorkers": exceptions.NoWorkers,
        _STOPPING: exceptions.ConnectionFailed,
        "AttemptsFailed": exceptions.InternalError,
        "ModelFailed": exceptions.ModelFailed,
        "DeadlineExceeded": exceptions.DeadlineExceeded,
        "SlowReader": exceptions.SlowReader,
        "LayoutMismatch": exceptions.ServerMisconfigured,
        "ConfigurationError": exceptions.ServerMisconfigured,
    }
)

# For servers and proxies that send only a status code. Other codes become InternalError.
ERROR_BY_CODE: Mapping[grpc.StatusCode, type[TandemError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: exceptions.InvalidRequest,
        grpc.StatusCode.OUT_OF_RANGE: exceptions.InvalidRequest,
        grpc.StatusCode.NOT_FOUND: exceptions.ModelNotFound,
        grpc.StatusCode.UNAUTHENTICATED: exceptions.Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: exceptions.PermissionDenied,
        grpc.StatusCode.RESOURCE_EXHAUSTED: exceptions.Overloaded,
        grpc.StatusCode.UNAVAILABLE: exceptions.ConnectionFailed,
        grpc.StatusCode.CANCELLED: exceptions.ConnectionFailed,  # the server stops
        grpc.StatusCode.DEADLINE_EXCEEDED: exceptions.DeadlineExceeded,
        grpc.StatusCode.FAILED_PRECONDITION: exceptions.ServerMisconfigured,
    }
)

# gRPC treats longer timeouts, and infinity, as expired.
_LONGEST_S = 1e9

_MAX_DOUBLINGS = 30  # of a backoff, far beyond `max_backoff_s`; many more would overflow a float

ELSEWHERE = (ConnectionFailed, NoWorkers)
"""Errors that may not occur at another router."""

RETRYABLE = (*ELSEWHERE, Overloaded)


def error_from_rpc(rpc_error: grpc.aio.AioRpcError, address: str) -> TandemError:
    """Convert the error of a call to `address`."""
    trailing = {str(key): str(value) for key, value in rpc_error.trailing_metadata() or ()}
    details = rpc_error.details() or rpc_error.code().name
    cls = ERROR_BY_NAME.get(trailing.get(ERROR_KEY, "")) or ERROR_BY_CODE.get(rpc_error.code())
    was_reset = ERROR_KEY not in trailing and any(sign in details for sign in _RESET_SIGNS)
    if was_reset and cls is not exceptions.DeadlineExceeded:
        return ConnectionFailed(f"the stream to {address} was reset: {details}", broke=True)
    if cls is Overloaded:
        # gRPC reports what is above its size limits with the same code, for which a retry does not help.
        if ERROR_KEY not in trailing and "larger than max" in details:
            return InvalidRequest(f"the message is too large: {details}")
        if ERROR_KEY not in trailing and "metadata size exceeds" in details:
            return exceptions.InternalError(f"the headers between {address} and this client are too large: {details}")
        return Overloaded(details, retry_after_s=_retry_after_s(trailing))
    if cls is ConnectionFailed and (ERROR_KEY in trailing or rpc_error.code() is grpc.StatusCode.CANCELLED):
        stopped = trailing.get(ERROR_KEY) == _STOPPING
        return ConnectionFailed(f"{address} ended the call: {details}", broke=True, stopped=stopped)
    if cls is ConnectionFailed:
        broke = not details.startswith(_NO_CONNECTION) and any(sign in details for sign in _BROKEN_SIGNS)
        if broke:
            return ConnectionFailed(f"the connection to {address} broke: {details}", broke=True)
        return ConnectionFailed(f"cannot reach {address}: {_reason(details)}")
    if cls is exceptions.DeadlineExceeded and ERROR_KEY not in trailing:
        return exceptions.DeadlineExceeded(f"no complete answer from {address} within the timeout")
    if rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return exceptions.InternalError(f"the server at {address} does not implement this call: is it a Tandem router?")
    return (cls or exceptions.InternalError)(details)


def _reason(details: str) -> str:
    """gRPC's message in plain words. If only one side uses TLS, the connection is closed without a clear message."""
    if details.startswith(_NO_CONNECTION) and any(sign in details for sign in _TLS_SIGNS):
        hint = "does the server speak TLS, with a certificate for this address? see `tls` of the client"
        return f"no secure connection ({hint})"
    return next((reason for sign, reason in _REASONS.items() if sign in details), details)


def _retry_after_s(trailing: Mapping[str, str]) -> float | None:
    text = trailing.get(RETRY_AFTER_KEY, "")
    return int(text) / 1000 if text.isascii() and text.isdigit() else None


def seconds(value: float, name: str) -> float:
    """Return the value of the argument `name`, or the longest time that gRPC takes. Raises InvalidRequest if it is no
    number, or NaN. It becomes Python's float: points in time have too many digits for numpy's float32.
    """
    try:
        number = float(min(value, _LONGEST_S))
    except (TypeError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise wrong_value(name, "a number of seconds", value)
    return number


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, in seconds of the monotonic clock. One deadline covers all attempts of a call."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """The deadline `timeout_s` from now, which may be infinity. Raises InvalidRequest for what is no number."""
        return cls(time.monotonic() + seconds(timeout_s, "timeout"))

    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.at_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, and never shorter than the server asks for."""

    max_retries: int = 2
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.max_retries, int):
            raise wrong_value("max_retries", "an integer", self.max_retries)

    def delay_s(self, error: TandemError, num_retries: int, remaining_s: float) -> float | None:
        """Seconds to wait before the next attempt; None to raise `error` instead."""
        if num_retries >= self.max_retries or not isinstance(error, RETRYABLE):
            return None
        backoff_s = min(self.max_backoff_s, self.initial_backoff_s * 2 ** min(num_retries, _MAX_DOUBLINGS))
        jitter = random.uniform(0.5, 1.0)
        requested_s = error.retry_after_s if isinstance(error, Overloaded) else None
        # Clients that were refused together must not return together: the jitter is added to the requested delay.
        delay_s = backoff_s * jitter if requested_s is None else requested_s + backoff_s * jitter
        return delay_s if delay_s < remaining_s else None
