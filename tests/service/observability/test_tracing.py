"""One trace for each request, through every service, whatever happens to it."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tandem
from mesh.domain.errors import ConfigurationError
from mesh.domain.tokens import SequenceFailure
from mesh.tracing import configure_tracing
from tests.evidence import Evidence
from tests.fakes.requests import make_request as make_sequence
from tests.fakes.router_workers import DecodeScript
from tests.service.fake_router import fake_router
from tests.service.gateway.http import gateway_at
from tests.service.worker_rig import EngineRig, worker_rig

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER}-01"
PHASES = {"queue", "prefill", "transfer", "decode"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """All spans of this process that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def parent_of(span: ReadableSpan) -> str:
    return trace.format_span_id(span.parent.span_id) if span.parent else ""


def id_of(span: ReadableSpan) -> str:
    return trace.format_span_id(span.context.span_id)


def begin_and_end(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


async def test_from_the_http_client_to_the_workers(make_mesh: Any, spans: Any, evidence: Evidence) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.pace_s = 0.02  # so that the answer cannot be complete before the transfer is heard to be
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        with structlog.testing.capture_logs() as logs:
            body = {"prompt": "hello world", "max_tokens": 3}
            answer = await http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
        assert answer.status_code == 200
        await mesh.until(lambda: len([line for line in logs if line["event"] in ("finished", "answered")]) == 2)
    found = {span.name: span for span in spans.get_finished_spans()}
    request, generate = found.pop("POST /v1/completions"), found.pop("generate")
    assert parent_of(request) == CALLER
    assert parent_of(generate) == id_of(request)
    assert {parent_of(span) for span in found.values()} == {id_of(generate)}
    assert {trace.format_trace_id(span.context.trace_id) for span in spans.get_finished_spans()} == {TRACE_ID}
    begun, ended = begin_and_end(generate)
    assert all(begun <= begin_and_end(span)[0] <= begin_and_end(span)[1] <= ended for span in found.values())
    told = decode.started.items[0].sequence.traceparent
    assert told == f"00-{TRACE_ID}-{id_of(generate)}-01", "workers' spans go below the choice's"
    assert {line["trace_id"] for line in logs if line["event"] in ("finished", "answered")} == {TRACE_ID}
    evidence("R25", "phases in a trace", " ".join(sorted(PHASES & found.keys())), target="4", ok=found.keys() >= PHASES)


async def test_a_replay_and_an_sdk_client(make_mesh: Any, spans: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(fail_after=(2, SequenceFailure.PREEMPTED))]
    async with tandem.AsyncClient(mesh.router.public.address) as client:
        with trace.get_tracer("a program of somebody's").start_as_current_span("ask") as asking:
            await client.generate(token_ids=[70] * 8, max_new_tokens=6)
    (generate,) = [span for span in spans.get_finished_spans() if span.name == "generate"]
    assert generate.parent.span_id == asking.get_span_context().span_id
    queued = [span for span in spans.get_finished_spans() if span.name == "queue"]
    assert sorted(span.attributes["tandem.attempt"] for span in queued) == [0, 1]
    assert {span.attributes.get("tandem.failure", "") for span in queued} == {"SequencePreempted", ""}
    assert generate.attributes["tandem.attempts"] == 2


async def test_workers_add_their_part(spans: Any) -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        await router.run(make_sequence("untraced", range(1, 9), max_new_tokens=3))
        assert spans.get_finished_spans() == ()
        await router.run(make_sequence("a", range(1, 13), max_new_tokens=3, traceparent=TRACEPARENT))
        await rig.wait_whole()
    found = spans.get_finished_spans()
    scopes = sorted((span.instrumentation_scope.name, span.name) for span in found)
    assert scopes == [
        ("tandem.decode_worker", "decode"),
        ("tandem.decode_worker", "transfer"),
        ("tandem.prefill_worker", "prefill"),
        ("tandem.prefill_worker", "transfer"),
    ]
    assert {parent_of(span) for span in found} == {CALLER}
    assert {span.attributes["tandem.request_id"] for span in found} == {"a"}


async def test_a_failed_sequence_is_marked_and_logged_with_its_request(spans: Any) -> None:
    async with worker_rig(decode=EngineRig.make(num_blocks=8)) as rig, fake_router(rig) as router:
        with structlog.testing.capture_logs() as logs:
            await router.start(make_sequence("big", range(1, 60), traceparent=TRACEPARENT), "t")
            assert (await router.box("big").get()).HasField("failed")
    (decode,) = spans.get_finished_spans()
    assert decode.status.description == "too_large"
    (line,) = [line for line in logs if line["event"] == "sequence failed"]
    assert (line["request_id"], line["reason"]) == ("big", "too_large")


def test_off_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    before = trace.get_tracer_provider()
    configure_tracing("router", "")()
    assert trace.get_tracer_provider() is before
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigurationError, match=r"tandem-serve\[otel\]"):
        configure_tracing("router", "http://127.0.0.1:4317")
