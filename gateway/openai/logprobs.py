"""Log-probs in the formats of OpenAI's two endpoints. They are the model's own, before temperature is applied."""

from collections.abc import Iterable, Sequence

from gateway.schema import Json
from tandem import FinishReason, Token, TokenEvent

_VERY_UNLIKELY = -9999.0


def num_stop_tokens(tokens: Sequence[Token], finish_reason: FinishReason | None) -> int:
    """Count the tokens at the end of a complete answer that consist of its stop string only."""
    if finish_reason is not FinishReason.STOP_SEQUENCE:
        return 0
    return next((number for number, token in enumerate(reversed(tokens)) if token.text), len(tokens))


def visible_tokens(tokens: Sequence[Token], finish_reason: FinishReason | None) -> Sequence[Token]:
    """Drop the end-of-sequence token or the stop string, which are not part of the text."""
    ends_special = finish_reason is not None and bool(tokens) and tokens[-1].special
    return tokens[: len(tokens) - max(ends_special, num_stop_tokens(tokens, finish_reason))]


class StreamTokens:
    """Assigns tokens to events. A token without text is held until later text shows whether it is in a stop string."""

    def __init__(self) -> None:
        self._pending: dict[int, list[Token]] = {}

    def take(self, event: TokenEvent) -> Sequence[Token]:
        """Return the held tokens and the event's token if the event has text or ends the choice, else nothing."""
        pending = self._pending.setdefault(event.index, [])
        if event.token is not None:
            pending.append(event.token)
        if event.finish_reason is None and not event.text:
            return ()
        self._pending[event.index] = []
        return visible_tokens(pending, event.finish_reason)


def chat_logprobs(tokens: Iterable[Token], num_top: int) -> Json:
    """The chat format: `content` has one entry per token."""
    return {"content": [_chat_entry(token, num_top) for token in tokens], "refusal": None}


def _chat_entry(token: Token, num_top: int) -> Json:
    entries = [_entry(top.text, top.logprob) for top in token.top[:num_top]]
    return _entry(token.text, token.logprob) | {"top_logprobs": entries}


def _entry(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float | None) -> float:
    return _VERY_UNLIKELY if logprob is None else max(logprob, _VERY_UNLIKELY)


class CompletionLogprobs:
    """The completions format: four parallel lists. `text_offset` counts characters, an echoed prompt included."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, tokens: Iterable[Token], num_top: int) -> Json:
        """Return the lists for the next tokens. A prompt's first token has no log-prob, which is null."""
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if num_top else None, "text_offset": []}
        for token in tokens:
            lists["tokens"].append(token.text)
            lists["token_logprobs"].append(None if token.logprob is None else _finite(token.logprob))
            if num_top:
                lists["top_logprobs"].append(_top(token, num_top))
            lists["text_offset"].append(self._offset)
            self._offset += len(token.text)
        return lists


def _top(token: Token, num_top: int) -> dict[str, float] | None:
    """Log-probs by text. The sampled token is included even if it is not among the likeliest."""
    if token.logprob is None:
        return None
    best = {top.text: _finite(top.logprob) for top in reversed(token.top[:num_top])}
    return {token.text: _finite(token.logprob)} | best if token.text else best
