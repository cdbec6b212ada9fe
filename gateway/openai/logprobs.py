"""Log-probs as OpenAI's two endpoints write them. They are of the model's own distribution, before temperature."""

from collections.abc import Iterable, Sequence
from typing import Any

from tandem import FinishReason, Token, TokenEvent

Json = dict[str, Any]

_VERY_UNLIKELY = -9999.0


def num_stop_tokens(tokens: Sequence[Token], finish_reason: FinishReason | None) -> int:
    """Tokens at the end of a complete answer that are nothing but its stop string."""
    if finish_reason is not FinishReason.STOP_SEQUENCE:
        return 0
    return next((place for place, token in enumerate(reversed(tokens)) if token.text), len(tokens))


def shown_tokens(tokens: Sequence[Token], finish_reason: FinishReason | None) -> Sequence[Token]:
    """Without the end-of-sequence token or the stop string: they are no part of the text."""
    ends_special = finish_reason is not None and bool(tokens) and tokens[-1].special
    return tokens[: len(tokens) - max(ends_special, num_stop_tokens(tokens, finish_reason))]


class TokensOfStream:
    """Which tokens to show with an event. Those without a text wait for what comes of them: it may be a stop string."""

    def __init__(self) -> None:
        self._held: dict[int, list[Token]] = {}

    def shown_with(self, event: TokenEvent) -> Sequence[Token]:
        """All that have waited and its own, if it has a text or ends the choice."""
        held = self._held.setdefault(event.index, [])
        if event.token is not None:
            held.append(event.token)
        if event.finish_reason is None and not event.text:
            return ()
        self._held[event.index] = []
        return shown_tokens(held, event.finish_reason)


def chat_logprobs(tokens: Iterable[Token], num_top: int) -> Json:
    """`content` has one entry for each token."""
    return {"content": [_chat_entry(token, num_top) for token in tokens], "refusal": None}


def _chat_entry(token: Token, num_top: int) -> Json:
    top = [_entry(each.text, each.logprob) for each in token.top[:num_top]]
    return _entry(token.text, token.logprob) | {"top_logprobs": top}


def _entry(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float | None) -> float:
    return _VERY_UNLIKELY if logprob is None else max(logprob, _VERY_UNLIKELY)


class CompletionLogprobs:
    """Four lists side by side. `text_offset` counts characters from the start of the choice's text, echo included."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, tokens: Iterable[Token], num_top: int) -> Json:
        """The lists for the next tokens. A prompt's first token has null for its log-probs."""
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
    """By text; the chosen token is there too, though it may not be among the likeliest."""
    if token.logprob is None:
        return None
    best = {each.text: _finite(each.logprob) for each in reversed(token.top[:num_top])}
    return {token.text: _finite(token.logprob)} | best if token.text else best
