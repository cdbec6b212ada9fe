"""All errors that the mesh raises deliberately, in one tree.

    MeshError
    ├── InvalidRequest          the client sent a bad request; do not retry
    │   └── TooLarge            the sequence can never fit on this worker
    ├── ModelNotFound           no served model has this name
    ├── Unauthenticated         the credential is missing or wrong
    ├── PermissionDenied        the caller is known but not allowed
    ├── Overloaded              over a limit, or too late; the client retries after `retry_after_s`
    ├── NoWorkers               no worker can serve the request now
    ├── RouterStopping          the router stops and has cut the answer off; another router goes on with it
    ├── AttemptsFailed          several workers failed on this request; clients should not repeat it
    ├── ModelFailed             the model computed NaN or infinity for this request; do not retry
    ├── DeadlineExceeded        the request ran out of time
    ├── SlowReader              the client read its answer too slowly and was cut off
    ├── LayoutMismatch          workers and router do not fit together; the operator must fix it
    ├── ConfigurationError      a setting, checkpoint or port is wrong; the operator must fix it
    └── Replayable              this attempt failed; the router replays the request on other workers
        ├── TransferFailed      KV did not arrive
        ├── TransferCorrupt     KV failed verification
        ├── LeaseExpired        the sender of a transfer never came, or was silent for a lease
        ├── ReceiverLost        the receiver of a transfer stops, as its sender was told
        ├── WorkerBusy          the worker has no room now: no free slot, blocks or adapter slot
        ├── SequencePreempted   the sequence lost its blocks to older sequences
        ├── WorkerDraining      the worker accepts no new work
        └── WorkerLost          the worker is unreachable, silent, or has failed

`mesh/rpc/status.py` maps these errors to gRPC statuses.
"""


class MeshError(Exception):
    """Base class of the tree. The message may be shown to a client."""


class InvalidRequest(MeshError):
    """The request violates a documented rule."""


class TooLarge(InvalidRequest):
    """The sequence needs more tokens than the worker, or any worker, can ever hold."""


class ModelNotFound(MeshError):
    """No served model has this name."""


class Unauthenticated(MeshError):
    """The credential is missing or wrong."""


class PermissionDenied(MeshError):
    """The caller is authenticated but not allowed to do this."""


class Overloaded(MeshError):
    """A limit is reached, or the first token would come too late. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkers(MeshError):
    """No healthy workers form a path for this request."""


class RouterStopping(MeshError):
    """The router stops, and its grace is over. Nothing is wrong with the request: the SDK repeats it elsewhere."""


class AttemptsFailed(MeshError):
    """So many attempts have failed that the request itself may be the cause."""


class ModelFailed(MeshError):
    """The model computed NaN or infinity for this request: the weights are broken, or the dtype is too narrow."""


class DeadlineExceeded(MeshError):
    """The request ran out of time."""


class SlowReader(MeshError):
    """The client read nothing for too long, or let too many events pile up, and was cut off."""


class LayoutMismatch(MeshError):
    """A worker does not fit the router or another worker: model, tokenizer, KV layout, ranks or transports differ."""


class ConfigurationError(MeshError):
    """A setting, checkpoint, or port is wrong. The message says what to do."""


def missing_extra(need: str, extra: str) -> ConfigurationError:
    """The error for a package that is not installed. `need` names it, as in "plots need matplotlib"."""
    return ConfigurationError(f"{need}: install tandem-serve[{extra}] (in a checkout: pip install '.[{extra}]')")


class Replayable(MeshError):
    """This attempt failed through no fault of the request; the router replays it."""


class TransferFailed(Replayable):
    """KV did not arrive in full."""


class TransferCorrupt(Replayable):
    """KV arrived but failed verification and was refused."""


class LeaseExpired(Replayable):
    """The sender of a transfer never came, or was silent for a lease."""


class ReceiverLost(Replayable):
    """The receiver of a transfer has ended it because it stops. Its sender says so and is well itself."""


class WorkerBusy(Replayable):
    """The worker has no room now: no free slot, too few free blocks, or no free adapter slot."""


class SequencePreempted(Replayable):
    """The sequence lost its blocks to older sequences."""


class WorkerDraining(Replayable):
    """The worker is draining and accepts no new work."""


class WorkerLost(Replayable):
    """The worker that was asked has stopped, cannot be reached, sent no token or reserved no memory in time, or has
    reported an internal error. It never stands for the worker's peer: see ReceiverLost and TransferFailed."""
