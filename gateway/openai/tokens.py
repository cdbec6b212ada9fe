"""vLLM's /tokenize and /detokenize."""

from collections.abc import Sequence

from starlette.responses import JSONResponse, Response

from gateway.errors import InvalidField
from gateway.exchange import Exchange
from gateway.openai.parameters import model_of, tokenize_arguments
from gateway.openai.requests import ChatBody, ClientFieldNames
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
        if not body.add_special_tokens:
            message = "add_special_tokens must be true: prompts are tokenised as for an answer"
            raise InvalidField(message, field="add_special_tokens")
        arguments = TokenizeArguments(prompt=body.prompt, model=model_of(body.model), timeout=timeout_s)
        with_texts = body.return_token_strs
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
    """Return the text of token ids. Special tokens have none."""
    body = await exchange.parse(_DetokenizeBody)
    timeout_s = exchange.settings.request_timeout_s
    arguments = TokenizeArguments(token_ids=body.tokens, model=model_of(body.model), timeout=timeout_s)
    with _DETOKENIZE_NAMES.translating_errors():
        tokens = await exchange.client.tokenize(**arguments) if body.tokens else ()
    return JSONResponse({"prompt": "".join(token.text for token in tokens)})
