"""POST /tokenize and /chat_tokenize."""

from collections.abc import Sequence

from starlette.responses import JSONResponse, Response

import tandem
from gateway.exchange import Exchange
from gateway.openai.parameters import messages_of, model_of, tools_of
from gateway.openai.schemas import ChatBody
from gateway.schema import parse
from gateway.streaming import Json
from gateway.tgi.schemas import TokenizeBody


async def tokenize(exchange: Exchange) -> Response:
    """A list of tokens."""
    body = parse(TokenizeBody, exchange.body)
    timeout_s = exchange.settings.request_timeout_s
    return JSONResponse(_tokens_json(await exchange.client.tokenize(prompt=body.inputs, timeout=timeout_s)))


async def chat_tokenize(exchange: Exchange) -> Response:
    """The tokens of a conversation, and the text they are made of."""
    body = parse(ChatBody, exchange.body)
    arguments = tandem.TokenizeArguments(
        model=model_of(body.model),
        messages=messages_of(body),
        tools=tools_of(body),
        timeout=exchange.settings.request_timeout_s,
    )
    tokens = await exchange.client.tokenize(**arguments)
    text = await exchange.client.render(**arguments)
    return JSONResponse({"tokenize_response": _tokens_json(tokens), "templated_text": text})


def _tokens_json(tokens: Sequence[tandem.Token]) -> list[Json]:
    """`start` and `stop` count characters of the tokens' own texts, of which special tokens have none."""
    listed: list[Json] = []
    start = 0
    for token in tokens:
        stop = start + len(token.text)
        listed.append({"id": token.id, "text": token.text, "start": start, "stop": stop})
        start = stop
    return listed
