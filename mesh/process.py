"""What every service process does around its work: settings, logs, signals, and telling its parent how it goes.

Stdout is for machines: one JSON object a line (`announce`). Logs go to stderr. Exit status 0 after SIGTERM or SIGINT
once it serves, 2 for a wrong configuration (one line on stderr says what to do), 1 for anything else.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from mesh.cores import parse_cores
from mesh.domain.errors import ConfigurationError, MeshError
from mesh.settings import load_settings, setting
from mesh.telemetry import LEVELS, configure_logging
from mesh.tracing import configure_tracing

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings every service has; services' own settings inherit these."""

    log_level: str = setting("info", "least severe log level", env=("LOG_LEVEL",))
    log_json: bool = setting(True, "JSON logs; false for people", env=("JSON_OUTPUT",))
    otlp_endpoint: str = setting(
        "",
        "gRPC address of an OTLP collector for traces, such as http://127.0.0.1:4317; default: no traces",
        env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    )
    cpu_list: str = setting("", "cores to stay on, such as 0,2-3; default: wherever the system likes")
    follow_stdin: bool = setting(False, "stop when standard input closes: the parent is gone")

    def __post_init__(self) -> None:
        if self.log_level not in LEVELS:
            raise ConfigurationError(f"log_level must be one of {', '.join(LEVELS)}, got {self.log_level!r}")

    def pin_cores(self) -> None:
        """Stay on the cores of `cpu_list`. Raises ConfigurationError if they cannot be had."""
        if not self.cpu_list:
            return
        try:
            os.sched_setaffinity(0, parse_cores(self.cpu_list))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cpu_list {self.cpu_list!r} names no cores this process may use") from error


S = TypeVar("S", bound=ProcessSettings)


@dataclass(frozen=True)
class ServiceProgram(Generic[S]):
    """A service as `python -m NAME` runs it. `serve(settings)` returns after a clean stop."""

    name: str
    settings: type[S]
    serve: Callable[[S], Coroutine[Any, Any, None]]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run until stopped; returns the exit status."""
        try:
            resolved = load_settings(self.settings, sys.argv[1:] if argv is None else argv, prog=self.name)
            settings = resolved.values
            configure_logging(self.name, level=settings.log_level, json=settings.log_json)
            structlog.get_logger(__name__).info("settings", **resolved.describe())
            settings.pin_cores()
            self._serve(settings)
        except ConfigurationError as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 2
        except MeshError as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 1
        return 0

    def _serve(self, settings: S) -> None:
        send_last_spans = configure_tracing(self.name, settings.otlp_endpoint)
        try:
            asyncio.run(self.serve(settings))
        finally:
            send_last_spans()


def announce(event: str, **fields: Any) -> None:
    """Tell the parent process, on stdout."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def until_stopped(settings: ProcessSettings) -> None:
    """Return when SIGTERM or SIGINT comes, or when stdin closes if `follow_stdin` is set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.follow_stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else stop.set())
    await stop.wait()
    if settings.follow_stdin:
        loop.remove_reader(sys.stdin.fileno())
