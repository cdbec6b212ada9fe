"""A choice's span with its phases as child spans, all created from the journal's trace when the choice has ended."""

import time
from collections.abc import Mapping
from dataclasses import asdict

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from mesh.tracing import context_in, mark_failed, trace_id_of, traceparent_of
from router.observe.journal import CANCELLED, Trace
from router.observe.timeline import AttemptTiming, AttemptWorkers

_NS = 1_000_000_000


class ChoiceSpan:
    """The span of one choice; its request arrived `age_s` ago. `traceparent` is the parent of workers' spans."""

    def __init__(self, caller: Mapping[str, str], request_id: str, *, age_s: float) -> None:
        self._start_ns = time.time_ns() - round(age_s * _NS)
        self._tracer = trace.get_tracer("tandem.router")
        self._span = self._tracer.start_span(
            "generate",
            context_in(caller),
            SpanKind.SERVER,
            {"tandem.request_id": request_id},
            start_time=self._start_ns,
        )
        self.traceparent = traceparent_of(self._span)
        self.trace_id = trace_id_of(self._span)

    def end(self, ended: Trace) -> None:
        """End the span with the choice's trace."""
        if self._span.is_recording():
            self._describe(ended)
        self._span.end(self._start_ns + round(ended.events_s["finished"] * _NS))

    def _describe(self, ended: Trace) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.output_tokens": ended.completion_tokens,
                "tandem.cached_tokens": ended.cached_tokens,
                "tandem.finish_reason": ended.finish_reason.value if ended.finish_reason else "",
                "tandem.attempts": len(ended.attempt_workers),
            }
        )
        if ended.error and ended.error != CANCELLED:
            mark_failed(self._span, ended.error)
        if ended.timing is None:
            return
        self._add("prepare", 0.0, ended.timing.prepare_s, {})
        at_s = ended.timing.prepare_s
        for attempt, (timing, workers) in enumerate(zip(ended.timing.attempts, ended.attempt_workers, strict=True)):
            self._add_attempt(at_s, timing, {**_attributes(workers), "tandem.attempt": attempt})
            at_s += timing.total_s

    def _add_attempt(self, at_s: float, timing: AttemptTiming, attributes: Mapping[str, str | int]) -> None:
        """Add spans of non-empty phases. The transfer's span includes the part hidden behind computing the prompt."""
        for name, phase_s in asdict(timing.phases).items():
            phase, end_s = name.removesuffix("_s"), at_s + phase_s
            if phase == "transfer" and timing.kv_transfer_s is not None:
                self._add(phase, end_s - timing.kv_transfer_s, end_s, attributes)
            elif phase_s > 0:
                self._add(phase, at_s, end_s, attributes)
            at_s = end_s

    def _add(self, name: str, begin_s: float, end_s: float, attributes: Mapping[str, str | int]) -> None:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._start_ns + round(begin_s * _NS),
        )
        span.end(self._start_ns + round(end_s * _NS))


def _attributes(workers: AttemptWorkers) -> dict[str, str]:
    values = {"prefill_worker": workers.prefill, "decode_worker": workers.decode, "failure": workers.failure}
    return {f"tandem.{key}": value for key, value in values.items() if value}
