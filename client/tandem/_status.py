"""The table that maps gRPC status codes to errors of this package."""

from collections.abc import Mapping
from types import MappingProxyType

import grpc

from tandem import exceptions
from tandem.exceptions import ConnectionFailed, InvalidRequest, Overloaded, TandemError

ERROR_KEY = "tandem-error"
RETRY_AFTER_KEY = "retry-after-ms"
_NO_CONNECTION = "failed to connect"
# Messages of gRPC for a connection that was established and lost. Proxies have other messages.
_BROKEN_SIGNS = ("Socket closed", "Connection reset", "Broken pipe", "Connection timed out", "keepalive", "GOAWAY")
_TLS_SIGNS = ("Socket closed", "Tls handshake failed", "Hostname Verification")

ERROR_BY_NAME: Mapping[str, type[TandemError]] = MappingProxyType(
    {
        "InvalidRequest": exceptions.InvalidRequest,
        "ModelNotFound": exceptions.ModelNotFound,
        "Unauthenticated": exceptions.Unauthenticated,
        "PermissionDenied": exceptions.PermissionDenied,
        "Overloaded": exceptions.Overloaded,
        "NoWorkers": exceptions.NoWorkers,
        "AttemptsFailed": exceptions.InternalError,
        "ModelFailed": exceptions.ModelFailed,
        "DeadlineExceeded": exceptions.DeadlineExceeded,
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
        grpc.StatusCode.DEADLINE_EXCEEDED: exceptions.DeadlineExceeded,
        grpc.StatusCode.CANCELLED: exceptions.Cancelled,
        grpc.StatusCode.FAILED_PRECONDITION: exceptions.ServerMisconfigured,
    }
)


def error_from_rpc(rpc_error: grpc.aio.AioRpcError, address: str) -> TandemError:
    """Convert the error of a call to `address`."""
    trailing = {str(key): str(value) for key, value in rpc_error.trailing_metadata() or ()}
    details = rpc_error.details() or rpc_error.code().name
    cls = ERROR_BY_NAME.get(trailing.get(ERROR_KEY, "")) or ERROR_BY_CODE.get(rpc_error.code())
    if cls is Overloaded:
        # gRPC reports messages above its size limit with the same code, for which a retry does not help.
        if ERROR_KEY not in trailing and "larger than max" in details:
            return InvalidRequest(f"the message is too large: {details}")
        return Overloaded(details, retry_after_s=_retry_after_s(trailing))
    if cls is ConnectionFailed:
        broke = not details.startswith(_NO_CONNECTION) and any(sign in details for sign in _BROKEN_SIGNS)
        return ConnectionFailed(f"the connection to {address} failed: {details}{_hint(details)}", broke=broke)
    if cls is exceptions.DeadlineExceeded and ERROR_KEY not in trailing:
        return exceptions.DeadlineExceeded(f"no complete answer from {address} within the timeout")
    if rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return exceptions.InternalError(f"the server at {address} does not implement this call: is it a Tandem router?")
    return (cls or exceptions.InternalError)(details)


def _hint(details: str) -> str:
    """A hint about TLS: if only one side uses it, the connection is closed without a clear message from gRPC."""
    if details.startswith(_NO_CONNECTION) and any(sign in details for sign in _TLS_SIGNS):
        return " (does the server speak TLS, with a certificate for this address? see `tls` of the client)"
    return ""


def _retry_after_s(trailing: Mapping[str, str]) -> float | None:
    text = trailing.get(RETRY_AFTER_KEY, "")
    return int(text) / 1000 if text.isascii() and text.isdigit() else None
