"""Every error the mesh raises on purpose, as one tree.

    MeshError
    ├── InvalidRequest          the client's fault; nobody retries
    ├── ModelNotFound           no such served model
    ├── Unauthenticated         no credential, or a wrong one
    ├── PermissionDenied        known, but not allowed
    ├── Overloaded              over a cap, or too late; the client retries after `retry_after_s`
    ├── NoWorkers               nobody can serve this now
    ├── AttemptsFailed          workers fail this request again and again; clients should not repeat it
    ├── DeadlineExceeded        out of time
    ├── LayoutMismatch          two workers disagree about KV or model; the operator's to fix
    ├── ConfigurationError      a setting, checkpoint or port is wrong; the operator's to fix
    └── Replayable              this attempt failed; the router replays the request elsewhere
        ├── TransferFailed      KV did not arrive
        ├── TransferCorrupt     KV arrived wrong and was refused
        ├── LeaseExpired        the reservation ran out
        ├── WorkerBusy          no blocks for it now
        ├── SequencePreempted   its blocks were taken for older sequences
        ├── WorkerDraining      the worker takes nothing new
        └── WorkerLost          the worker is gone

`mesh/rpc/status.py` holds the one table from these to gRPC statuses.
"""


class MeshError(Exception):
    """Base of all errors raised on purpose. The message is fit to be shown to a client."""


class InvalidRequest(MeshError):
    """The request breaks a documented rule."""


class ModelNotFound(MeshError):
    """No served model has this name."""


class Unauthenticated(MeshError):
    """No credential, or a wrong one."""


class PermissionDenied(MeshError):
    """The caller is known and not allowed to do this."""


class Overloaded(MeshError):
    """A cap is reached, or the first token would come too late. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkers(MeshError):
    """No healthy workers form a path for this request."""


class AttemptsFailed(MeshError):
    """Workers have failed this request so often that it may be the cause."""


class DeadlineExceeded(MeshError):
    """The request's time is up."""


class LayoutMismatch(MeshError):
    """Two workers disagree about KV shape, dtype or model."""


class ConfigurationError(MeshError):
    """A setting, checkpoint, or port is wrong. The message says what to do."""


class Replayable(MeshError):
    """This attempt failed through no fault of the request; the router replays it."""


class TransferFailed(Replayable):
    """KV did not arrive."""


class TransferCorrupt(Replayable):
    """KV arrived, did not verify, and was refused."""


class LeaseExpired(Replayable):
    """A reservation ran out before it was used."""


class WorkerBusy(Replayable):
    """The worker has no blocks for the sequence now."""


class SequencePreempted(Replayable):
    """The sequence's blocks were taken for older ones."""


class WorkerDraining(Replayable):
    """The worker takes nothing new."""


class WorkerLost(Replayable):
    """The worker is gone or cannot be reached."""
