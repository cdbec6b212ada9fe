"""The frame of every service process: settings, logs, signals, messages to the parent process and secrets from it.

Stdout carries one JSON object per line for the parent (`tell_parent`). Logs go to stderr. A slow or dead reader of
either stream cannot block the service (see `line_writer.py`). The exit status is 0 after SIGTERM, SIGINT or SIGHUP, 2
for a wrong configuration (one line on stderr says what to fix), and 1 for any other error. A signal before the service
listens ends the process at once.
"""

import asyncio
import ctypes
import faulthandler
import gc
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import structlog

from mesh.domain.errors import ConfigurationError, MeshError
from mesh.domain.host import parse_cores
from mesh.interrupts import end_at_ctrl_c, stopping_signals
from mesh.logs import LEVELS, configure_logging, flush_outputs
from mesh.process_limits import lack_of_memory, raise_open_files, watch_open_files
from mesh.settings import load_settings, setting
from mesh.tracing import configure_tracing

T = TypeVar("T")

log = structlog.get_logger(__name__)

_SECRETS_FD = "TANDEM_SECRETS_FD"
PARENT_ENV = "TANDEM_UP_PARENT"
"""Tells `tandem up` the process id of the command that has started it and that it must not outlive."""
_STUCK_TURNS = 20
# Writing the stacks may hang too.
_REPORT_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEEP_BYTES = 256 << 20
_MMAP_BYTES = 32 << 20  # glibc's maximum


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings of every service; a service's own settings class inherits them."""

    log_level: str = setting("info", "lowest log level that is written", env=("LOG_LEVEL",))
    log_json: bool = setting(True, "JSON logs; false: human-readable lines", env=("JSON_OUTPUT",))
    otlp_endpoint: str = setting(
        "",
        "gRPC address of an OTLP collector for traces, such as http://127.0.0.1:4317; default: no traces",
        env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    )
    cpu_list: str = setting("", "CPU cores to run on, such as 0,2-3; default: any")
    follow_stdin: bool = setting(False, "stop when standard input closes, because the parent has ended")
    stuck_exit_s: float = setting(
        60.0,
        "exit with status 1, to be restarted, when the event loop has been stuck for this many seconds; 0: never; a "
        "worker's wedged_exit_s is the same for its engine's thread",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.stuck_exit_s < float("inf"):
            raise ConfigurationError(f"stuck_exit_s must be >= 0, got {self.stuck_exit_s:g}")
        if self.log_level not in LEVELS:
            raise ConfigurationError(f"log_level must be one of {', '.join(LEVELS)}, got {self.log_level!r}")

    def pin_cores(self) -> None:
        """Pin the process to the cores of `cpu_list`. Raises ConfigurationError if they are not available."""
        if not self.cpu_list:
            return
        try:
            os.sched_setaffinity(0, parse_cores(self.cpu_list))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cpu_list {self.cpu_list!r} lists no cores that this process may use") from error


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(ProcessSettings):
    """Address of a service's metrics."""

    metrics_port: int | None = setting(None, "port for Prometheus metrics; 0 takes a free port; default: none")
    metrics_host: str = setting("127.0.0.1", "address of the metrics port, which needs no credential")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ConfigurationError(f"metrics_port must be in [0, 65535], got {self.metrics_port}")


S = TypeVar("S", bound=ProcessSettings)


@dataclass(frozen=True)
class ServiceProgram(Generic[S]):
    """A service that `python -m NAME` runs. `serve(settings)` returns after a clean stop."""

    name: str
    settings: type[S]
    serve: Callable[[S], Coroutine[Any, Any, None]]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run until stopped. Return the exit status."""
        end_at_ctrl_c()
        try:
            secrets = take_secrets(os.environ)
            flags = sys.argv[1:] if argv is None else argv
            resolved = load_settings(self.settings, flags, prog=self.name, environ=os.environ | secrets)
            settings = resolved.values
            configure_logging(self.name, level=settings.log_level, json=settings.log_json)
            log.info("settings", **resolved.describe())
            log.info("limits", open_files=raise_open_files())
            settings.pin_cores()
            self._serve(settings)
        except ConfigurationError as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 2
        except MeshError as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 1
        except Exception as error:
            if (reason := lack_of_memory(error)) is not None:
                sys.stderr.write(f"{self.name}: {reason}\n")
                return 1
            log.critical("unexpected error, exiting", exc_info=error)
            return 1
        return 0

    def _serve(self, settings: S) -> None:
        send_last_spans = configure_tracing(self.name, settings.otlp_endpoint)
        try:
            asyncio.run(self.serve(settings))
        except KeyboardInterrupt:
            pass  # a second Ctrl-C, after the service has stopped
        finally:
            end_at_ctrl_c()
            send_last_spans()


def keep_freed_memory() -> None:
    """Make glibc keep up to 256 MiB of freed buffers instead of returning each to the system.

    KV messages have megabytes each; new pages for every message take a third of the CPU time of a transfer over gRPC.
    Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents end, on Linux. Otherwise that is the system's init,
    which may be slow to reap them; in a container without one it would be this process anyway.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tell_parent(event: str, **fields: Any) -> None:
    """Send an event to the parent process: one JSON line on stdout."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def until_stopped(settings: ProcessSettings, *watches: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Return on SIGTERM, SIGINT or SIGHUP, or when stdin closes if `follow_stdin` is set. Until then a stuck event loop
    ends the process (`ending_if_stuck`), a lack of open files is logged, and `watches` run.

    Objects that exist by now live as long as the service. Later garbage collections do not scan them: those of a worker
    take 160 ms, in which no thread of it runs Python.
    """
    gc.collect()
    gc.freeze()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stopping_signals():
        loop.add_signal_handler(number, stop.set)
    if settings.follow_stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else stop.set())
    tasks = [run_for_life(watch()) for watch in (watch_open_files, *watches)]
    try:
        async with ending_if_stuck(settings.stuck_exit_s):
            await stop.wait()
    finally:
        for task in tasks:
            task.cancel()
    if settings.follow_stdin:
        loop.remove_reader(sys.stdin.fileno())


