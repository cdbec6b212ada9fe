"""Writing where nothing can be written."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mesh.line_writer import LineWriter, make_private, steady_output, text_stream
from tests.defects import Repaired

LIMIT_S = 30.0


def notice(num_dropped: int, reason: str) -> bytes:
    return f"dropped {num_dropped}: {reason}\n".encode()


def read_until(fd: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        piece = os.read(fd, 1 << 16)
        assert piece, found[-200:]
        found += piece
    return found


def replace(fd: int, by: int) -> None:
    """As if what `fd` stands for had become another thing."""
    os.dup2(by, fd)
    os.close(by)


def test_a_full_disk_costs_lines_and_they_are_counted() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(fd, notice=notice)
    for _ in range(1000):
        writer.put(b"line\n")
    assert writer.flush(LIMIT_S)
    assert writer.num_dropped == 1000
    reading, writing = os.pipe()
    replace(fd, writing)
    writer.put(b"again\n")
    assert read_until(reading, b"again\n") == b"dropped 1000: No space left on device\nagain\n"
    writer.put(b"on\n")
    assert read_until(reading, b"on\n") == b"on\n", "it is told once"
    replace(fd, os.open("/dev/null", os.O_WRONLY))
    os.close(reading)


def test_a_pipe_nobody_reads_costs_what_does_not_fit() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing, notice=notice, max_queued_bytes=100_000)
    began_s = time.monotonic()
    for number in range(20_000):
        writer.put(b"%020d\n" % number)
    assert time.monotonic() - began_s < LIMIT_S
    assert not writer.flush(0.1)
    dropped = writer.num_dropped
    assert 10_000 < dropped < 20_000
    reader = threading.Thread(target=lambda: found.append(read_until(reading, b"the end\n")))
    found: list[bytes] = []
    reader.start()
    assert writer.flush(LIMIT_S)
    writer.put(b"the end\n")
    reader.join(LIMIT_S)
    lines = found[0].splitlines()
    notices = [line for line in lines if line.startswith(b"dropped")]
    assert sum(int(line.split()[1].rstrip(b":")) for line in notices) == dropped
    assert len(lines) == 20_000 - dropped + len(notices) + 1, "and no line is torn"


def test_a_pipe_without_blocking_is_waited_for() -> None:
    """As it is where another process has set its end so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = LineWriter(writing)
    lines = [b"%0199d\n" % number for number in range(2000)]
    for line in lines:
        writer.put(line)
    assert read_until(reading, lines[-1]) == b"".join(lines)
    assert writer.num_dropped == 0


def test_a_closed_pipe_and_a_torn_line() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    writer = LineWriter(writing, notice=notice)
    writer.put(b"y" * 65535 + b"\n")
    assert os.read(reading, 4096), "the line is being written"
    os.close(reading)
    assert writer.flush(LIMIT_S)
    assert writer.num_dropped == 1
    reading, other = os.pipe()
    replace(writing, other)
    writer.put(b"z\n")
    assert read_until(reading, b"z\n").startswith(b"\ndropped 1: Broken pipe\n")


def test_idle_time_is_for_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.line_writer._IDLE_S", 0.05)
    fd = os.open("/dev/full", os.O_WRONLY)
    idle = threading.Event()
    writer = LineWriter(fd, notice=notice, on_idle=idle.set)
    writer.put(b"line\n")
    assert writer.flush(LIMIT_S)
    reading, writing = os.pipe()
    replace(fd, writing)
    assert read_until(reading, b"\n") == b"dropped 1: No space left on device\n"
    assert idle.wait(LIMIT_S)


