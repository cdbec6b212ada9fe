"""A router without workers behind it: a real grpc.aio server whose answers follow a script.

Its model has one token per byte and knows one story: whatever part of the story a prompt ends with, it goes on from
there. Token 256 ends an answer.
"""

import asyncio
import codecs
import json
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from mesh.rpc.server import start_serving
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc, mesh_pb2, mesh_pb2_grpc, sampling_pb2

EOS = 256
SERVING_SINCE_UNIX_S = 1_700_000_000
STORY = "One fine day a tändem rolled by."


@dataclass(frozen=True)
class Refusal:
    """How a call ends instead of being answered. `after_messages` come first."""

    code: grpc.StatusCode
    details: str = "no"
    trailing: tuple[tuple[str, str], ...] = ()
    after_messages: int = 0


@dataclass
class Script:
    """The behaviour of the fake router, and its observations."""

    story: str = STORY
    call: str = ""
    """JSON of a call, which comes in place of the story where tools are offered and none has answered yet."""
    refusals: deque[Refusal] = field(default_factory=deque)
    tokens_per_message: int = 1
    bytes_per_token: int = 1
    hold_after_messages: int | None = None
    omit_finish: bool = False
    max_total_tokens: int = 1000
    enforces_total: bool = False
    """Refuse requests that ask for more than that, as a router does."""
    tool_call_format: str = ""
    is_encoder_decoder: bool = False
    max_concurrent_requests: int = 0
    logprob: float = -0.5
    has_reasoning: bool = False
    in_reasoning: bool = False
    adapters: tuple[str, ...] = ()
    sampling_defaults: pb.SamplingDefaults | None = None
    stop_strings: tuple[str, ...] = ()
    more_models: tuple[pb.Model, ...] = ()
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    tokenized: list[pb.TokenizeRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    on_holding: Callable[[], object] = lambda: None
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def let_one_pass(self) -> None:
        """Let a held call send one more message; then it is held again."""
        assert self.hold_after_messages is not None
        self.hold_after_messages += 1
        self.holding.clear()
        self.release.set()
        self.release.clear()


class FakeGeneration(generation_pb2_grpc.GenerationServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        script = self._script
        script.requests.append(request)
        script.metadata.append(dict(context.invocation_metadata()))
        if complaint := complaint_about_lengths(request, script):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, complaint, (("tandem-error", "InvalidRequest"),))
        refusal = script.refusals.popleft() if script.refusals else None
        messages = answer(request, script)
        try:
            for number, message in enumerate(messages):
                if refusal is not None and number == refusal.after_messages:
                    await context.abort(refusal.code, refusal.details, refusal.trailing)
                if number == script.hold_after_messages:
                    script.holding.set()
                    script.on_holding()
                    await script.release.wait()
                yield message
            if refusal is not None and refusal.after_messages == len(messages):
                await context.abort(refusal.code, refusal.details, refusal.trailing)
        except (asyncio.CancelledError, GeneratorExit):  # while waiting, or while sending
            script.cancelled.set()
            raise

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        self._script.tokenized.append(request)
        ids = input_ids(request)
        if max(ids, default=0) > EOS:
            details = f"token_ids: token id {max(ids)} is not in the vocabulary of 257"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details, (("tandem-error", "InvalidRequest"),))
        if len(ids) >= self._script.max_total_tokens:
            details = f"the prompt has {len(ids)} tokens, at most 999 (max_input_length) are allowed"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details, (("tandem-error", "InvalidRequest"),))
        tokens = [pb.Token(id=byte, text=chr(byte)) for byte in ids]
        return pb.TokenizeResponse(tokens=tokens, text=bytes(ids).decode())

    async def GetTokenizer(self, request: Any, context: Any) -> pb.GetTokenizerResponse:
        return pb.GetTokenizerResponse(config_json='{"eos_token": "<end>"}')

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        if request.model not in ("", "fake"):
            trailing = (("tandem-error", "ModelNotFound"),)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model!r}", trailing)
        return pb.GetModelResponse(model=self._model())

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._model(), *self._script.more_models])

    def _model(self) -> pb.Model:
        total = self._script.max_total_tokens
        return pb.Model(
            name="fake",
            max_input_tokens=total - 1,
            max_total_tokens=total,
            vocab_size=257,
            eos_token_ids=[EOS],
            has_chat_template=True,
            tool_call_format=self._script.tool_call_format,
            is_encoder_decoder=self._script.is_encoder_decoder,
            max_concurrent_requests=self._script.max_concurrent_requests,
            has_reasoning=self._script.has_reasoning,
            ready=True,
            adapters=self._script.adapters,
            sampling_defaults=self._script.sampling_defaults,
            stop_strings=self._script.stop_strings,
            serving_since_unix_s=SERVING_SINCE_UNIX_S,
        )


