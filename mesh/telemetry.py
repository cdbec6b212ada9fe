"""Structured logs, the same for every service."""

import logging
import sys
from typing import TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(service: str, *, level: str = "info", json: bool = True, stream: TextIO = sys.stderr) -> None:
    """Send structlog and the standard library's logging to `stream`, one event a line, each with `service`.

    JSON is for machines; otherwise lines are for people. Call once, in the composition root.
    """
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.types.Processor] = (
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    )
    structlog.contextvars.bind_contextvars(service=service)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=stream, level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
