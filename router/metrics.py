"""The Prometheus metrics of a router.

They are named in the style of vLLM's; docs/observability.md lists them. They are updated from a choice's trace when it
has ended; only gaps between tokens are counted as they come.
"""

from collections import Counter as CountOf
from collections.abc import Iterator, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mesh.domain.errors import (
    AttemptsFailed,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    Replayable,
    RouterStopping,
    SlowReader,
)
from mesh.domain.worker import WorkerRole, WorkerState
from mesh.metrics import SECONDS, TOKENS, FastHistogram, OnLoop, new_registry
from router.advice import Action
from router.journal import CANCELLED, Incident, IncidentKind, Trace
from router.model_router import ModelRouter
from router.timeline import PHASES, Timing
from router.traffic import Traffic


class RouterMetrics:
    """Counts and times what a router's journal reports: a JournalReader, one per router."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.gaps = FastHistogram(
            "tandem_inter_token_latency_seconds", "Gaps between tokens of a choice, replays included"
        )
        self.registry.register(self.gaps)
        count, seconds, tokens = self._counter, self._seconds, self._tokens
        self._succeeded = count("request_success", "Choices that ended well", "finished_reason")
        self._failed = count("request_failure", "Choices that ended with an error", "error")
        self._cancelled = count("request_cancelled", "Choices whose client left")
        self._refused = count("request_refused", "Requests refused before they began", "error")
        self._incidents = count("incidents", "What happened to workers: joined, lost, tripped, ...", "kind")
        self._replays = count("replays", "Attempts that failed and were followed by another", "cause")
        self._prompt_tokens = count("prompt_tokens", "Tokens of prompts")
        self._generation_tokens = count("generation_tokens", "Tokens generated")
        self._cache_queries = count("prefix_cache_queries", "Tokens of prompts, looked for in prefix caches")
        self._cache_hits = count("prefix_cache_hits", "Tokens of prompts found in prefix caches")
        self._prompt_length = tokens("request_prompt_tokens", "Tokens of a choice's prompt")
        self._generated_length = tokens("request_generation_tokens", "Tokens generated for a choice")
        self._latency = seconds("e2e_request_latency_seconds", "From a request's arrival to a choice's end")
        self._first_token = seconds("time_to_first_token_seconds", "From a request's arrival to a choice's first token")
        self._per_token = seconds("request_time_per_output_token_seconds", "Mean gap between a choice's tokens")
        self._kv_transfer = seconds("kv_transfer_seconds", "From the opening of a KV transfer to its commit")
        self._events = seconds("request_event_seconds", "From a request's arrival to its lifetime events", "event")
        self._phases = {
            phase: seconds(f"request_{phase}_time_seconds", f"A choice's time in the phase {phase}") for phase in PHASES
        }
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Create rare series with value 0: Prometheus does not see the increase of a series that starts at 1."""
        for kind in IncidentKind:
            if kind not in (IncidentKind.REPLAYED, IncidentKind.FAILED):
                self._incidents.labels(kind.value)
        for cause in Replayable.__subclasses__():
            self._replays.labels(cause.__name__)
        for error in (AttemptsFailed, DeadlineExceeded, NoWorkers, Overloaded, RouterStopping, SlowReader):
            self._failed.labels(error.__name__)
        for refusal in (InvalidRequest, Overloaded):
            self._refused.labels(refusal.__name__)

    def watch(self, models: Sequence[ModelRouter], traffic: Traffic) -> None:
        """Add gauges over all models, and figures of the traffic. Call it on the event loop that owns them."""
        self.registry.register(OnLoop(lambda: [*_gauges(models), *_traffic(traffic)]))

    def noted(self, incident: Incident) -> None:
        if incident.kind is IncidentKind.REPLAYED:
            self._replays.labels(incident.cause).inc()
        elif incident.kind is not IncidentKind.FAILED:  # counted by `ended`
            self._incidents.labels(incident.kind.value).inc()

    def refused(self, error: str) -> None:
        self._refused.labels(error).inc()

    def ended(self, trace: Trace) -> None:
        if trace.error == CANCELLED:
            self._cancelled.inc()
        elif trace.error:
            self._failed.labels(trace.error).inc()
        elif trace.finish_reason is not None:
            self._succeeded.labels(trace.finish_reason.value).inc()
        for event, at_s in trace.events_s.items():
            self._events.labels(event).observe(at_s)
        self._count_tokens(trace)
        self._latency.observe(trace.events_s["finished"])
        if trace.timing is not None:
            self._time(trace, trace.timing)

    def _count_tokens(self, trace: Trace) -> None:
        self._prompt_tokens.inc(trace.prompt_tokens)
        self._prompt_length.observe(trace.prompt_tokens)
        self._generation_tokens.inc(trace.completion_tokens)
        self._generated_length.observe(trace.completion_tokens)
        self._cache_queries.inc(trace.prompt_tokens)
        self._cache_hits.inc(trace.cached_tokens)

    def _time(self, trace: Trace, timing: Timing) -> None:
        for phase, phase_s in timing.phases_s.items():
            self._phases[phase].observe(phase_s)
        for attempt in timing.attempts:
            if attempt.kv_transfer_s is not None:
                self._kv_transfer.observe(attempt.kv_transfer_s)
        if trace.completion_tokens:
            self._first_token.observe(timing.first_token_s)
        if trace.completion_tokens > 1:
            self._per_token.observe((timing.total_s - timing.first_token_s) / (trace.completion_tokens - 1))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", help_text, labels, registry=self.registry)

    def _seconds(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(f"tandem_{name}", help_text, labels, buckets=SECONDS, registry=self.registry)

    def _tokens(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"tandem_{name}", help_text, buckets=TOKENS, registry=self.registry)


def _gauges(models: Sequence[ModelRouter]) -> Iterator[Metric]:
    num_held = sum(model.limiter.num_held for model in models)
    num_waiting = sum(model.queue.num_queued_choices for model in models)
    num_running = max(0, num_held - num_waiting)
    yield _gauge("num_requests_running", "Choices with a permit that are not in the queue for workers", num_running)
    yield _gauge("num_requests_waiting", "Choices in the queue for workers", num_waiting)
    yield _tokens_waiting(models)
    yield _gauge("max_requests", "The cap on choices in service", sum(model.limiter.max_permits for model in models))
    num_transferring = sum(model.in_flight.num_transferring for model in models)
    yield _gauge("kv_transfers_open", "KV transfers under way", num_transferring)
    views = [view for model in models for view in model.mesh.views()]
    serving = frozenset[str]().union(*(model.mesh.serving() for model in models))
    states = CountOf((view.info.role, view.state) for view in views)
    workers = GaugeMetricFamily("tandem_workers", "Workers this router knows", labels=["role", "state"])
    proven = GaugeMetricFamily("tandem_workers_serving", "Workers that get requests", labels=["role"])
    for role in WorkerRole:
        for state in WorkerState:
            workers.add_metric([role.value, state.value], states[role, state])
        proven.add_metric([role.value], sum(v.info.role is role and v.info.incarnation in serving for v in views))
    yield workers
    yield proven
    yield _advice(models)


def _traffic(traffic: Traffic) -> Iterator[Metric]:
    labels = ["model", "revision"]
    asked = GaugeMetricFamily("tandem_traffic_share", "A revision's share of the requests for a name", labels=labels)
    routed = CounterMetricFamily("tandem_traffic_requests", "Requests for a name that a revision began", labels=labels)
    counts = traffic.num_routed.copy()
    for name, shares in traffic.table.shares.items():
        total = sum(shares.values())
        for model, weight in shares.items():
            asked.add_metric([name, model], weight / total)
            counts[name, model] += 0  # begin at zero
    for (name, model), count in counts.items():
        routed.add_metric([name, model], count)
    yield asked
    yield routed


def _advice(models: Sequence[ModelRouter]) -> GaugeMetricFamily:
    counts = CountOf((advice.action, advice.role) for model in models for advice in model.adviser.advice)
    family = GaugeMetricFamily(
        "tandem_router_advice", "Models that a worker more or less would help", labels=["action", "role"]
    )
    for action in Action:
        for role in WorkerRole:
            family.add_metric([action.value, role.value], counts[action, role])
    return family


def _tokens_waiting(models: Sequence[ModelRouter]) -> GaugeMetricFamily:
    """For autoscalers; see PlacementQueue.num_tokens_waiting."""
    family = GaugeMetricFamily(
        "tandem_prompt_tokens_waiting",
        "Prompt tokens in the queue, by the role that its head waits for",
        labels=["role"],
    )
    for role in WorkerRole:
        family.add_metric([role.value], sum(model.queue.num_tokens_waiting(role) for model in models))
    return family


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tandem_{name}", help_text, value)
