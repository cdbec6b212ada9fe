"""Delays before a dead service is restarted. Pure."""

from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Restart delays of one service: each is twice the one before, and a healthy run of `healthy_s` resets them."""

    first_s: float = 0.5
    max_s: float = 30.0
    healthy_s: float = 60.0
    _next_s: float = field(default=0.5, init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def delay_s(self, lived_s: float) -> float:
        """Seconds to wait before the next start, after a process that ran for `lived_s`."""
        if lived_s >= self.healthy_s:
            self._next_s = self.first_s
        delay_s = self._next_s
        self._next_s = min(self.max_s, delay_s * 2)
        return delay_s
