"""The asynchronous client. `sync.py` is the same client for code without an event loop."""

import copy
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, Unpack

from tandem._channel import ChannelFactory, Tls, channels_over, insecure_channel
from tandem._connection import Connection
from tandem._continuation import Bounds, continue_until_done
from tandem._mesh_responses import mesh
from tandem._requests import GenerateArguments, TokenizeArguments, generate_request, tokenize_request
from tandem._responses import EventReader, ResultBuilder, models, token
from tandem._retry import Deadline, RetryPolicy
from tandem.mesh import Mesh, Worker
from tandem.models import Model, Result, Token, TokenEvent
from tandem.v1 import generation_pb2, worker_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0


class AsyncClient:
    """A client of a Tandem router, or of several that serve the same models.

        async with tandem.AsyncClient("127.0.0.1:50051") as client:
            result = await client.generate(prompt="The sky is", max_new_tokens=16)

    `timeout` (seconds) holds for calls that give none. Calls that were refused, or got no connection, before their
    first message are tried again up to `max_retries` times within their timeout; a call that has delivered tokens
    never is. With several addresses, "10.0.0.1:50051,10.0.0.2:50051", a router that is gone or stopping is passed
    over for the next one at once, which is asked first from then on. `tls` is True for certificates that the public
    knows, or a Tls that names a CA. `open_channel` makes the gRPC channel to an address: pass your own for
    interceptors. Use a client in one event loop; any number of calls may run at a time.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        tls: Tls | bool = False,
        open_channel: ChannelFactory | None = None,
    ) -> None:
        if open_channel is None:
            open_channel = channels_over(Tls() if tls is True else tls) if tls else insecure_channel
        self._connection = Connection(address, api_key, RetryPolicy(max_retries), open_channel)
        self._timeout_s = timeout

    def acting_for(self, api_key: str | None) -> Self:
        """This client with another API key, for services that call on behalf of others. It shares the connection: close
        this one, and only at the end.
        """
        other = copy.copy(self)
        other._connection = self._connection.acting_for(api_key)
        return other

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel what runs on it."""
        await self._connection.close()

    async def generate(self, **arguments: Unpack[GenerateArguments]) -> Result:
        """The complete answer. Cancelling it cancels the work on the server."""
        builder = ResultBuilder()
        async for event in self.stream(**arguments):
            builder.add(event)
        return builder.result()

    async def stream(self, **arguments: Unpack[GenerateArguments]) -> AsyncGenerator[TokenEvent, None]:
        """One event per token, as they come. Leaving the loop, or `aclose()`, cancels the call."""
        request = generate_request(arguments)
        reader = EventReader(request.num_choices if request.HasField("num_choices") else 1)
        stream = await self._connection.open_stream(request, self._deadline(arguments.get("timeout")))
        try:
            while stream.message is not None:
                for event in reader.read(stream.message):
                    yield event
                await stream.read()
            reader.check_complete()
        finally:
            stream.cancel()

    async def generate_until_done(
        self, *, max_rounds: int = 8, max_total: int | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Result:
        """One answer from as many requests as it takes while the finish reason is "length".

        Each round continues exactly behind the tokens of the rounds before, `max_new_tokens` at a time, until the
        text is complete, `max_rounds` are done, `max_total` tokens are generated, or the model's context is full (the
        finish reason is then still "length"). With a seed the answer is repeatable, but it is the answer of a single
        long request only if greedy. Presence and frequency penalties count the tokens of their own round only, and a
        stop string that lies across two rounds is not seen.
        """
        deadline = self._deadline(arguments.get("timeout"))
        return await continue_until_done(self, arguments, Bounds(max_rounds, max_total, deadline))

    async def tokenize(self, **arguments: Unpack[TokenizeArguments]) -> tuple[Token, ...]:
        """The tokens that `generate` would use for a prompt or messages; no log-probs."""
        return tuple(map(token, (await self._tokenize(arguments)).tokens))

    async def render(self, **arguments: Unpack[TokenizeArguments]) -> str:
        """The text that `tokenize` makes tokens of: messages as the model's chat template writes them."""
        text: str = (await self._tokenize(arguments)).text
        return text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        request = generation_pb2.ListModelsRequest()
        deadline = self._deadline(timeout)
        response = await self._connection.unary(lambda stubs: stubs.generation.ListModels, request, deadline)
        return models(response.models)

    async def model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """One served model; without a name the only one. Raises ModelNotFound."""
        request = generation_pb2.GetModelRequest(model=name)
        deadline = self._deadline(timeout)
        response = await self._connection.unary(lambda stubs: stubs.generation.GetModel, request, deadline)
        return models([response.model])[0]

    async def mesh(self, *, timeout: float | None = None) -> Mesh:
        """All workers with their load, and the router's own counts."""
        request = worker_pb2.ListWorkersRequest()
        deadline = self._deadline(timeout)
        return mesh(await self._connection.unary(lambda stubs: stubs.mesh.ListWorkers, request, deadline))

    async def workers(self, *, timeout: float | None = None) -> tuple[Worker, ...]:
        """All workers with their load."""
        return (await self.mesh(timeout=timeout)).workers

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Return when a router says that it serves; none need be up yet. Raises DeadlineExceeded."""
        await self._connection.wait_serving(timeout)

    async def _tokenize(self, arguments: TokenizeArguments) -> Any:
        request = tokenize_request(arguments)
        deadline = self._deadline(arguments.get("timeout"))
        return await self._connection.unary(lambda stubs: stubs.generation.Tokenize, request, deadline)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout is None else timeout)
