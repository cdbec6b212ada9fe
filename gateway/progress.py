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
        self._num_waiting = 0
        self._num_running = 0

    def duration_s(self) -> float:
        """Seconds since the request came in."""
        return self._clock() - self._started_s

    def asked(self, num_choices: int, max_new_tokens: int | None) -> None:
        """So many choices are asked of the router."""
        self._num_waiting += num_choices
        self._metrics.asked(num_choices, max_new_tokens)

    def ended(self) -> None:
        """The request is over: nothing of it waits or runs any more."""
        self._metrics.waiting.dec(self._num_waiting)
        self._metrics.running.dec(self._num_running)
        self._num_waiting = self._num_running = 0

    def saw(self, event: TokenEvent) -> None:
        """One event has come from the router."""
        now_s = self._clock()
        if event.index not in self._first_s:
            if not self._first_s:
                self._metrics.first_token(now_s - self._started_s)
            self._first_s[event.index] = now_s
            self._shift(waiting=-1, running=1)
            self.mesh_request_ids.add(event.request_id)
        if event.usage is not None:
            num_gaps = event.usage.completion_tokens - 1
            gap_s = (now_s - self._first_s[event.index]) / num_gaps if num_gaps > 0 else None
            self._metrics.choice_ended(event.usage.prompt_tokens, event.usage.completion_tokens, gap_s)
            self._shift(waiting=0, running=-1)
        if event.timing is not None:
            self._metrics.timed(event.timing)

    def _shift(self, *, waiting: int, running: int) -> None:
        self._num_waiting += waiting
        self._num_running += running
        self._metrics.waiting.inc(waiting)
        self._metrics.running.inc(running)

    def failed(self, problem: Problem) -> None:
        """The request ends with an error."""
        self.failure = problem.row.tgi.error_type
