"""Shortens the log lines of services for the terminal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.logs import escape_controls

_WARNING_LEVELS = ("warning", "error", "critical")
_HIDDEN = ("level", "event", "timestamp", "service", "exception")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log line without timestamp, service and control characters."""

    text: str
    is_warning: bool


def read_log_line(line: bytes) -> LogEntry:
    """Read one line: JSON as services write it, or text as libraries do ("WARNING name message")."""
    text = line.decode(errors="replace").rstrip()
    try:
        entry = json.loads(text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return LogEntry(escape_controls(text), text.lower().startswith(_WARNING_LEVELS))
    level = str(entry.get("level", "info"))
    return LogEntry(escape_controls(f"{level}: {_describe(entry)}"), level in _WARNING_LEVELS)


def _describe(entry: Mapping[str, Any]) -> str:
    fields = [f"{key}={value}" for key, value in entry.items() if key not in _HIDDEN]
    raised = entry.get("exception")
    if isinstance(raised, list) and raised and isinstance(raised[0], dict):
        fields.append(f"({raised[0].get('exc_type')}: {raised[0].get('exc_value')})")
    return " ".join([str(entry["event"]), *fields])
