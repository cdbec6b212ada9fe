"""Maps errors of the mesh to gRPC statuses and back.

The name of the error class travels in trailing metadata, so a caller inside the mesh gets the same class.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from types import MappingProxyType
from typing import Any

import grpc

from mesh.domain import errors
from mesh.domain.errors import MeshError

ERROR_KEY = "tandem-error"
_TLS_SIGNS = ("Socket closed", "Tls handshake failed", "Hostname Verification")
RETRY_AFTER_KEY = "retry-after-ms"
_MAX_DETAILS_BYTES = 4 << 10

STATUS_BY_ERROR: Mapping[type[MeshError], grpc.StatusCode] = MappingProxyType(
    {
        errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
        errors.TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
        errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
        errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.NoWorkers: grpc.StatusCode.UNAVAILABLE,
        errors.RouterStopping: grpc.StatusCode.UNAVAILABLE,
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


def details_of(error: MeshError) -> str:
    """Return the error's message as a call's status can carry it, cut at `_MAX_DETAILS_BYTES`.

    Peers refuse trailing metadata of more than 8 to 16 KiB, and report RESOURCE_EXHAUSTED in place of the error. gRPC
    makes three bytes of each byte of a character outside printable ASCII.
    """
    text = str(error)
    num_bytes = 0
    for place, char in enumerate(text):
        num_bytes += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if num_bytes > _MAX_DETAILS_BYTES:
            text = text[:place] + "..."
            break
    return text.encode(errors="replace").decode()


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


class FirstStatus:
    """The status with which the other end ends a call.

    A write that fails as the call ends replaces the call's status with INTERNAL (github.com/grpc/grpc/issues/36066),
    perhaps right after the callback, before a task could read the status.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._error: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._keep)

    async def wait(self) -> grpc.aio.AioRpcError:
        """Return the status, of code OK too, as an error, once the call has ended."""
        return await asyncio.shield(self._error)

    def _keep(self, call: Any) -> None:
        if not self._error.done():
            self._error.set_result(_result_now(_as_error(call)))


async def _as_error(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    """Does not wait if the call has ended."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _result_now(coroutine: Coroutine[object, None, grpc.aio.AioRpcError]) -> grpc.aio.AioRpcError:
    """Run a coroutine that has nothing to wait for, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        error: grpc.aio.AioRpcError = stop.value
        return error
    coroutine.close()
    raise RuntimeError("the coroutine waits for something")


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
