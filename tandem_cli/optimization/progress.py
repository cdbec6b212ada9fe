"""Progress of a search on standard error: a line for each measurement with the time that is left; on a terminal also
what is done now.
"""

import time
from collections.abc import Sequence

from rich.progress import Progress

from tandem_cli.optimization.candidates import Candidate
from tandem_cli.optimization.choice import GAP, SPEED, TTFT, CandidateResult


class TimeLeft:
    """Predicts the rest of a search: a measurement takes some seconds, and some for each request."""

    def __init__(self) -> None:
        self._overhead_s: list[float] = []
        self._request_s: list[float] = []

    def add(self, seconds: float, figures: dict[str, float]) -> None:
        """Learn from the seconds that one measurement took."""
        run_s = figures["num_ok"] / figures["requests_per_s"]
        self._overhead_s.append(seconds - run_s)
        self._request_s.append(run_s / figures["num_ok"])

    def of(self, plan: Sequence[int]) -> float | None:
        """Seconds that measurements with these numbers of requests will take; None before the first."""
        if not self._request_s:
            return None
        count = len(self._request_s)
        return len(plan) * sum(self._overhead_s) / count + sum(plan) * sum(self._request_s) / count


class ShownProgress:
    """Shows the progress of one search."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=1.0)
        self._left = TimeLeft()
        self._begun_s = 0.0
        self._plan: Sequence[int] = ()
        self._round = 0

    def doing(self, text: str, share: float) -> None:
        """Show what is done now, and how far it is, from 0 to 1."""
        self._bar.update(self._task, description=text, completed=share)

    def begins(self, candidate: Candidate, round_number: int, plan: Sequence[int]) -> None:
        self._begun_s, self._plan, self._round = time.monotonic(), plan, round_number

    def ended(self, result: CandidateResult) -> None:
        if result.failure:
            self._say(f"{result.candidate.name}: {result.failure}")
            return
        figures = result.rounds[self._round]
        self._left.add(time.monotonic() - self._begun_s, figures)
        left_s = self._left.of(self._plan[1:])
        time_left = "" if not left_s else f"; about {show_time(left_s)} left"
        self._say(
            f"round {self._round + 1}: {result.candidate.name}: {figures[SPEED]:,.0f} tokens/s, "
            f"TTFT p99 {figures.get(TTFT, 0):,.0f} ms, gap p99 {figures.get(GAP, 0):,.1f} ms{time_left}"
        )

    def left_out(self, round_number: int) -> None:
        self._say(f"round {round_number + 1}: left out: so few candidates all go on to round {round_number + 2}")

    def skipped(self, candidate: Candidate, reason: str) -> None:
        self._say(f"{candidate.name}: not tried: {candidate.precision} {reason}")

    def _say(self, text: str) -> None:
        self._bar.console.print(text, soft_wrap=True)


def show_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
