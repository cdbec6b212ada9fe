"""vLLM's /tokenize, /detokenize and /tokenizer_info, with which clients use the model's tokenizer remotely."""

import json
from collections.abc import Sequence

from starlette.responses import JSONResponse, Response

from gateway.exchange import Exchange
from gateway.openai.requests import ChatBody, ClientFieldNames
from gateway.openai.sdk_arguments import model_of, tokenize_arguments
from gateway.schema import Body, Json, Name, TokenIds
from tandem import Token, TokenizeArguments


class _PromptBody(Body):
    model: Name = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _ChatTokensBody(ChatBody):
    return_token_strs: bool = False


class _DetokenizeBody(Body):
    model: Name = ""
    tokens: TokenIds


_DETOKENIZE_NAMES = ClientFieldNames(
    {"token_ids": "tokens", "chat.messages": "tokens"}, frozenset(_DetokenizeBody.model_fields)
)


async def tokenize_as_vllm(exchange: Exchange, payload: Json) -> Response:
    """Return the token ids of a prompt, or of a conversation as the chat template renders it."""
    timeout_s = exchange.settings.request_timeout_s
    if "messages" in payload:
        chat = await exchange.check(_ChatTokensBody, payload)
        arguments, with_texts = tokenize_arguments(chat, timeout_s), chat.return_token_strs
    else:
        body = await exchange.check(_PromptBody, payload)
        arguments = TokenizeArguments(
            prompt=body.prompt,
            add_special_tokens=body.add_special_tokens,
            model=model_of(body.model),
            timeout=timeout_s,
        )
        with_texts = body.return_token_strs
    arguments["skip_special_tokens"] = False
    tokens = await exchange.client.tokenize(**arguments)
    model = await exchange.client.model(arguments.get("model") or "", timeout=timeout_s)
    return JSONResponse(_tokens_json(tokens, model.max_total_tokens, with_texts=with_texts))


def _tokens_json(tokens: Sequence[Token], max_total_tokens: int, *, with_texts: bool) -> Json:
    return {
        "count": len(tokens),
        "max_model_len": max_total_tokens,
        "tokens": [token.id for token in tokens],
        "token_strs": [token.text for token in tokens] if with_texts else None,
    }


async def detokenize(exchange: Exchange) -> Response:
    """Return the text of token ids, with the names of special tokens."""
    body = await exchange.parse(_DetokenizeBody)
    timeout_s = exchange.settings.request_timeout_s
    arguments = TokenizeArguments(
        token_ids=body.tokens, skip_special_tokens=False, model=model_of(body.model), timeout=timeout_s
    )
    with _DETOKENIZE_NAMES.translating_errors():
        tokens = await exchange.client.tokenize(**arguments) if body.tokens else ()
    return JSONResponse({"prompt": "".join(token.text for token in tokens)})


async def tokenizer_info(exchange: Exchange) -> Response:
    """Return the settings of the tokenizer of the model that answers requests without a name, or of `?model=`."""
    name = model_of(exchange.request.query_params.get("model", ""))
    config = await exchange.client.tokenizer_config(name or "", timeout=exchange.settings.request_timeout_s)
    return Response(json.dumps(config), media_type="application/json")  # in ASCII: files may have halves of a pair