def test_a_closed_writer_leaves_its_descriptor_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A descriptor that is closed names something else soon: a socket, say."""
    monkeypatch.setattr("mesh.line_writer._IDLE_S", 0.01)
    idle = threading.Event()
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    writer = LineWriter(fd, notice=notice, on_idle=idle.set)
    writer.put(b"before\n")
    assert idle.wait(LIMIT_S)
    writer.put(b"last\n")
    writer.close(LIMIT_S)
    replace(fd, os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT))
    idle.clear()
    writer.put(b"after\n")
    assert writer.flush(LIMIT_S)
    writer.close(LIMIT_S)
    assert not idle.wait(0.1)
    assert writer.num_dropped == 1
    assert (tmp_path / "log").read_bytes() == b"before\nlast\n"
    assert (tmp_path / "other").read_bytes() == b""
    os.close(fd)


def test_closing_says_that_a_write_still_blocks() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    writer.put(b"x" * (1 << 20) + b"\n")
    assert os.read(reading, 1), "the line is being written"
    with pytest.raises(TimeoutError, match="has blocked for 0 s"):
        writer.close(0.0)
    os.close(reading)
    writer.close(LIMIT_S)
    os.close(writing)


def test_a_forked_child_writes(tmp_path: Path) -> None:
    program = """
import os
from mesh.line_writer import LineWriter
writer = LineWriter(1)
writer.put(b"parent\\n")
writer.flush()
writer._lock.acquire()
if os.fork() == 0:
    writer.put(b"child\\n")
    os._exit(0 if writer.flush(20) else 1)
assert os.wait()[1] == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"parent\nchild\n", b"")


def test_a_stream_in_front() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    stream = text_stream(writer)
    print("a", "b\u00e9", "\udcff", file=stream)
    print("c", end="", file=stream, flush=True)
    assert read_until(reading, b"c") == "a bé \\udcff\nc".encode()
    assert stream.fileno() == writing
    assert not stream.isatty()


def test_standard_streams_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with capfd.disabled(), contextlib.suppress(KeyError), steady_output():
        assert (sys.stdout, sys.stderr) != before
        raise KeyError
    assert (sys.stdout, sys.stderr) == before


def test_libraries_in_c_lose_what_does_not_fit() -> None:
    reading, writing = os.pipe()
    other = os.dup(writing)
    make_private(writing)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    assert os.get_blocking(other), "the pipe of others is as it was"
    make_private(os.open(os.devnull, os.O_WRONLY))
    os.close(reading)
    make_private(writing)


SERVICE = """
import asyncio, logging, os, sys
import structlog
from mesh.process import ProcessSettings, ServiceProgram, tell_parent

async def serve(settings):
    for number in range(40_000):
        structlog.get_logger().info("finished", number=number, text="x" * 100)
        tell_parent("progress", number=number, text="x" * 100)
        if number % 100 == 0:
            logging.getLogger("lib").warning("number %d", number)
            print("x" * 100, file=sys.stderr)
            with_c(b"E0000 a library in C\\n" * 10)
    open(sys.argv[1], "w").close()

def with_c(text):
    try:
        os.write(2, text)
    except OSError:
        pass

sys.exit(ServiceProgram("test", ProcessSettings, serve).main([]))
"""


@pytest.mark.parametrize("trouble", ["full", "closed", "unread"])
def test_a_service_does_its_work_whatever_becomes_of_its_output(
    trouble: str, tmp_path: Path, repaired: Repaired
) -> None:
    out = os.open("/dev/full", os.O_WRONLY) if trouble == "full" else subprocess.PIPE
    done = tmp_path / "done"
    began_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", SERVICE, str(done)], stdout=out, stderr=out)
    try:
        for pipe in (process.stdout, process.stderr):
            if trouble == "closed" and pipe is not None:
                pipe.close()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    assert done.exists()
    repaired("D1", f"a service with 80,000 lines, its outputs {trouble}: done in {time.monotonic() - began_s:.0f} s")


def test_lost_lines_are_counted_for_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    from mesh import logs as logs_module
    from mesh.metrics import new_registry

    registry: CollectorRegistry = new_registry()
    assert b"process_log_lines_dropped_total 0.0" in generate_latest(registry)
    logs = logs_module.Logs("test", fd=os.open("/dev/full", os.O_WRONLY))
    monkeypatch.setattr(logs_module._Running, "logs", logs)
    monkeypatch.setattr(logs_module._Running, "writers", (logs.writer,))
    logs.write("a line")
    logs_module.flush_outputs()
    assert b"process_log_lines_dropped_total 1.0" in generate_latest(registry)
    assert re.search(rb"process_log_lines_suppressed_total 0\.0", generate_latest(registry))
