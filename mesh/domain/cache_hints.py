"""CacheHints: how a client wants the KV of its request to be kept after the request has ended."""

from dataclasses import dataclass
from enum import IntEnum

from mesh.domain.errors import InvalidRequest

MAX_TIME_TO_LIVE_S = 30 * 24 * 3600.0
MAX_SESSION_ID_CHARS = 256


class KeepPriority(IntEnum):
    """Cached KV of lower priority goes first when memory is short."""

    LOW = 1
    NORMAL = 2
    HIGH = 3


@dataclass(frozen=True, slots=True)
class CacheHints:
    """`session_id`: requests of one conversation or agent have the same; empty for none. `time_to_live_s` counts from
    the end of the request; None: the KV is worth keeping as long as there is memory.
    """

    session_id: str = ""
    keep_priority: KeepPriority = KeepPriority.NORMAL
    time_to_live_s: float | None = None

    def validate(self) -> None:
        """Raise InvalidRequest for values that no client may send."""
        if len(self.session_id) > MAX_SESSION_ID_CHARS:
            raise InvalidRequest(
                f"session_id must have at most {MAX_SESSION_ID_CHARS} characters, got {len(self.session_id)}"
            )
        if self.time_to_live_s is not None and not 0 < self.time_to_live_s <= MAX_TIME_TO_LIVE_S:
            raise InvalidRequest(
                f"time_to_live must be > 0 and at most {MAX_TIME_TO_LIVE_S:.0f} s, got {self.time_to_live_s:.12g} s"
            )


NO_HINTS = CacheHints()
