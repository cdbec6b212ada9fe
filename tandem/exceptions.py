"""Every error this package raises, as one tree. No gRPC exception leaves the package.

    TandemError
    ├── InvalidRequest        the request breaks a documented rule; do not send it again as it is
    ├── ModelNotFound         no served model has this name
    ├── Unauthenticated       the API key is missing or wrong
    ├── PermissionDenied      the API key is known, but not allowed to do this
    ├── Overloaded            a cap is reached, or the first token would come too late; retry after `retry_after_s`
    ├── NoWorkers             no healthy workers can serve this now
    ├── DeadlineExceeded      out of time
    ├── Cancelled             the server ended the call as cancelled, or the client was closed meanwhile
    ├── ConnectionFailed      the server cannot be reached, or the connection broke
    ├── ServerMisconfigured   the server's parts do not fit together; its operator has to act
    └── InternalError         anything else that went wrong on the server

Cancelling the task that waits for an answer raises asyncio.CancelledError, as everywhere in asyncio.
"""


class TandemError(Exception):
    """Base of all errors of this package. The message is fit to be shown to a person."""


class InvalidRequest(TandemError):
    """The request breaks a documented rule."""


class ModelNotFound(TandemError):
    """No served model has this name."""


class Unauthenticated(TandemError):
    """The API key is missing or wrong."""


class PermissionDenied(TandemError):
    """The caller is known and not allowed to do this."""


class Overloaded(TandemError):
    """A cap is reached, or the first token would come later than `ttft_target` or the timeout allow.

    Try again after `retry_after_s` seconds, where the server gave a time.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkers(TandemError):
    """No healthy workers can serve this now."""


class DeadlineExceeded(TandemError):
    """The request's time is up."""


class Cancelled(TandemError):
    """The server ended the call as cancelled, for example because it is stopping."""


class ConnectionFailed(TandemError):
    """The server cannot be reached, or the connection broke before the answer was complete."""


class ServerMisconfigured(TandemError):
    """The server's parts do not fit together. Its operator has to act."""


class InternalError(TandemError):
    """Something else went wrong on the server; its log has the details."""
