"""The spans of a worker's traces."""

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span

from mesh.domain.request import SequenceSpec
from mesh.tracing import context_in


def begin_span(service: str, name: str, request: SequenceSpec) -> Span:
    """Start a span for a worker's part of a request; a no-op span if the request has no trace. Always end it."""
    if not request.traceparent:
        return INVALID_SPAN
    attributes: dict[str, str | int] = {
        "tandem.request_id": request.request_id,
        "tandem.attempt": request.attempt,
        "tandem.tokens": len(request.token_ids),
    }
    context = context_in({"traceparent": request.traceparent})
    return trace.get_tracer(f"tandem.{service}").start_span(name, context, attributes=attributes)
