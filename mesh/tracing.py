"""Traces: one for each request, from the HTTP client to its workers, if `otlp_endpoint` is set.

The code speaks OpenTelemetry's API, which does nothing until `configure_tracing` gives it an SDK; that, and the
exporter, are the extra `otel`. The SDK reads its own OTEL_* variables: sampling, headers, limits, attributes.
Between processes goes W3C's traceparent: in headers of HTTP and gRPC, and to workers in the sequence's message.
"""

from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mesh.domain.errors import ConfigurationError
from mesh.domain.request import Request

HEADERS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()
_PREFIX = "tandem-"


def configure_tracing(service: str, endpoint: str) -> Callable[[], None]:
    """Send this process's spans to `endpoint`, an OTLP collector's gRPC address; "" for none.

    Returns what sends the last ones, at the end. Raises ConfigurationError if the packages are not there.
    """
    if not endpoint:
        return _nothing
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError("otlp_endpoint needs the extra: pip install 'tandem-serve[otel]'") from error
    resource = Resource.create({"service.name": _PREFIX + service.replace("_", "-")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def context_in(headers: Mapping[str, str]) -> Context:
    """What a caller says it is doing; what makes no sense is no context."""
    return _PROPAGATOR.extract(headers, Context())


def traceparent_of(span: Span) -> str:
    """How another process is told of `span`; "" if there is none to tell of."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def trace_id_of(span: Span) -> str | None:
    """For logs; None if there is no trace."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def begin_span(service: str, name: str, request: Request) -> Span:
    """A span of a worker's part in a request; nothing if the request has no trace. End it whatever happens."""
    if not request.traceparent:
        return INVALID_SPAN
    facts: dict[str, str | int] = {
        "tandem.request_id": request.request_id,
        "tandem.attempt": request.attempt,
        "tandem.tokens": len(request.token_ids),
    }
    context = context_in({"traceparent": request.traceparent})
    return trace.get_tracer(f"tandem.{service}").start_span(name, context, attributes=facts)


def mark_failed(span: Span, error: str) -> None:
    """It ended with this error."""
    span.set_status(Status(StatusCode.ERROR, error))


def _nothing() -> None:
    """There is nothing to send."""
