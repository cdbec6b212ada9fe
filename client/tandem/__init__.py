"""Client for Tandem, which serves large language models with prefill and decode separated.

    import tandem

    with tandem.Client("127.0.0.1:50051") as client:
        for event in client.stream(prompt="The sky is", max_new_tokens=16):
            print(event.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. All errors derive from `TandemError`; `exceptions.py` shows the tree.
"""

from tandem._requests import GenerateArguments, TokenizeArguments
from tandem._routers import Tls
from tandem.client import AsyncClient
from tandem.exceptions import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    PermissionDenied,
    ServerMisconfigured,
    SlowReader,
    TandemError,
    Unauthenticated,
)
from tandem.mesh import (
    Advice,
    AttemptPlace,
    HistoryPoint,
    Incident,
    Mesh,
    RequestTrace,
    RoutedRequests,
    Worker,
    WorkerLoad,
)
from tandem.models import (
    AttemptTiming,
    Choice,
    FinishReason,
    KeepPriority,
    Model,
    Priority,
    Result,
    SamplingDefaults,
    Timing,
    Token,
    TokenEvent,
    TopToken,
    Usage,
)
from tandem.sync import Client

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AsyncClient",
    "AttemptPlace",
    "AttemptTiming",
    "Cancelled",
    "Choice",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "FinishReason",
    "GenerateArguments",
    "HistoryPoint",
    "Incident",
    "InternalError",
    "InvalidRequest",
    "KeepPriority",
    "Mesh",
    "Model",
    "ModelFailed",
    "ModelNotFound",
    "NoWorkers",
    "Overloaded",
    "PermissionDenied",
    "Priority",
    "RequestTrace",
    "Result",
    "RoutedRequests",
    "SamplingDefaults",
    "ServerMisconfigured",
    "SlowReader",
    "TandemError",
    "Timing",
    "Tls",
    "Token",
    "TokenEvent",
    "TokenizeArguments",
    "TopToken",
    "Unauthenticated",
    "Usage",
    "Worker",
    "WorkerLoad",
    "__version__",
]
