"""Stops of an event loop. A service that hangs ends, to be started again; one that is busy, or was stopped for a
while, does not. Figures count stops by the process, not those by the machine.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from mesh.metrics import watching_loop
from mesh.process import ending_if_stuck
from mesh.tracing import end_span

SERVICE = """
import asyncio, sys, threading
from mesh.process import ProcessSettings, until_stopped

async def serve():
    loop = asyncio.get_running_loop()
    if sys.argv[1] == "hangs":
        lock = threading.Lock(); lock.acquire(); loop.call_later(0.1, lock.acquire)
    loop.call_soon(lambda: print("serving", flush=True))
    await until_stopped(ProcessSettings(stuck_exit_s=float(sys.argv[2])))

asyncio.run(serve())
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], how: str, after_s: float) -> subprocess.Popen[str]:
    command = (sys.executable, "-c", SERVICE, how, str(after_s))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    return process


def test_a_service_that_hangs_ends_and_says_where(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "hangs", 1.0)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in _run" in said, "the event loop's stack"


def test_a_service_that_was_stopped_goes_on(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "serves", 1.0)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)  # longer than it takes to be found stuck
    os.kill(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


async def test_a_busy_loop_is_not_stuck() -> None:
    stuck = threading.Event()
    async with ending_if_stuck(1.0, stuck.set):
        for _ in range(20):
            threading.Event().wait(0.1)  # the loop does not run meanwhile
            await asyncio.sleep(0)
    assert not stuck.is_set()
    async with ending_if_stuck(0.2, stuck.set):
        assert stuck.wait(60)
    stuck.clear()
    async with ending_if_stuck(0, stuck.set):
        assert not stuck.wait(0.5)


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
        assert _stops(registry, "stop", 0.5) == 0, "somebody reads: the next beats come every 20 ms"
        await asyncio.sleep(0.3)
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
