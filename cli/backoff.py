"""When a dead worker is started again. Pure."""

from dataclasses import dataclass, field


@dataclass
class Backoff:
    """How long to wait before a worker's next start: doubling, and from the beginning after a healthy time."""

    first_s: float = 0.5
    max_s: float = 30.0
    healthy_s: float = 60.0
    _next_s: float = field(default=0.5, init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def delay_s(self, lived_s: float) -> float:
        """The wait after a process that lived `lived_s`."""
        if lived_s >= self.healthy_s:
            self._next_s = self.first_s
        delay_s = self._next_s
        self._next_s = min(self.max_s, delay_s * 2)
        return delay_s
