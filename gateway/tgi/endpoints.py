"""POST /generate, /generate_stream and / with TGI's form of answers; /tokenize, /chat_tokenize and /info."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

import tandem
from gateway.answers import SSE, Answer, Framing, OwnTexts, collect, failed_stream, stream_answer
from gateway.errors import Problem, UnsupportedMediaType, tgi_error_body
from gateway.exchange import Exchange
from gateway.metrics import Phases
from gateway.openai.requests import ChatBody
from gateway.openai.sdk_arguments import tokenize_arguments
from gateway.openai.tokens import tokenize_as_vllm
from gateway.schema import Json, read_json
from gateway.tgi.requests import GenerateBody, TokenizeBody, generate_arguments
from mesh.domain.request import MAX_NUM_CHOICES, MAX_STOP_STRINGS
from tandem import Choice, FinishReason, Token, TokenEvent, TopToken, Usage

# Clients require a token in each event, and parse its id as an unsigned number.
_NO_TOKEN = Token(0, "", 0.0, special=True)


async def generate(exchange: Exchange) -> Response:
    """Handle POST /generate: one object."""
    return await _complete(exchange, await _parse(exchange), full_text=False)


async def generate_stream(exchange: Exchange) -> Response:
    """Handle POST /generate_stream. After parsing, errors are events too: clients read nothing else."""
    return await _stream(exchange, await _parse(exchange), SSE, full_text=False)


async def generate_compat(exchange: Exchange) -> Response:
    """Handle POST /: an array of one object, or events if the body has `stream`."""
    return await answer_compat(exchange, await _parse(exchange), SSE)


async def answer_compat(exchange: Exchange, body: GenerateBody, framing: Framing) -> Response:
    """Answer like / and SageMaker's TGI containers: by default the generated text begins with the prompt.

    An encoder-decoder model does not continue its prompt, so its text never begins with it by default.
    """
    model = exchange.model()
    full_text = model is None or not model.is_encoder_decoder
    if body.stream:
        return await _stream(exchange, body, framing, full_text=full_text)
    return await _complete(exchange, body, full_text=full_text, as_array=True)


async def _stream(exchange: Exchange, body: GenerateBody, framing: Framing, *, full_text: bool) -> Response:
    try:
        arguments = generate_arguments(body, stream=True)
    except tandem.TandemError as error:
        renderer = StreamEvents(build_shape(body, {}, full_text=full_text))
        return failed_stream(exchange, error, renderer, framing, _compute(body))
    renderer = StreamEvents(build_shape(body, arguments, full_text=full_text))
    feed = exchange.feed([arguments])
    return await stream_answer(exchange, feed, renderer, framing, raise_early=False, headers=_compute(body))


async def _complete(exchange: Exchange, body: GenerateBody, *, full_text: bool, as_array: bool = False) -> Response:
    arguments = generate_arguments(body, stream=False)
    num_choices = body.parameters.num_choices
    answer = await collect(exchange.feed([arguments], num_choices), num_choices)
    content = answer_json(answer, build_shape(body, arguments, full_text=full_text))
    return JSONResponse([content] if as_array else content, headers=_headers(exchange, body, answer))


@dataclass(frozen=True, slots=True)
class TgiShape:
    """The form of an answer. `seed` is None for greedy decoding. `prefix` goes before the generated text."""

    details: bool
    prefill: bool
    prefix: str
    seed: int | None
    top_tokens: bool
    max_new_tokens: int | None

    def finish_reason(self, reason: FinishReason, usage: Usage) -> str:
        """Return TGI's reason: `length` at `max_new_tokens`, even if the last token is the end-of-sequence token."""
        if reason is FinishReason.EOS_TOKEN and usage.completion_tokens == self.max_new_tokens:
            return FinishReason.LENGTH
        return reason

    def details_of(self, reason: FinishReason, usage: Usage) -> Json:
        """Details of the end of an answer, for complete answers and for streams."""
        return {
            "finish_reason": self.finish_reason(reason, usage),
            "generated_tokens": usage.completion_tokens,
            "seed": self.seed,
        }


