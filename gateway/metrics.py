"""Figures for Prometheus, under the names dashboards for TGI know, and a few of our own."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from gateway.phases import Phases
from mesh.metrics import TOKENS, new_registry
from tandem import Timing

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PLAIN_COUNTERS = ("tgi_request_count", "tgi_request_success", "tgi_request_failure")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `failure` is "" for success, else TGI's word for what went wrong."""

    dialect: str
    status: int
    failure: str
    duration_s: float


class Metrics:
    """One registry for each gateway."""

    def __init__(self) -> None:
        registry = self._registry = new_registry()
        self._requests = Counter(
            "tandem_http_requests", "HTTP requests answered", ["dialect", "status"], registry=registry
        )
        self.open_requests = Gauge("tandem_http_open_requests", "HTTP requests being answered", registry=registry)
        self._count = Counter("tgi_request_count", "Generation requests", registry=registry)
        self._success = Counter("tgi_request_success", "Generation requests that succeeded", registry=registry)
        self._failure = Counter("tgi_request_failure", "Generation requests that failed", ["err"], registry=registry)
        self.waiting = Gauge("tgi_queue_size", "Choices of this gateway without a first token", registry=registry)
        self.running = Gauge("tgi_batch_current_size", "Choices of this gateway that stream", registry=registry)
        seconds, tokens = self._seconds, self._tokens
        self._duration = seconds("tgi_request_duration", "Seconds from request to end")
        self._first_token = seconds("tandem_http_first_token_seconds", "Seconds from request to first token")
        self._validation = seconds("tgi_request_validation_duration", "Seconds of template, tokens and limits")
        self._queue = seconds("tgi_request_queue_duration", "Seconds in the router's queue")
        self._inference = seconds("tgi_request_inference_duration", "Seconds at workers")
        self._per_token = seconds("tgi_request_mean_time_per_token_duration", "Mean seconds between tokens")
        self._input = tokens("tgi_request_input_length", "Tokens of the prompt")
        self._max_new_tokens = tokens("tgi_request_max_new_tokens", "Most tokens a request asked for")
        self._generated = tokens("tgi_request_generated_tokens", "Tokens generated")

    def ended(self, outcome: Outcome, *, generates: bool) -> None:
        """A request has been answered, or its client has left."""
        self._requests.labels(outcome.dialect, str(outcome.status)).inc()
        if not generates:
            return
        self._count.inc()
        self._duration.observe(outcome.duration_s)
        if outcome.failure:
            self._failure.labels(outcome.failure).inc()
        else:
            self._success.inc()

    def asked(self, num_choices: int, max_new_tokens: int | None) -> None:
        """Choices are asked of the router."""
        self.waiting.inc(num_choices)
        if max_new_tokens is not None:
            self._max_new_tokens.observe(max_new_tokens)

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first_token.observe(seconds)

    def choice_ended(self, num_prompt: int, num_generated: int, mean_gap_s: float | None) -> None:
        """A choice is complete."""
        self._input.observe(num_prompt)
        self._generated.observe(num_generated)
        if mean_gap_s is not None:
            self._per_token.observe(mean_gap_s)

    def timed(self, timing: Timing) -> None:
        """Where a choice's time went, as the router says."""
        phases = Phases.of(timing)
        self._validation.observe(phases.validation_ms / 1000)
        self._queue.observe(phases.queue_ms / 1000)
        self._inference.observe(phases.inference_ms / 1000)

    def _seconds(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=_SECONDS, registry=self._registry)

    def _tokens(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=TOKENS, registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """TGI's counters have no `_total` at the end."""
        for metric in self._registry.collect():
            if metric.name not in _PLAIN_COUNTERS:
                yield metric
                continue
            plain = Metric(metric.name, metric.documentation, "unknown")
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    plain.add_sample(metric.name, sample.labels, sample.value)
            yield plain

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self)
