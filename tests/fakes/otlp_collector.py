"""A collector of traces on loopback: spans as services send them, by trace."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from tests.waiting import LIMIT_S


class Received(NamedTuple):
    """One span: which service it is from, its name, and ids."""

    service: str
    name: str
    span_id: str
    parent_id: str


class Collector(pb_grpc.TraceServiceServicer):
    """`traces` by trace id, in hex."""

    def __init__(self) -> None:
        self.address = ""
        self.traces: dict[str, list[Received]] = defaultdict(list)
        self._grown = asyncio.Event()

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            facts = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                received = Received(facts["service.name"], span.name, span.span_id.hex(), span.parent_span_id.hex())
                self.traces[span.trace_id.hex()].append(received)
        self._grown.set()
        return pb.ExportTraceServiceResponse()

    async def wait_for(self, trace_id: str, names: set[tuple[str, str]]) -> list[Received]:
        """Return a trace once spans with these services and names have arrived."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while self._missing(trace_id, names):
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            missing = sorted(self._missing(trace_id, names))
            raise TimeoutError(f"spans that have not arrived within {LIMIT_S:g} s: {missing}") from None
        return self.traces[trace_id]

    def _missing(self, trace_id: str, names: set[tuple[str, str]]) -> set[tuple[str, str]]:
        return names - {span[:2] for span in self.traces[trace_id]}


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """Listen until the block ends."""
    collector, server = Collector(), grpc.aio.server()
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
