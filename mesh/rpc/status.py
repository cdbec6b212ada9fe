"""Maps errors of the mesh to gRPC statuses and back.

The name of the error class travels in trailing metadata, so a caller inside the mesh gets the same class.
"""

from collections.abc import Mapping
from types import MappingProxyType

import grpc

from mesh.domain import errors
from mesh.domain.errors import MeshError

ERROR_KEY = "tandem-error"
_TLS_SIGNS = ("Socket closed", "Tls handshake failed", "Hostname Verification")
RETRY_AFTER_KEY = "retry-after-ms"

STATUS_BY_ERROR: Mapping[type[MeshError], grpc.StatusCode] = MappingProxyType(
    {
        errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
        errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
        errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.NoWorkers: grpc.StatusCode.UNAVAILABLE,
        errors.AttemptsFailed: grpc.StatusCode.INTERNAL,
        errors.ModelFailed: grpc.StatusCode.INTERNAL,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.SlowReader: grpc.StatusCode.ABORTED,
        errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.Replayable: grpc.StatusCode.UNAVAILABLE,
        errors.TransferFailed: grpc.StatusCode.UNAVAILABLE,
        errors.TransferCorrupt: grpc.StatusCode.DATA_LOSS,
        errors.LeaseExpired: grpc.StatusCode.ABORTED,
        errors.ReceiverLost: grpc.StatusCode.UNAVAILABLE,
        errors.WorkerBusy: grpc.StatusCode.UNAVAILABLE,
        errors.SequencePreempted: grpc.StatusCode.ABORTED,
        errors.WorkerDraining: grpc.StatusCode.UNAVAILABLE,
        errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
    }
)

_ERROR_BY_NAME = {cls.__name__: cls for cls in STATUS_BY_ERROR}
_ERROR_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: errors.LayoutMismatch,
    grpc.StatusCode.DATA_LOSS: errors.TransferCorrupt,
}


def status_of(error: MeshError) -> tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]:
    """Return the status and the trailing metadata for `error`."""
    trailing = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, errors.Overloaded):
        trailing.append((RETRY_AFTER_KEY, str(max(1, round(error.retry_after_s * 1000)))))
    return STATUS_BY_ERROR[type(error)], tuple(trailing)


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> MeshError:
    """Return the MeshError that ended a call inside the mesh. A broken connection becomes WorkerLost."""
    trailing = dict(rpc_error.trailing_metadata() or ())
    cls = _ERROR_BY_NAME.get(str(trailing.get(ERROR_KEY)))
    if cls is None:
        cls = _ERROR_BY_STATUS.get(rpc_error.code(), errors.WorkerLost)
    return cls((rpc_error.details() or rpc_error.code().name) + _hint(rpc_error))


def named_error(name: str, message: str) -> MeshError:
    """The error of the class with this name; WorkerLost if there is none."""
    return _ERROR_BY_NAME.get(name, errors.WorkerLost)(message)


def _hint(rpc_error: grpc.aio.AioRpcError) -> str:
    """Explain a failed TLS handshake: the server just closes the connection, and gRPC's message does not mention
    TLS."""
    details = rpc_error.details() or ""
    if details.startswith("failed to connect") and any(sign in details for sign in _TLS_SIGNS):
        return " (do both sides use TLS, with certificates of the same CA that contain their addresses?)"
    return ""
