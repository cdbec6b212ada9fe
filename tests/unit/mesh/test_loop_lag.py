"""The figure of an event loop's stops counts what the process did, not what the machine did."""

import asyncio
import logging
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from mesh.metrics import watching_loop
from mesh.tracing import end_span


def _stops(registry: CollectorRegistry, name: str, above_s: float) -> float:
    """How many stops of more than `above_s` were counted."""
    total = registry.get_sample_value(f"tandem_event_loop_{name}_seconds_bucket", {"le": "+Inf"})
    below = registry.get_sample_value(f"tandem_event_loop_{name}_seconds_bucket", {"le": f"{above_s:g}"})
    assert total is not None
    assert below is not None
    return total - below


async def test_work_counts_and_sleep_does_not() -> None:
    registry = CollectorRegistry()
    async with watching_loop(registry):
        await asyncio.sleep(0.05)
        time.sleep(0.6)  # noqa: ASYNC251  (as if others had the machine)
        await asyncio.sleep(0.05)
        assert _stops(registry, "lag", 0.5) == 1
        assert _stops(registry, "stop", 0.5) == 0
        until_s = time.process_time() + 0.8
        while time.process_time() < until_s:
            pass
        await asyncio.sleep(0.05)
        assert _stops(registry, "lag", 0.5) == 2
        assert _stops(registry, "stop", 0.5) == 1
    assert registry.get_sample_value("tandem_event_loop_stop_seconds_sum") is None, "gone with the loop"


def test_a_span_may_be_ended_twice(caplog: pytest.LogCaptureFixture) -> None:
    span = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("transfer")
    with caplog.at_level(logging.DEBUG):
        end_span(span)
        end_span(span)
    assert caplog.records == []
    assert not span.is_recording()
