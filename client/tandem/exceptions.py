"""All errors of this package. No gRPC exception leaves it.

    TandemError
    ├── InvalidRequest        the request breaks a documented rule; do not send it again as it is
    ├── ModelNotFound         no served model has this name
    ├── Unauthenticated       the API key is missing or wrong
    ├── PermissionDenied      the API key is known, but not allowed to do this
    ├── Overloaded            a limit is reached, or the first token would be late; retry after `retry_after_s`
    ├── NoWorkers             no healthy workers can serve this now
    ├── DeadlineExceeded      out of time
    ├── SlowReader            the answer was read too slowly, and the server has cut it off
    ├── Cancelled             the client was closed meanwhile
    ├── ConnectionFailed      the server cannot be reached, the connection broke, or the server stopped meanwhile
    ├── ServerMisconfigured   the parts of the server do not fit together; its operator has to act
    └── InternalError         any other error on the server
        └── ModelFailed       the model computes NaN or infinity for this request

Cancelling a task that waits for an answer raises asyncio.CancelledError, as usual.
"""


class TandemError(Exception):
    """Base of all errors of this package. The message can be shown to users."""


class InvalidRequest(TandemError):
    """The request breaks a documented rule."""


class ModelNotFound(TandemError):
    """No served model has this name."""


class Unauthenticated(TandemError):
    """The API key is missing or wrong."""


class PermissionDenied(TandemError):
    """The caller is known and not allowed to do this."""


class Overloaded(TandemError):
    """A limit is reached, or the first token would come later than `ttft_target` or the timeout allows.

    Try again after `retry_after_s` seconds; None if the server gave no time.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkers(TandemError):
    """No healthy workers can serve this now."""


class DeadlineExceeded(TandemError):
    """The request's time is up."""


class SlowReader(TandemError):
    """The caller took no event of the stream for too long, or too many were waiting, and the server has cut it off."""


class Cancelled(TandemError):
    """The client was closed while the call ran."""


class ConnectionFailed(TandemError):
    """The server cannot be reached, or it stopped, or the connection broke, before the answer was complete.

    `broke` means that a connection existed, so the server may have started to process the call; `stopped`, that the
    server has said that it stops.
    """

    def __init__(self, message: str, *, broke: bool = False, stopped: bool = False) -> None:
        super().__init__(message)
        self.broke = broke
        self.stopped = stopped


class ServerMisconfigured(TandemError):
    """The parts of the server do not fit together. Its operator has to act."""


class InternalError(TandemError):
    """Another error on the server. Its log has the details."""


class ModelFailed(InternalError):
    """The model computes NaN or infinity for this request, and would do so again."""
