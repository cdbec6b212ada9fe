"""Prometheus metrics: those of TGI under their own names, for existing dashboards, and a few of Tandem's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import Metric

from gateway.errors import Problem
from mesh.metrics import TOKENS, new_registry
from tandem import Timing, TokenEvent

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PLAIN_COUNTERS = ("tgi_request_count", "tgi_request_success", "tgi_request_failure")


@dataclass(frozen=True, slots=True)
class Phases:
    """A choice's time in the three phases of TGI's metrics, replays included.

    `validation_ms`: permit, chat template and tokenizer. `queue_ms`: waiting for workers with capacity. `inference_ms`:
    the rest of the time, which is spent at workers.
    """

    validation_ms: float
    queue_ms: float
    inference_ms: float

    @classmethod
    def of(cls, timing: Timing) -> "Phases":
        phases_ms = timing.phases_ms
        validation_ms, queue_ms = phases_ms["prepare"], phases_ms["queue"]
        return cls(validation_ms, queue_ms, timing.total_ms - validation_ms - queue_ms)


class Metrics:
    """One registry per gateway. Waiting and running choices are counted as integers, so the gauges cannot drift."""

    def __init__(self) -> None:
        registry = self.registry = new_registry()
        self._requests = Counter(
            "tandem_http_requests", "HTTP requests answered", ["dialect", "status"], registry=registry
        )
        self.open_requests = Gauge("tandem_http_open_requests", "HTTP requests being answered", registry=registry)
        self._count = Counter("tgi_request_count", "Generation requests", registry=registry)
        self._success = Counter("tgi_request_success", "Generation requests that succeeded", registry=registry)
        self._failure = Counter("tgi_request_failure", "Generation requests that failed", ["err"], registry=registry)
        self.num_waiting = self.num_running = 0
        waiting = Gauge("tgi_queue_size", "Choices of this gateway without a first token", registry=registry)
        running = Gauge("tgi_batch_current_size", "Choices of this gateway that stream", registry=registry)
        waiting.set_function(lambda: self.num_waiting)
        running.set_function(lambda: self.num_running)
        seconds, tokens = self._seconds, self._tokens
        self._duration = seconds("tgi_request_duration", "Seconds from request to end")
        self.first_token = seconds("tandem_http_first_token_seconds", "Seconds from request to first token")
        self._validation = seconds("tgi_request_validation_duration", "Seconds of template, tokens and limits")
        self._queue = seconds("tgi_request_queue_duration", "Seconds in the router's queue")
        self._inference = seconds("tgi_request_inference_duration", "Seconds at workers")
        self._per_token = seconds("tgi_request_mean_time_per_token_duration", "Mean seconds between tokens")
        self._input = tokens("tgi_request_input_length", "Tokens of the prompt")
        self.max_new_tokens = tokens("tgi_request_max_new_tokens", "Most tokens a request asked for")
        self._generated = tokens("tgi_request_generated_tokens", "Tokens generated")

    def observe_answer(self, dialect: str, status: int) -> None:
        """Count a request that has been answered or whose client has disconnected. `dialect` is "none" if it
        reached no endpoint, because its host, path or method is unknown.
        """
        self._requests.labels(dialect, str(status)).inc()

    def observe_generation(self, failure: str, duration_s: float) -> None:
        """Count a request that generates, at its end. `failure` is "" for success, or else TGI's error type."""
        self._count.inc()
        self._duration.observe(duration_s)
        if failure:
            self._failure.labels(failure).inc()
        else:
            self._success.inc()

    def observe_choice(self, num_prompt: int, num_generated: int, mean_gap_s: float | None) -> None:
        """Observe a complete choice. `mean_gap_s` is None for choices of one token."""
        self._input.observe(num_prompt)
        self._generated.observe(num_generated)
        if mean_gap_s is not None:
            self._per_token.observe(mean_gap_s)

    def observe_timing(self, timing: Timing) -> None:
        """Observe the phases of a choice, as measured by the router."""
        phases = Phases.of(timing)
        self._validation.observe(phases.validation_ms / 1000)
        self._queue.observe(phases.queue_ms / 1000)
        self._inference.observe(phases.inference_ms / 1000)

    def _seconds(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=_SECONDS, registry=self.registry)

    def _tokens(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=TOKENS, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """The registry's metrics, with TGI's counters renamed to have no `_total` suffix."""
        for metric in self.registry.collect():
            if metric.name not in _PLAIN_COUNTERS:
                yield metric
                continue
            plain = Metric(metric.name, metric.documentation, "unknown")
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    plain.add_sample(metric.name, sample.labels, sample.value)
            yield plain


class Progress:
    """Follows one request, for the metrics and the access log. `failure` is "" or TGI's error type."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure = ""
        self.mesh_request_ids: set[str] = set()
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._first_s: dict[int, float] = {}
        self._num_waiting = 0
        self._num_running = 0

    def duration_s(self) -> float:
        return self._clock() - self._started_s

    def start(self, num_choices: int, max_new_tokens: int | None) -> None:
        """Count choices whose calls of the router begin now."""
        self._shift(waiting=num_choices, running=0)
        if max_new_tokens is not None:
            self._metrics.max_new_tokens.observe(max_new_tokens)

    def close(self) -> None:
        """End the request: none of its choices waits or runs any more."""
        self._shift(waiting=-self._num_waiting, running=-self._num_running)

    def observe(self, event: TokenEvent) -> None:
        """Count one event of the router."""
        now_s = self._clock()
        if event.index not in self._first_s:
            if not self._first_s:
                self._metrics.first_token.observe(now_s - self._started_s)
            self._first_s[event.index] = now_s
            self._shift(waiting=-1, running=1)
            self.mesh_request_ids.add(event.request_id)
        if event.usage is not None:
            num_gaps = event.usage.completion_tokens - 1
            gap_s = (now_s - self._first_s[event.index]) / num_gaps if num_gaps > 0 else None
            self._metrics.observe_choice(event.usage.prompt_tokens, event.usage.completion_tokens, gap_s)
            self._shift(waiting=0, running=-1)
        if event.timing is not None:
            self._metrics.observe_timing(event.timing)

    def _shift(self, *, waiting: int, running: int) -> None:
        self._num_waiting += waiting
        self._num_running += running
        self._metrics.num_waiting += waiting
        self._metrics.num_running += running

    def failed(self, problem: Problem) -> None:
        self.failure = problem.row.tgi.type