TIMING = pb.Timing(
    total_ms=35.0,
    prepare_ms=1.0,
    first_token_ms=20.0,
    attempts=[
        pb.AttemptTiming(queue_ms=1.0, dispatch_ms=2.0, prefill_ms=3.0, backoff_ms=4.0),
        pb.AttemptTiming(prefill_ms=5.0, transfer_ms=6.0, wait_ms=7.0, decode_ms=6.0, kv_transfer_ms=9.0),
    ],
)
"""What every choice says of itself: it was replayed once."""


class FakeMesh(mesh_pb2_grpc.MeshServicer):
    def __init__(self) -> None:
        self.drained: list[tuple[str, bool]] = []
        self.switched: list[tuple[str, int]] = []
        self.traffic: dict[str, dict[str, float]] = {}
        self.routed: dict[str, dict[str, int]] = {}
        self.serving: tuple[str, ...] = ()  # names of more decode workers

    async def ListWorkers(self, request: Any, context: Any) -> mesh_pb2.ListWorkersResponse:
        response = mesh_pb2.ListWorkersResponse(queued_requests=1, active_requests=2)
        workers = {"prefill-0": mesh_pb2.WORKER_ROLE_PREFILL}
        workers |= dict.fromkeys(("decode-0", *self.serving), mesh_pb2.WORKER_ROLE_DECODE)
        for name, role in workers.items():
            role = dict(self.switched).get(name, role)
            serving = name in dict(self.switched) or name in self.serving
            status = response.workers.add(state=mesh_pb2.WORKER_STATE_READY, serving=serving)
            status.record.MergeFrom(
                mesh_pb2.WorkerRecord(worker_id=name, role=role, address="127.0.0.1:7", pid=77, num_blocks=64)
            )
            if role == mesh_pb2.WORKER_ROLE_DECODE:  # an older router's record has no degree
                status.record.tensor_parallel, status.record.pipeline_parallel = 2, 3
            status.load.MergeFrom(mesh_pb2.WorkerLoad(free_blocks=60, num_running=3, generated_tokens=9))
            status.last_seen.FromMilliseconds(250)
        add = mesh_pb2.ADVICE_ACTION_ADD
        response.advice.add(action=add, role=mesh_pb2.WORKER_ROLE_DECODE, reason="KV is full", model="fake")
        response.traffic.extend(mesh_pb2.Traffic(name=name, shares=shares) for name, shares in self.traffic.items())
        for name, requests in self.routed.items():
            routed = response.routed.add(name=name, requests=requests)
            routed.span.FromSeconds(40)
        return response

    async def SetDraining(self, request: mesh_pb2.SetDrainingRequest, context: Any) -> mesh_pb2.SetDrainingResponse:
        self.drained.append((request.worker_id, request.draining))
        return mesh_pb2.SetDrainingResponse()

    async def SwitchRole(self, request: mesh_pb2.SwitchRoleRequest, context: Any) -> mesh_pb2.SwitchRoleResponse:
        self.switched.append((request.worker_id, request.role))
        return mesh_pb2.SwitchRoleResponse()

    async def SetTraffic(self, request: mesh_pb2.SetTrafficRequest, context: Any) -> mesh_pb2.SetTrafficResponse:
        self.traffic[request.traffic.name] = dict(request.traffic.shares)
        return mesh_pb2.SetTrafficResponse()

    async def GetHistory(self, request: Any, context: Any) -> mesh_pb2.GetHistoryResponse:
        point = mesh_pb2.HistoryPoint(generated_tokens=50, replays=1, waiting=0.5)
        point.length.CopyFrom(request.span)
        point.gap_p50.FromMilliseconds(20)
        return mesh_pb2.GetHistoryResponse(points=[point])


def input_ids(request: Any) -> list[int]:
    """The prompt's tokens; a conversation is its turns, each on a line."""
    kind = request.WhichOneof("input")
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "chat":
        return list("".join(f"{turn.role}: {turn.content}\n" for turn in request.chat.messages).encode())
    return list(request.prompt.encode())


def complaint_about_lengths(request: pb.GenerateRequest, script: Script) -> str:
    """As a router refuses them; empty if it does not."""
    if not request.sampling.HasField("max_new_tokens"):
        return ""
    least, most = request.sampling.min_new_tokens, request.sampling.max_new_tokens
    if least > most:
        return f"min_new_tokens ({least}) must be <= max_new_tokens ({most})"
    num_prompt_tokens, total = len(input_ids(request)), script.max_total_tokens
    if script.enforces_total and num_prompt_tokens + most > total:
        return f"prompt tokens ({num_prompt_tokens}) + max_new_tokens ({most}) must be <= max_total_tokens ({total})"
    return ""