def build_shape(body: GenerateBody, arguments: tandem.GenerateArguments, *, full_text: bool) -> TgiShape:
    """Return how to render the answer. `full_text` is the route's default of `return_full_text`."""
    parameters = body.parameters
    returns_full_text = full_text if parameters.return_full_text is None else parameters.return_full_text
    return TgiShape(
        details=parameters.wants_details,
        prefill=parameters.decoder_input_details,
        prefix=body.inputs if returns_full_text else "",
        seed=arguments.get("seed") if parameters.num_choices == 1 else None,  # each of several choices has its own seed
        top_tokens=bool(parameters.top_n_tokens),
        max_new_tokens=parameters.max_new_tokens,
    )


async def _parse(exchange: Exchange) -> GenerateBody:
    content_type = exchange.request.headers.get("content-type", "")
    if "json" not in content_type:
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    return await exchange.parse(GenerateBody)


def _headers(exchange: Exchange, body: GenerateBody, answer: Answer) -> dict[str, str]:
    """TGI's headers of a complete answer, for its best choice. Times are whole ms, but x-compute-time is in seconds."""
    best = answer.choices[0]
    total_s = exchange.progress.duration_s()
    return {
        **_compute(body),
        "x-compute-time": str(total_s),
        "x-total-time": str(int(total_s * 1000)),
        "x-prompt-tokens": str(best.usage.prompt_tokens),
        "x-generated-tokens": str(best.usage.completion_tokens),
        **_times(best),
    }


def _compute(body: GenerateBody) -> dict[str, str]:
    """Headers that streams have, too. The gateway does not know the workers' devices."""
    return {"x-compute-type": "unknown", "x-compute-characters": str(len(body.inputs))}


def _times(choice: tandem.Choice) -> dict[str, str]:
    """Headers with the time of each phase; none if the router reports no timing."""
    if choice.timing is None:
        return {}
    phases = Phases.of(choice.timing)
    times_ms = {
        "x-validation-time": phases.validation_ms,
        "x-queue-time": phases.queue_ms,
        "x-inference-time": phases.inference_ms,
        "x-time-per-token": phases.inference_ms / max(1, choice.usage.completion_tokens),
    }
    return {name: str(int(ms)) for name, ms in times_ms.items()}


def answer_json(answer: Answer, shape: TgiShape) -> Json:
    """Render a complete answer: the best choice, and the others in its details."""
    first, *alternatives = answer.choices
    prompt = answer.prompt_tokens.get(0, ()) if shape.prefill else ()
    body: Json = {"generated_text": shape.prefix + first.text}
    if shape.details:
        body["details"] = _details(first, prompt, shape)
        if alternatives:
            body["details"]["best_of_sequences"] = [
                {"generated_text": shape.prefix + other.text} | _details(other, prompt, shape) for other in alternatives
            ]
    return body


def _details(choice: Choice, prompt: Sequence[Token], shape: TgiShape) -> Json:
    tokens = OwnTexts.of(choice.tokens)
    details = shape.details_of(choice.finish_reason, choice.usage) | {
        "prefill": [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in prompt],
        "tokens": list(map(token_json, tokens)),
    }
    if shape.top_tokens:
        details["top_tokens"] = [top_json(token.top) for token in tokens]
    return details


