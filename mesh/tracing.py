"""OpenTelemetry traces: one per request, from the HTTP client to the workers, if `otlp_endpoint` is set.

The code uses OpenTelemetry's API, which does nothing until `configure_tracing` installs an SDK. SDK and exporter are
the extra `otel`. The SDK reads its OTEL_* variables: sampling, headers, limits, attributes. Processes pass on the W3C
traceparent: in HTTP and gRPC headers, and to workers in the sequence's message.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mesh.domain.errors import missing_extra

if TYPE_CHECKING:
    from mesh.domain.request import SequenceSpec

HEADERS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()
_PREFIX = "tandem-"


def configure_tracing(service: str, endpoint: str) -> Callable[[], None]:
    """Export this process's spans to `endpoint`, the gRPC address of an OTLP collector; "" disables tracing.

    Returns a function that exports the remaining spans; call it at exit. Raises ConfigurationError if the extra `otel`
    is not installed.
    """
    if not endpoint:
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise missing_extra("otlp_endpoint needs opentelemetry", "otel") from error
    resource = Resource.create({"service.name": _PREFIX + service.replace("_", "-")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def context_in(headers: Mapping[str, str]) -> Context:
    """Extract the caller's trace context from `headers`; malformed headers give an empty context."""
    return _PROPAGATOR.extract(headers, Context())


def begin_worker_span(service: str, name: str, spec: "SequenceSpec") -> Span:
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


def traceparent_of(span: Span) -> str:
    """Return the traceparent header for `span`, "" without a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def trace_id_of(span: Span) -> str | None:
    """Return the trace id for logs, None without a trace."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def end_span(span: Span) -> None:
    """End `span` unless it has ended already, which the SDK would warn about."""
    if span.is_recording():
        span.end()


def mark_failed(span: Span, error: str) -> None:
    """Set the status of `span` to this error."""
    span.set_status(Status(StatusCode.ERROR, error))
