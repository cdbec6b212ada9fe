"""The spans of a worker's traces."""

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span

from mesh.domain.request import SequenceSpec
from mesh.tracing import context_in


def begin_span(service: str, name: str, spec: SequenceSpec) -> Span:
    """Start a span for a worker's part of a request; a no-op span if the request has no trace. Always end it."""
    if not spec.traceparent:
        return INVALID_SPAN
    attributes: dict[str, str | int] = {
        "tandem.request_id": spec.request_id,
        "tandem.attempt": spec.attempt,
        "tandem.tokens": len(spec.token_ids),
    }
    context = context_in({"traceparent": spec.traceparent})
    return trace.get_tracer(f"tandem.{service}").start_span(name, context, attributes=attributes)
