"""What becomes of one request: for the access log and the metrics."""

import time
from collections.abc import Callable

from gateway.errors import Problem
from gateway.metrics import Metrics
from tandem import TokenEvent


class Progress:
    """Sees every event of a request. `failure` is "" or TGI's word for what went wrong."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure = ""
        self.mesh_request_ids: set[str] = set()
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._first_s: dict[int, float] = {}

    def duration_s(self) -> float:
        """Seconds since the request came in."""
        return self._clock() - self._started_s

    def saw(self, event: TokenEvent) -> None:
        """One event has come from the router."""
        now_s = self._clock()
        if event.index not in self._first_s:
            if not self._first_s:
                self._metrics.first_token(now_s - self._started_s)
            self._first_s[event.index] = now_s
            self.mesh_request_ids.add(event.request_id)
        if event.usage is not None:
            num_gaps = event.usage.completion_tokens - 1
            gap_s = (now_s - self._first_s[event.index]) / num_gaps if num_gaps > 0 else None
            self._metrics.choice_ended(event.usage.prompt_tokens, event.usage.completion_tokens, gap_s)

    def failed(self, problem: Problem) -> None:
        """The request ends with an error."""
        self.failure = problem.row.tgi.error_type
