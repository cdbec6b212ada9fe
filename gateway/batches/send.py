"""Sends the requests of a batch to an HTTP gateway, several at a time, and again while it has no capacity."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import httpx2

from gateway.batches.files import BatchRefused, BatchRequest
from mesh.domain.json_text import parse_json
from mesh.tasks import together

# Answers that say "later": overloaded (Anthropic's 529, too), no workers, no answer in time, a stop.
_LATER = (408, 429, 502, 503, 504, 529)
# No answer in time: the queue or the answer is long. After the last try the error stays: more may compute in vain.
_OUT_OF_TIME = 504
_MAX_OUT_OF_TIME = 3
_BAD_KEY = (401, 403)
# Error codes and types of a 404 that is about the request's model, and not about its route.
_NO_MODEL = ("model_not_found", "not_found_error")
_JSON = {"content-type": "application/json"}
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0


@dataclass
class Tally:
    """`num_refused` counts answers that are errors and are in the output; `num_left` requests without an answer."""

    num_answered: int = 0
    num_refused: int = 0
    num_left: int = 0
    last_problem: str = ""


class Answers(Protocol):
    """Takes what was answered, errors too."""

    def write(self, custom_id: str, status: int, request_id: str, body: object) -> object: ...


class KeyRefused(BatchRefused):
    """The gateway takes no requests with this key."""


class NoGateway(BatchRefused):
    """The server at the URL does not serve the requests' routes."""


class Sender:
    """Sends to the gateway behind `http`. A request is retried for at most `patience_s`.

    Each request in flight holds one of `slots`, which several senders may share. `on_wait` is called once, with the
    reason, when the sender has to wait.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        *,
        patience_s: float,
        on_wait: Callable[[str], object],
        slots: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        self._http = http
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._slots = slots or contextlib.nullcontext()
        self._has_said = False
        self.tally = Tally()

    async def send_all(
        self, requests: Iterator[BatchRequest], answers: Answers, concurrency: int, on_done: Callable[[], object]
    ) -> None:
        """Send all requests, `concurrency` at a time. Raises KeyRefused, NoGateway, and what `answers` raises."""

        async def work() -> None:
            for request in requests:
                await self._send(request, answers)
                on_done()

        await together(work() for _ in range(concurrency))

    async def _send(self, request: BatchRequest, answers: Answers) -> None:
        """Send until there is an answer that stays the same if the request is sent again."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        num_out_of_time = 0
        while True:
            response: httpx2.Response | None = None
            try:
                async with self._slots:
                    response = await self._http.post(request.url, content=request.content, headers=_JSON)
            except httpx2.RequestError as error:
                self.tally.last_problem = f"{type(error).__name__}: {error}"
            if response is not None:
                num_out_of_time += response.status_code == _OUT_OF_TIME
                if response.status_code not in _LATER or num_out_of_time == _MAX_OUT_OF_TIME:
                    self._record(request, response, answers)
                    return
                self.tally.last_problem = f"HTTP {response.status_code}: {response.text[:200]}"
            self._say_why()
            wait_s = max(pause_s, _retry_after_s(response))
            if loop.time() + wait_s > deadline_s:
                self.tally.num_left += 1
                return
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _say_why(self) -> None:
        if not self._has_said:
            self._on_wait(self.tally.last_problem)
        self._has_said = True

    def _record(self, request: BatchRequest, response: httpx2.Response, answers: Answers) -> None:
        if response.status_code in _BAD_KEY:
            raise KeyRefused(f"the gateway refuses the key: {response.text[:200]}; set TANDEM_API_KEY")
        try:
            body: object = parse_json(response.content)
        except ValueError:
            body = response.text
        if _is_elsewhere(response, body):
            raise NoGateway(f"{response.url} is not served, HTTP {response.status_code}: give the gateway's own URL")
        request_id = response.headers.get("x-request-id", "")
        answers.write(request.custom_id, response.status_code, request_id, body)
        if response.is_success:
            self.tally.num_answered += 1
        else:
            self.tally.num_refused += 1


def _is_elsewhere(response: httpx2.Response, body: object) -> bool:
    """True if the answer is about the route, so that all requests would get it."""
    if response.status_code != 404:
        return response.status_code == 405 or response.is_redirect
    error = body.get("error") if isinstance(body, dict) else None
    return not isinstance(error, dict) or not {error.get("code"), error.get("type")} & set(_NO_MODEL)


def _retry_after_s(response: httpx2.Response | None) -> float:
    """Return the pause that the gateway asks for, 0 if none."""
    text = response.headers.get("retry-after-ms", "") if response is not None else ""
    return int(text) / 1000 if re.fullmatch(r"[0-9]{1,12}", text) else 0.0
