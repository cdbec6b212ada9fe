"""Conversion between CacheHints and their message; see mesh/wire.py for the rules."""

from mesh.domain.cache_hints import NO_HINTS, CacheHints, KeepPriority
from mesh.durations import duration_from_proto, duration_to_proto
from tandem.v1 import cache_pb2

_KEEP: dict[KeepPriority, cache_pb2.KeepPriority] = {
    priority: getattr(cache_pb2, f"KEEP_PRIORITY_{priority.name}") for priority in KeepPriority
}
_KEEP_BACK = {value: priority for priority, value in _KEEP.items()}


def hints_to_proto(hints: CacheHints) -> cache_pb2.CacheHints | None:
    """None if nothing is hinted, which is what most requests say."""
    if hints == NO_HINTS:
        return None
    message = cache_pb2.CacheHints(session_id=hints.session_id, keep_priority=_KEEP[hints.keep_priority])
    if hints.time_to_live_s is not None:
        message.time_to_live.CopyFrom(duration_to_proto(hints.time_to_live_s))
    return message


def hints_from_proto(message: cache_pb2.CacheHints) -> CacheHints:
    """Raises InvalidRequest for values out of range. A priority of a newer version is read as the normal one."""
    hints = CacheHints(
        session_id=message.session_id,
        keep_priority=_KEEP_BACK.get(message.keep_priority, KeepPriority.NORMAL),
        time_to_live_s=duration_from_proto(message.time_to_live) if message.HasField("time_to_live") else None,
    )
    hints.validate()
    return hints
