"""Figures for Prometheus, under the names dashboards for TGI know, and a few of our own."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
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
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_http_requests", "HTTP requests answered", ["dialect", "status"], registry=registry
        )
        self.open_requests = Gauge("tandem_http_open_requests", "HTTP requests being answered", registry=registry)
        self._count = Counter("tgi_request_count", "Generation requests", registry=registry)
        self._success = Counter("tgi_request_success", "Generation requests that succeeded", registry=registry)
        self._failure = Counter("tgi_request_failure", "Generation requests that failed", ["err"], registry=registry)
        self._duration = Histogram(
            "tgi_request_duration", "Seconds from request to end", buckets=_SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "tandem_http_first_token_seconds",
            "Seconds from request to first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "tgi_request_mean_time_per_token_duration",
            "Mean seconds between tokens",
            buckets=_SECONDS,
            registry=registry,
        )
        self._input = Histogram("tgi_request_input_length", "Tokens of the prompt", buckets=_TOKENS, registry=registry)
        self._generated = Histogram(
            "tgi_request_generated_tokens", "Tokens generated", buckets=_TOKENS, registry=registry
        )

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

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first_token.observe(seconds)

    def choice_ended(self, num_prompt: int, num_generated: int, mean_gap_s: float | None) -> None:
        """A choice is complete."""
        self._input.observe(num_prompt)
        self._generated.observe(num_generated)
        if mean_gap_s is not None:
            self._per_token.observe(mean_gap_s)

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