def answer(request: pb.GenerateRequest, script: Script) -> list[pb.GenerateResponse]:
    """The whole stream for one request; choices take turns."""
    ids = input_ids(request)
    generated = _following(ids, _call(request, script) or script.story)
    is_cut = request.sampling.HasField("max_new_tokens") and request.sampling.max_new_tokens < len(generated)
    generated = generated[: request.sampling.max_new_tokens] if is_cut else generated
    tokens = _tokens(generated, request.output.top_logprobs, script)
    num_choices = request.num_choices if request.HasField("num_choices") else 1
    starts = range(0, len(tokens), script.tokens_per_message)
    messages = []
    for start in starts:
        for index in range(num_choices):
            message = pb.GenerateResponse(index=index, tokens=tokens[start : start + script.tokens_per_message])
            if start == 0 and request.output.echo:
                message.echo = bytes(ids).decode()
            if start == starts[-1] and not script.omit_finish:
                message.finish_reason = (
                    sampling_pb2.FINISH_REASON_LENGTH if is_cut else sampling_pb2.FINISH_REASON_EOS_TOKEN
                )
                message.usage.MergeFrom(pb.Usage(prompt_tokens=len(ids), completion_tokens=len(tokens)))
                message.timing.MergeFrom(TIMING)
            messages.append(message)
    prompt = pb.PromptInfo(request_id="request-1", num_tokens=len(ids), in_reasoning=script.in_reasoning)
    messages[0].prompt.MergeFrom(prompt)
    if request.output.prompt_logprobs:
        messages[0].prompt.tokens.extend(
            pb.Token(id=token_id, text=chr(token_id), logprob=-1.0 if index else None)
            for index, token_id in enumerate(ids)
        )
    return messages


def _call(request: pb.GenerateRequest, script: Script) -> str:
    """The call as Hermes writes it, or as a forced one must be; "" where none is due."""
    chat = request.chat
    if not script.call or not chat.tools_json or any(turn.role == "tool" for turn in chat.messages):
        return ""
    schema = request.sampling.structure.json_schema
    if not schema:
        return f"<tool_call>{script.call}</tool_call>"
    return f"[{script.call}]" if json.loads(schema).get("type") == "array" else script.call


def _following(ids: Sequence[int], story: str) -> list[int]:
    known = list(story.encode())
    for length in range(min(len(known), len(ids)), -1, -1):
        if length == 0 or list(ids[-length:]) == known[:length]:
            return [*known[length:], EOS]
    raise AssertionError


def _tokens(ids: Sequence[int], num_top: int, script: Script) -> list[pb.Token]:
    """A token stands for some bytes of the story, and has the id of the first."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens = []
    end = len(ids) - (ids[-1:] == [EOS])
    starts = [*range(0, end, script.bytes_per_token), *range(end, len(ids))]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        token_id = ids[start]
        text = decoder.decode(b"" if token_id == EOS else bytes(ids[start:stop]), final=stop == len(ids))
        top = [pb.TopToken(id=rank, text=chr(65 + rank), logprob=-0.5 - rank) for rank in range(num_top)]
        tokens.append(pb.Token(id=token_id, text=text, logprob=script.logprob, special=token_id == EOS, top=top))
    return tokens


class FakeHealth(HealthServicer):
    """Health that need not answer: `asked` is set by who then waits in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self.asked = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        if self.hangs:
            self.asked.set()
            await asyncio.Event().wait()
        return await super().Check(request, context)


class FakeRouter:
    """A running server; `address` and `script` are for the test."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.health = FakeHealth()
        self._server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(FakeGeneration(script), self._server)
        self.mesh = FakeMesh()
        mesh_pb2_grpc.add_MeshServicer_to_server(self.mesh, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.address = ""

    async def start(self, port: int = 0, tls: grpc.ServerCredentials | None = None) -> None:
        name = f"127.0.0.1:{port}"
        port = self._server.add_secure_port(name, tls) if tls else self._server.add_insecure_port(name)
        self.address = f"127.0.0.1:{port}"
        await start_serving(self._server)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self.health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        await self._server.stop(grace_s)


@asynccontextmanager
async def running_router(script: Script | None = None, port: int = 0) -> AsyncIterator[FakeRouter]:
    """A fake router that serves until the block ends."""
    router = FakeRouter(script or Script())
    try:
        await router.start(port)
        await router.set_serving(True)
        yield router
    finally:
        await router.stop()


def interrupt_main_thread() -> None:
    """Interrupt the main thread as Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