def token_json(token: Token) -> Json:
    """Render a token. `special` is always present, because strict clients require it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


def top_json(top: Sequence[TopToken]) -> list[Json]:
    """Render the likeliest tokens at one position."""
    return [{"id": token.id, "text": token.text, "logprob": token.logprob, "special": False} for token in top]


class StreamEvents:
    """Renders a stream: one event per token, the last one with the complete text.

    A token has its own text at once, also where it may begin a stop string, which stays in the text. Clients skip
    special tokens, and would lose text that is held back until one comes last.
    """

    def __init__(self, shape: TgiShape) -> None:
        self._shape = shape
        self._texts = [shape.prefix]
        self._own_texts = OwnTexts()
        self._num_tokens = 0

    def start(self) -> Iterable[Json]:
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Render one event. A token that ends within a character has no text, or that before it. An ending without a
        token, which comes after a reconnect, has an empty one.
        """
        self._texts.append(event.text)
        if event.token is None and event.finish_reason is None:
            return
        self._num_tokens += 1
        token = self._own_texts.apply(event.token or _NO_TOKEN, is_last=event.finish_reason is not None)
        body: Json = {"index": self._num_tokens, "token": token_json(token)}
        if self._shape.top_tokens:
            body["top_tokens"] = top_json(token.top)
        yield body | self._ending(event)

    def end(self) -> Iterable[Json]:
        return ()

    def error(self, problem: Problem) -> Iterable[Json]:
        yield tgi_error_body(problem)

    def _ending(self, event: TokenEvent) -> Json:
        if event.finish_reason is None or event.usage is None:
            return {"generated_text": None, "details": None}
        details = None
        if self._shape.details:
            ending = self._shape.details_of(event.finish_reason, event.usage)
            details = ending | {"input_length": event.usage.prompt_tokens}
        return {"generated_text": "".join(self._texts), "details": details}


async def tokenize(exchange: Exchange) -> Response:
    """Answer TGI's `inputs`; vLLM has a route of the same name, with `prompt` or `messages`."""
    payload = await exchange.read(read_json)
    if isinstance(payload, dict) and "inputs" not in payload and payload.keys() & {"prompt", "messages"}:
        return await tokenize_as_vllm(exchange, payload)
    body = await exchange.check(TokenizeBody, payload)
    timeout_s = exchange.settings.request_timeout_s
    return JSONResponse(_tokens_json(await exchange.client.tokenize(prompt=body.inputs, timeout=timeout_s)))


async def chat_tokenize(exchange: Exchange) -> Response:
    """Handle POST /chat_tokenize: the tokens of a conversation, and the rendered prompt."""
    body = await exchange.parse(ChatBody)
    arguments = tokenize_arguments(body, exchange.settings.request_timeout_s)
    tokens = await exchange.client.tokenize(**arguments)
    text = await exchange.client.render(**arguments)
    return JSONResponse({"tokenize_response": _tokens_json(tokens), "templated_text": text})


def _tokens_json(tokens: Sequence[tandem.Token]) -> list[Json]:
    """Render tokens. `start` and `stop` are offsets in the joined token texts; special tokens have no text."""
    rendered: list[Json] = []
    start = 0
    for token in tokens:
        stop = start + len(token.text)
        rendered.append({"id": token.id, "text": token.text, "start": start, "stop": stop})
        start = stop
    return rendered


async def info(exchange: Exchange) -> Response:
    """Handle GET /info: the members of all TGI versions, null where they do not apply here."""
    settings = exchange.settings
    model = await exchange.client.model(timeout=settings.request_timeout_s)
    return JSONResponse(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_pipeline_tag": "text2text-generation" if model.is_encoder_decoder else "text-generation",
            "model_dtype": None,
            "model_device_type": None,
            "max_concurrent_requests": model.max_concurrent_requests or settings.max_open_requests,
            "max_best_of": MAX_NUM_CHOICES,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": model.max_input_tokens,
            "max_input_length": model.max_input_tokens,
            "max_total_tokens": model.max_total_tokens,
            "max_client_batch_size": settings.max_client_batch_size,
            "validation_workers": 1,
            "waiting_served_ratio": None,
            "max_batch_total_tokens": None,
            "max_waiting_tokens": None,
            "router": "tandem",
            "version": tandem.__version__,
            "sha": None,
            "docker_label": None,
        }
    )
