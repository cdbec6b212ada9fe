"""The frame of every service process: settings, logs, signals and messages to the parent process.

Stdout carries one JSON object per line for the parent (`announce`). Logs go to stderr. A slow or dead reader of either
stream cannot block the service (see `line_writer.py`). The exit status is 0 after SIGTERM or SIGINT, 2 for a wrong
configuration (one line on stderr says what to fix), and 1 for any other error.
"""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from mesh.domain.cores import parse_cores
from mesh.domain.errors import ConfigurationError, MeshError
from mesh.handover import take_secrets
from mesh.loop_watch import ending_if_stuck
from mesh.settings import load_settings, setting
from mesh.telemetry import LEVELS, configure_logging
from mesh.tracing import configure_tracing

T = TypeVar("T")

log = structlog.get_logger(__name__)

_MAX_OPEN_FILES = 1 << 20


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
        60.0, "exit with status 1, to be restarted, when the event loop has been stuck for so many seconds; 0: never"
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


S = TypeVar("S", bound=ProcessSettings)


@dataclass(frozen=True)
class ServiceProgram(Generic[S]):
    """A service that `python -m NAME` runs. `serve(settings)` returns after a clean stop."""

    name: str
    settings: type[S]
    serve: Callable[[S], Coroutine[Any, Any, None]]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run until stopped. Return the exit status."""
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
            log.critical("unexpected error, exiting", exc_info=error)
            return 1
        return 0

    def _serve(self, settings: S) -> None:
        send_last_spans = configure_tracing(self.name, settings.otlp_endpoint)
        try:
            asyncio.run(self.serve(settings))
        finally:
            send_last_spans()


def raise_open_files() -> int:
    """Raise the limit on open files as far as the system allows, and return it. Every connection takes one file, and
    the usual soft limit of 1,024 is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def announce(event: str, **fields: Any) -> None:
    """Send an event to the parent process: one JSON line on stdout."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def until_stopped(settings: ProcessSettings) -> None:
    """Return on SIGTERM or SIGINT, or when stdin closes if `follow_stdin` is set. Until then a stuck event loop ends
    the process (mesh/loop_watch.py).
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.follow_stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else stop.set())
    async with ending_if_stuck(settings.stuck_exit_s):
        await stop.wait()
    if settings.follow_stdin:
        loop.remove_reader(sys.stdin.fileno())
