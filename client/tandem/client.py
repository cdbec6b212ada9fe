"""The asynchronous client. `sync.py` has the same client for code without an event loop."""

import copy
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from google.protobuf.message import Message

from tandem._connection import Connection, ResumableStream, make_repeatable
from tandem._continuation import continue_until_done
from tandem._fields import wrong_value
from tandem._requests import (
    GenerateArguments,
    TokenizeArguments,
    generate_request,
    history_request,
    model_request,
    set_draining_request,
    set_traffic_request,
    switch_role_request,
    tokenize_request,
    tokenizer_request,
)
from tandem._responses import EventReader, ResultBuilder, history, mesh, models, token
from tandem._retries import Deadline, RetryPolicy, seconds
from tandem._routers import ChannelFactory, Channels, SecureChannels, Stubs, Tls, insecure_channel
from tandem.mesh import HistoryPoint, Mesh, Worker
from tandem.models import Model, Result, Token, TokenEvent
from tandem.v1 import generation_pb2, mesh_pb2

R = TypeVar("R")

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RESUME_TIMEOUT_S = 60.0


class BoundToProcess:
    """Base of both clients, whose connection belongs to this process: they can be copied, but not pickled."""

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client cannot be pickled, because its connection belongs to this process: make one in each process"
        )


class AsyncClient(BoundToProcess):
    """A client of one Tandem router, or of several routers that serve the same models.

        async with tandem.AsyncClient("127.0.0.1:50051") as client:
            result = await client.generate(prompt="The sky is", max_new_tokens=16)

    `timeout` (seconds) is the default for calls without one. A call that is refused, or gets no connection, before its
    first message is retried up to `max_retries` times within its timeout. With several addresses,
    "10.0.0.1:50051,10.0.0.2:50051", the client switches to the next router at once if one is unreachable or stopping,
    and stays with that router.

    A call survives the loss of its router: the client sends the request again, to the next router or to the same
    address, for up to `resume_timeout` seconds after each loss, within the timeout of the call. It removes tokens that
    it has delivered before, so that the events are the same as without the loss. If no router accepts the request, or
    `resume_timeout` is 0, the call raises ConnectionFailed.

    `tls` is True for certificates of public CAs, or a Tls object that names a CA. `open_channel` creates the gRPC
    channel to an address; pass your own to add interceptors. Use a client in one event loop at a time. Any number of
    calls may run concurrently. A process forked from one that has made calls raises RuntimeError, because gRPC does not
    survive a fork: start processes with spawn, as multiprocessing can, or fork before the first call.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        resume_timeout: float = DEFAULT_RESUME_TIMEOUT_S,
        tls: Tls | bool = False,
        open_channel: ChannelFactory | None = None,
    ) -> None:
        if not isinstance(tls, bool | Tls):
            raise wrong_value("tls", "true, false or a Tls object", tls)
        if tls and open_channel is None:
            channels: Channels = SecureChannels(Tls() if tls is True else tls)
        else:
            channels = Channels(open_channel or insecure_channel)
        self._connection = Connection(address, api_key, RetryPolicy(max_retries), channels)
        self._timeout_s = seconds(timeout, "timeout")
        self._resume_timeout_s = seconds(resume_timeout, "resume_timeout")

    def acting_for(self, api_key: str | None) -> Self:
        """A client with another API key that shares the connection, for services that call on behalf of others. Close
        only the original client, after the last call.
        """
        client = copy.copy(self)
        client._connection = self._connection.acting_for(api_key)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, which ends running calls with Cancelled."""
        await self._connection.close()

    async def generate(self, **arguments: Unpack[GenerateArguments]) -> Result:
        """Generate the complete answer. Cancelling the task cancels the request on the server."""
        builder = ResultBuilder()
        async for event in self.stream(**arguments):
            builder.add(event)
        return builder.result()

    async def stream(self, **arguments: Unpack[GenerateArguments]) -> AsyncGenerator[TokenEvent, None]:
        """Generate an answer and yield one event per token. Leaving the loop, or `aclose()`, cancels the call."""
        self._connection.require_open()
        request = generate_request(arguments)
        make_repeatable(request)
        reader = EventReader(
            request.num_choices if request.HasField("num_choices") else 1,
            has_details=bool(request.output.top_logprobs) or request.output.own_bytes,
        )
        deadline = self._deadline(arguments.get("timeout"))
        stream = ResumableStream(self._connection, request, deadline, reader, resume_timeout_s=self._resume_timeout_s)
        try:
            while (message := await stream.read()) is not None:
                for event in reader.read(message):
                    yield event
            reader.check_complete()
        finally:
            stream.cancel()

    async def generate_until_done(
        self, *, max_rounds: int = 8, max_total: int | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Result:
        """Generate one answer with several requests, as long as the finish reason is "length".

        Each round continues exactly after the tokens of the previous rounds, with `max_new_tokens` at a time;
        `min_new_tokens` is that of the whole answer. It ends when the text is complete, after `max_rounds` rounds or
        `max_total` tokens, or when the context of the model is full (the finish reason is then still "length"). With a
        seed the answer is reproducible, but it equals the answer of one long request only with greedy decoding.
        Presence and frequency penalties apply within a round, and a stop string that spans two rounds is not detected.
        Raises InvalidRequest for an answer that is held to a structure (`json_schema` and the like): each round would
        begin it anew.
        """
        deadline = self._deadline(arguments.get("timeout"))
        return await continue_until_done(self, arguments, max_rounds=max_rounds, max_total=max_total, deadline=deadline)

    async def tokenize(self, **arguments: Unpack[TokenizeArguments]) -> tuple[Token, ...]:
        """The tokens that `generate` would use for the prompt, with their texts, without log-probs."""
        return tuple(map(token, (await self._tokenize(arguments)).tokens))

    async def render(self, **arguments: Unpack[TokenizeArguments]) -> str:
        """The text that `tokenize` converts to tokens: the messages, rendered with the chat template of the model."""
        text: str = (await self._tokenize(arguments)).text
        return text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The served models and their limits."""
        request = generation_pb2.ListModelsRequest()
        return models((await self._call(lambda stubs: stubs.generation.ListModels, request, timeout)).models)

    async def model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """One served model. Without a name, it is the only model. Raises ModelNotFound."""
        response = await self._call(lambda stubs: stubs.generation.GetModel, model_request(name), timeout)
        return models([response.model])[0]

    async def tokenizer_config(self, name: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """The settings of a model's tokenizer, as its tokenizer_config.json has them. Special tokens are texts, such as
        that of "eos_token". "chat_template" is there if the model has one. Without a name it is the only model. Raises
        ModelNotFound.
        """
        response = await self._call(lambda stubs: stubs.generation.GetTokenizer, tokenizer_request(name), timeout)
        config: dict[str, Any] = json.loads(response.config_json)
        return config

    async def mesh(self, *, timeout: float | None = None) -> Mesh:
        """All workers with their load, and counts of the router."""
        return mesh(await self._call(lambda stubs: stubs.mesh.ListWorkers, mesh_pb2.ListWorkersRequest(), timeout))

    async def workers(self, *, timeout: float | None = None) -> tuple[Worker, ...]:
        """All workers with their load."""
        return (await self.mesh(timeout=timeout)).workers

    async def history(self, span_s: float | None = None, *, timeout: float | None = None) -> tuple[HistoryPoint, ...]:
        """The work of the router in the last `span_s` seconds, oldest first; None: as far as it knows, a day at most.

        The longer the span, the longer the stretches. Tokens are those of all routers' requests, all else is of this
        one.
        """
        return history(await self._call(lambda stubs: stubs.mesh.GetHistory, history_request(span_s), timeout))

    async def drain(self, worker_id: str, *, timeout: float | None = None) -> None:
        """Take a worker out of service, for all routers: it finishes its sequences and gets no new ones.

        Started again, it is in service again. Raises InvalidRequest if there is no such worker.
        """
        await self._set_draining(worker_id, draining=True, timeout=timeout)

    async def undrain(self, worker_id: str, *, timeout: float | None = None) -> None:
        """Take a drained worker back into service."""
        await self._set_draining(worker_id, draining=False, timeout=timeout)

    async def switch_role(self, worker_id: str, role: str, *, timeout: float | None = None) -> None:
        """Let a worker drain and then serve in another role, "prefill" or "decode", with the model that it has loaded.

        Returns once it has agreed; `workers` shows it in its new role, serving, some time later. With the role that it
        has, a switch that is under way is taken back. Raises InvalidRequest if there is no such worker or role, if the
        worker was not started as switchable, or if no other worker of its role serves.
        """
        await self._call(lambda stubs: stubs.mesh.SwitchRole, switch_role_request(worker_id, role), timeout)

    async def set_traffic(self, name: str, shares: Mapping[str, float], *, timeout: float | None = None) -> None:
        """Share out the requests for `name` among revisions: served models, and their shares in proportion to the sum.

        All turns of a conversation go to one revision, as long as the shares stay. A revision without workers leaves
        its share to the others. Shares of 0 for all remove the name. Raises InvalidRequest for models that are not
        served.
        """
        await self._call(lambda stubs: stubs.mesh.SetTraffic, set_traffic_request(name, shares), timeout)

    async def _set_draining(self, worker_id: str, *, draining: bool, timeout: float | None) -> None:
        request = set_draining_request(worker_id, draining=draining)
        await self._call(lambda stubs: stubs.mesh.SetDraining, request, timeout)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until a router serves. Routers need not be running yet. Raises DeadlineExceeded."""
        self._connection.require_open()
        await self._connection.wait_serving(timeout)

    async def _tokenize(self, arguments: TokenizeArguments) -> generation_pb2.TokenizeResponse:
        request, timeout = tokenize_request(arguments), arguments.get("timeout")
        return await self._call(lambda stubs: stubs.generation.Tokenize, request, timeout)

    async def _call(
        self, method: Callable[[Stubs], Callable[..., Awaitable[R]]], request: Message, timeout: float | None
    ) -> R:
        """Make a unary call. `method` selects the RPC from the stubs of a router."""
        self._connection.require_open()
        return await self._connection.unary(method, request, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout is None else timeout)
