"""`truncate`: only the last tokens of a prompt are used."""

import tandem
from gateway.exchange import Exchange


async def truncated(
    exchange: Exchange, arguments: tandem.GenerateArguments, max_tokens: int | None
) -> tandem.GenerateArguments:
    """`arguments` with at most the last `max_tokens` of its text prompt; all of it for None."""
    if max_tokens is None:
        return arguments
    tokens = await exchange.client.tokenize(
        prompt=arguments.get("prompt"), model=arguments.get("model"), timeout=exchange.settings.request_timeout_s
    )
    ids = [token.id for token in tokens[-max_tokens:]]
    return arguments | tandem.GenerateArguments(prompt=None, token_ids=ids)
