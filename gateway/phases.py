"""Where a choice's time went, in the three parts that TGI knows."""

from dataclasses import dataclass

from tandem import Timing


@dataclass(frozen=True, slots=True)
class Phases:
    """`validation_ms`: permit, template, tokens. `queue_ms`: for workers with room. `inference_ms`: all the rest, which
    is at workers; replays are in each part.
    """

    validation_ms: float
    queue_ms: float
    inference_ms: float

    @classmethod
    def of(cls, timing: Timing) -> "Phases":
        """As the router has measured them."""
        phases_ms = timing.phases_ms
        validation_ms, queue_ms = phases_ms["prepare"], phases_ms["queue"]
        return cls(validation_ms, queue_ms, timing.total_ms - validation_ms - queue_ms)