@contextmanager
def handing_over(secrets: Mapping[str, str]) -> Iterator[tuple[dict[str, str], int]]:
    """Offer `secrets`, by names of environment variables, to a child that is started within the block. They travel
    through a pipe: every process of the same user can read a child's environment in /proc.

    Yields extra environment variables for the child and a file descriptor that the child must inherit. Raises
    ConfigurationError if the secrets are too long.
    """
    reading, writing = os.pipe()
    try:
        _fill(writing, json.dumps(dict(secrets)).encode())
        yield {_SECRETS_FD: str(reading)}, reading
    finally:
        os.close(reading)


def take_secrets(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Return the secrets from the parent process. A second call returns nothing."""
    fd = environ.pop(_SECRETS_FD, None)
    if fd is None:
        return {}
    with open(int(fd), "rb") as pipe:
        secrets: dict[str, str] = json.load(pipe)
    return secrets


def _fill(pipe: int, data: bytes) -> None:
    """Write `data` and close the pipe. No process reads yet, so the pipe's buffer must hold all of it."""
    os.set_blocking(pipe, False)
    try:
        if os.write(pipe, data) < len(data):
            raise BlockingIOError
    except BlockingIOError:
        raise ConfigurationError("secret settings, handler properties included, have 64 KiB at most") from None
    finally:
        os.close(pipe)


def run_for_life(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run the coroutine as a task that the service cannot do without. If it fails, log the error and end the process
    with status 1, to be restarted: the service would go on with a stale view of the mesh, or with limits that nobody
    checks.
    """
    task = asyncio.create_task(coroutine)
    task.add_done_callback(_end_if_failed)
    return task


def _end_if_failed(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a background task has failed, exiting", exc_info=error)
        flush_outputs()
        os._exit(1)


def _end_process() -> NoReturn:
    report = threading.Thread(target=faulthandler.dump_traceback, daemon=True)
    report.start()
    report.join(_REPORT_S)
    os._exit(1)


@asynccontextmanager
async def ending_if_stuck(after_s: float, end_process: Callable[[], object] = _end_process) -> AsyncIterator[None]:
    """Call `end_process` if the loop does not run for `after_s` seconds while the block runs; 0 disables the watch. By
    default, write the stacks of all threads to stderr and end the process with status 1.

    Docker, service managers and `tandem up` restart a process when it ends, not when its health check fails. So a
    service must detect by itself that it hangs: a thread counts how often it wakes up without the loop having run in
    between. It counts wake-ups rather than time, so a process that was paused and resumed does not look stuck. Code
    that never releases the interpreter lock also blocks this thread and is not detected.
    """
    if not after_s:
        yield
        return
    loop = asyncio.get_running_loop()
    has_run, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        num_missed = 0
        while not is_over.wait(after_s / _STUCK_TURNS):
            if has_run.is_set():
                has_run.clear()
                num_missed = 0
                loop.call_soon_threadsafe(has_run.set)
            else:
                num_missed += 1
            if num_missed >= _STUCK_TURNS:
                end_process()
                return

    has_run.set()
    thread = threading.Thread(target=watch, name="loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
