"""What a request claims of the queue."""

from dataclasses import dataclass, field

from router.turns import Lane


@dataclass(frozen=True, slots=True)
class Claim:
    """Where it waits, and until when that makes sense. Times are the event loop's.

    `first_token_by_s` comes from the request's ttft_target, `deadline_s` from the call's deadline.
    """

    lane: Lane = field(default_factory=Lane)
    first_token_by_s: float | None = None
    deadline_s: float | None = None

    @property
    def worthless_after_s(self) -> float:
        """When a first token comes too late."""
        return min(at_s for at_s in (self.first_token_by_s, self.deadline_s, float("inf")) if at_s is not None)
