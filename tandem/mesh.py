"""The mesh as values: its workers, and what happened lately. For operators."""

from dataclasses import dataclass

from tandem.models import FinishReason, Timing


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is. Counts of tokens are since its start: generated ones, computed ones of prompts, and those
    that speculative decoding drafted and that were accepted.
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
    """A worker as the router sees it. `role` is prefill or decode; `state` ready, stalled, draining or lost.

    `serving` workers get clients' requests: they are ready, can be reached and have been proven. Transfers are those
    the router has asked for; `prefilling_tokens` of prompts that it has sent are not computed yet.
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


@dataclass(frozen=True, slots=True)
class Incident:
    """What happened `age_s` ago, to a worker, to a request, or to a request at a worker.

    `kind` is joined, ready, draining, stalled, lost or tripped (too many failures), which concern a worker; or replayed
    or failed, which concern a request.
    """

    kind: str
    age_s: float
    worker_id: str = ""
    request_id: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class AttemptPlace:
    """Where an attempt ran. Without a prefill worker the decode worker prefilled; `failure` names an error."""

    prefill_worker: str = ""
    decode_worker: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A choice that ended `age_s` ago, with `finish_reason` or with `error`; or one that runs, came in `age_s` ago, and
    has come as far as `timing` says. `places` go with `timing.attempts`."""

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
class Mesh:
    """All workers, the router's own counts since its start, what happened lately, newest first, and what runs, oldest
    first.

    `shortage` is what the first request in the queue waits for: "decode worker", "decode room" or "prefill room"; ""
    if none waits.
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
