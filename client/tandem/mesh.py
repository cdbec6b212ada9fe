"""The mesh for operators: workers, recent incidents, recent and running requests; what a router did over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.models import FinishReason, Timing


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker. Token counts since its start: generated tokens, computed prompt tokens, and tokens that
    speculative decoding drafted and accepted.
    """

    free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    pending_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the router sees it. `role` is prefill or decode; `state` ready, stalled, draining, lost, stopped
    (in order), or switching to the other role.

    `serving` workers get requests of clients: they are ready, reachable, and have passed the health check.
    `open_transfers` and `transferred_bytes` count KV transfers that the router started. `prefilling_tokens` are prompt
    tokens that the router has sent and the worker has not computed yet. `canary_error` is the error of the last health
    check, a tiny request, if it failed. Several processes, its ranks, may compute each step together: `tensor_parallel`
    in each of `pipeline_parallel` stages. `adapters` are the names of its LoRA adapters. `switchable` workers can
    change their role, and have another incarnation then. `max_batch_tokens` limits the tokens of a step. A KV block has
    `block_size` tokens; a sequence holds `state_blocks` more for its recurrent state. Older routers tell 0 for these.
    Where KV behind sliding windows is freed, blocks are those of groups of layers, and `windows` the tokens that each
    group sees, 0 for all; these may be chunks.
    """

    worker_id: str
    incarnation: str
    role: str
    state: str
    address: str
    model: str
    device: str
    pid: int
    num_blocks: int
    load: WorkerLoad
    last_seen_s: float
    max_num_seqs: int = 0
    serving: bool = True
    open_transfers: int = 0
    transferred_bytes: int = 0
    prefilling_tokens: int = 0
    speculative: str = "none"
    canary_error: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    adapters: tuple[str, ...] = ()
    switchable: bool = False
    max_batch_tokens: int = 0
    block_size: int = 0
    state_blocks: int = 0
    windows: tuple[int, ...] = ()
    windows_are_chunks: bool = False

    @property
    def degrees(self) -> str:
        """Both degrees, such as "2x1" for two ranks in one stage."""
        return f"{self.tensor_parallel}x{self.pipeline_parallel}"


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident of `age_s` seconds ago that concerns a worker, a request, or a request at a worker.

    `kind` of a worker's incident is joined, ready, draining, stalled, lost, stopped (in order), switched (to another
    role) or tripped (too many failures). `kind` of a request's incident is replayed or failed.
    """

    kind: str
    age_s: float
    worker_id: str = ""
    request_id: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class AttemptPlace:
    """The workers of an attempt. Without a prefill worker, the decode worker computed the prompt; `failure` is an
    error.
    """

    prefill_worker: str = ""
    decode_worker: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A finished choice, which ended `age_s` ago with `finish_reason` or `error`; or a running choice, which arrived
    `age_s` ago. `timing` is the time so far. `places` correspond to `timing.attempts`."""

    request_id: str
    age_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    error: str
    timing: Timing | None
    places: tuple[AttemptPlace, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on the workers of a model: `action` is "add" or "remove", one worker of the role; `reason` is a clause."""

    action: str
    role: str
    reason: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class RoutedRequests:
    """How many requests for a name each revision began: in the last `span_s` seconds, which are five minutes, or the
    time since its shares changed."""

    requests: Mapping[str, int]
    span_s: float


@dataclass(frozen=True, slots=True)
class Mesh:
    """All workers, counts of the router since its start, recent incidents and finished choices, newest first, and
    running choices, oldest first.

    `shortage` is the resource that the first request in the queue waits for: "decode worker", "decode capacity" or
    "prefill capacity"; "" if no request waits. `advice` is empty if nothing would help. `traffic` has the shares of the
    revisions, by the name that stands for them; `routed` the requests that this router sent to each.
    """

    workers: tuple[Worker, ...]
    queued_requests: int
    active_requests: int
    shortage: str = ""
    ended_choices: int = 0
    failed_choices: int = 0
    replays: int = 0
    incidents: tuple[Incident, ...] = ()
    traces: tuple[RequestTrace, ...] = ()
    running: tuple[RequestTrace, ...] = ()
    advice: tuple[Advice, ...] = ()
    traffic: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    routed: Mapping[str, RoutedRequests] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A stretch of `length_s` seconds that ended `age_s` ago: tokens, replays and failed choices in it.

    `waiting` and `running` choices and `kv_used`, the share of the decode workers' KV memory in use, are means. Times
    to the first token and gaps between tokens are percentiles in seconds. None: nothing was measured.
    """

    age_s: float
    length_s: float
    generated_tokens: int
    computed_tokens: int
    replays: int
    failed_choices: int
    waiting: float
    running: float
    kv_used: float | None = None
    first_token_p50_s: float | None = None
    first_token_p95_s: float | None = None
    gap_p50_s: float | None = None
    gap_p99_s: float | None = None
