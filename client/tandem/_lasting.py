"""A Generate call that survives the loss of its router.

A router holds no state that another router would need: a request determines its answer completely, including random
draws, which depend on the seed. A call whose connection breaks is therefore sent again, to the next router or to the
same address once a router answers there. Tokens that the caller already has are removed from the new answer
(EventReader), so the caller only notices a pause.

This applies to broken connections only. An error status from a router is the result of the call.
"""

import secrets
import sys
from collections.abc import Callable

from tandem._connection import Connection, MessageStream
from tandem._retry import Deadline, RetryPolicy
from tandem.exceptions import ConnectionFailed, DeadlineExceeded, TandemError
from tandem.v1 import generation_pb2

# A request that crashes its router must not crash all routers.
_MAX_LOSSES = 4
# A lost router is last in order, and its health check may still succeed for a moment.
_STAGGER_S = 0.2
_PATIENT = RetryPolicy(max_retries=sys.maxsize, max_backoff_s=2.0)


def make_repeatable(request: generation_pb2.GenerateRequest) -> None:
    """Set a seed on a sampling request, so that it makes the same random draws at any router."""
    if request.sampling.temperature > 0 and not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)


class ResumableStream:
    """The messages of one Generate call, possibly from several routers in turn.

    After a loss, the search for a router takes at most `resume_timeout_s`, within `deadline`; 0 seconds disable it.
    `on_repeat` is called before the messages start again from the first.
    """

    def __init__(
        self,
        connection: Connection,
        request: generation_pb2.GenerateRequest,
        deadline: Deadline,
        *,
        resume_timeout_s: float,
        on_repeat: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._request = request
        self._deadline = deadline
        self._resume_timeout_s = resume_timeout_s
        self._on_repeat = on_repeat
        self._stream: MessageStream | None = None
        self._num_losses = 0

    async def read(self) -> generation_pb2.GenerateResponse | None:
        """The next message; None at the end of the answer. Raises TandemError."""
        try:
            if self._stream is None:
                self._stream = await self._connection.open_stream(self._request, self._deadline)
            else:
                await self._stream.read()
        except ConnectionFailed as loss:
            if self._stream is None and not loss.broke:
                raise  # no router has accepted the call
            self._stream = await self._repeat(loss)
        return self._stream.message

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        if self._stream is not None:
            self._stream.cancel()

    async def _repeat(self, loss: ConnectionFailed) -> MessageStream:
        """Send the call again and return its stream at the first message. Raises `loss` if no router accepts it in
        time.
        """
        self._num_losses += 1
        if self._num_losses > _MAX_LOSSES or not self._resume_timeout_s:
            raise loss
        if self._stream is not None and self._request.HasField("ttft_target"):
            # The first token was delivered before the loss, so its target no longer applies.
            self._request.ttft_target.FromMicroseconds(max(1, round(self._deadline.remaining_s() * 1_000_000)))
        patience = Deadline.after(min(self._resume_timeout_s, self._deadline.remaining_s()))
        try:
            # A router that has just started does not know its workers and their limits yet.
            await self._connection.wait_serving(patience.remaining_s(), stagger_s=_STAGGER_S)
            stream = await self._connection.open_stream(self._request, self._deadline, _PATIENT, patience)
        except TandemError as error:
            if not self._deadline.remaining_s():
                raise DeadlineExceeded(f"out of time while looking for a router: {loss}") from error
            raise loss from error
        self._on_repeat()
        return stream
