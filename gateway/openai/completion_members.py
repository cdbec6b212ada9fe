"""Members that the responses of both OpenAI endpoints share: id, time, model, usage, token ids and log-probs.

Log-probs are the model's own, before temperature is applied.
"""

import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

import tandem
from gateway.answers import bytes_of
from gateway.openai.requests import ChatBody, CompletionBody, SamplingBody
from gateway.schema import Json
from tandem import Choice, FinishReason, Token, TokenEvent, TopToken, Usage

# A string, not null: text-generation's client requires one.
_FINGERPRINT = f"tandem-{tandem.__version__}"
_VERY_UNLIKELY = -9999.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """The members that all chunks of an answer share."""

    object: str
    id: str
    created: int
    model: str

    @classmethod
    def new(cls, kind: str, prefix: str, model: str) -> "Envelope":
        return cls(kind, f"{prefix}-{uuid4().hex}", int(time.time()), model)

    def as_chunk(self) -> "Envelope":
        """The envelope of a chat's chunks, whose `object` differs."""
        return replace(self, object=f"{self.object}.chunk")

    def json(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }


def finish_reason(reason: FinishReason) -> str:
    """Map to OpenAI's reasons, which do not tell stop strings from the end-of-sequence token."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def token_ids(body: SamplingBody, tokens: Iterable[Token]) -> Json:
    """The member `token_ids` of a choice, if requested. A client can append it to the prompt to continue exactly."""
    return {"token_ids": [token.id for token in tokens]} if body.return_token_ids else {}


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def without_stop_tokens(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Copy the choices with completion counts that exclude stop strings."""
    return tuple(replace(choice, usage=_without_last(choice.usage, _num_stop_tokens(choice))) for choice in choices)


def _num_stop_tokens(choice: Choice) -> int:
    held = HeldTokens()
    for token in choice.tokens:
        held.add(token)
    return held.num_stop(choice.finish_reason)


def _without_last(usage: Usage, num_tokens: int) -> Usage:
    return replace(usage, completion_tokens=usage.completion_tokens - num_tokens)


class StreamUsage:
    """Sums the usage of a stream, without stop strings. A prompt is counted at the end of its first choice."""

    def __init__(self, body: SamplingBody) -> None:
        options = body.stream_options
        self._is_requested = options is not None and (options.include_usage or options.continuous_usage_stats)
        self.is_continuous = options is not None and options.continuous_usage_stats
        self._num_choices = body.n or 1
        self._sum = Usage()
        self._num_prompt = 0  # tokens of the prompts whose answers have begun
        self._num_running = 0
        self._held: dict[int, HeldTokens] = {}

    def add_prompt(self, event: TokenEvent) -> None:
        """Count the prompt whose answer begins with this event, if one does. Call it once before `add`."""
        self._num_prompt += event.num_prompt_tokens

    def add(self, event: TokenEvent) -> None:
        held = self._held.setdefault(event.index, HeldTokens())
        if event.token is not None:
            self._num_running += 1
            held.add(event.token)
        if event.usage is None:
            return
        num_stop = held.num_stop(event.finish_reason)
        self._num_running -= num_stop
        usage, is_first = _without_last(event.usage, num_stop), event.index % self._num_choices == 0
        self._sum = Usage(
            self._sum.prompt_tokens + (usage.prompt_tokens if is_first else 0),
            self._sum.completion_tokens + usage.completion_tokens,
            self._sum.cached_tokens + (usage.cached_tokens if is_first else 0),
        )

    def chunk_member(self) -> Json:
        """The member `usage` of a chunk: null, or the counts so far with `continuous_usage_stats`."""
        if not self._is_requested:
            return {}
        num_prompt = max(self._num_prompt, self._sum.prompt_tokens)
        so_far = replace(self._sum, prompt_tokens=num_prompt, completion_tokens=self._num_running)
        return {"usage": usage_json(so_far) if self.is_continuous else None}

    def last_chunk(self, envelope: Envelope) -> Iterable[Json]:
        """The final chunk with the usage and no choices, if requested."""
        if self._is_requested:
            yield envelope.json([]) | {"usage": usage_json(self._sum)}


class HeldTokens:
    """Holds back the last tokens of a choice, whose texts may belong to a stop string. Places are counted in characters
    of the answer; they are exact for tokens with own bytes.
    """

    def __init__(self) -> None:
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._num_own = self._num_sent = 0
        self._held: list[tuple[int, Token]] = []  # with the places where they begin

    def add(self, token: Token) -> list[Token]:
        """Add a token. Returns the tokens whose text has now begun to be sent, in order."""
        self._held.append((self._num_own, token))
        self._num_own += len(self._decode(bytes_of(token)))
        self._num_sent += len(token.text)
        num_begun = sum(begin < self._num_sent for begin, _ in self._held)
        begun, self._held = self._held[:num_begun], self._held[num_begun:]
        return [token for _, token in begun]

    def num_stop(self, finish_reason: FinishReason | None) -> int:
        """Count the tokens at the end of a complete answer that are part of its stop string only, or its stop token."""
        if finish_reason is not FinishReason.STOP_SEQUENCE:
            return 0
        num_stop = 0
        for number, (_, token) in enumerate(reversed(self._held), start=1):
            if number == 1 or not token.special:  # a special token in front was left out of the text
                num_stop = number
        return num_stop

    def rest(self) -> list[Token]:
        """Return the held tokens."""
        return [token for _, token in self._held]

    def end(self, begun: Sequence[Token], finish_reason: FinishReason) -> Sequence[Token]:
        """Return `begun`, which the last `add` has returned, and the held tokens that are part of the text: not the
        stop string, nor the token that has ended the answer unless it is shown.
        """
        tokens = [*begun, *self.rest()]
        has_end = finish_reason is not FinishReason.LENGTH
        is_last_hidden = has_end and bool(tokens) and not bytes_of(tokens[-1])
        return tokens[: len(tokens) - max(is_last_hidden, self.num_stop(finish_reason))]


def visible_tokens(choice: Choice) -> Sequence[Token]:
    """The tokens of a complete answer that are part of its text."""
    held = HeldTokens()
    begun = [token for added in choice.tokens for token in held.add(added)]
    return held.end(begun, choice.finish_reason)


class StreamTokens:
    """Assigns tokens to events. A token without text is held until later text shows whether it is in a stop string.
    `keeps_end`: the tokens that have ended the answer belong to its last event.
    """

    def __init__(self, *, keeps_end: bool = False) -> None:
        self._keeps_end = keeps_end
        self._held: dict[int, HeldTokens] = {}

    def take(self, event: TokenEvent) -> Sequence[Token]:
        """Return the tokens whose text begins in this event; of the last event, all that are part of the text."""
        held = self._held.setdefault(event.index, HeldTokens())
        begun = [] if event.token is None else held.add(event.token)
        if event.finish_reason is None:
            return begun
        return [*begun, *held.rest()] if self._keeps_end else held.end(begun, event.finish_reason)


def chat_logprobs(tokens: Iterable[Token], body: ChatBody) -> Json | None:
    """The chat format, if requested: `content` has one entry per token; `token_id` comes with `return_token_ids`."""
    if not body.logprobs:
        return None
    return {"content": [_chat_entry(token, body) for token in tokens], "refusal": None}


def _chat_entry(token: Token, body: ChatBody) -> Json:
    entries = [_entry(top, body) for top in token.top[: body.top_logprobs or 0]]
    return _entry(token, body) | {"top_logprobs": entries}


def _entry(token: Token | TopToken, body: ChatBody) -> Json:
    own_bytes = bytes_of(token)
    entry = {"token": _escaped(own_bytes), "logprob": _finite(token.logprob), "bytes": list(own_bytes)}
    return entry | ({"token_id": token.id} if body.return_token_ids else {})


def _escaped(own_bytes: bytes) -> str:
    r"""Show a token as OpenAI does in chats: bytes that are no whole characters as \xc3."""
    return own_bytes.decode("utf-8", "backslashreplace")


def _named(token: Token | TopToken) -> str:
    r"""Show a token as OpenAI does in completions: bytes that are no whole characters as bytes:\xc3."""
    own_bytes = bytes_of(token)
    try:
        return own_bytes.decode()
    except UnicodeDecodeError:
        return f"bytes:{_escaped(own_bytes)}"


def _finite(logprob: float | None) -> float:
    return _VERY_UNLIKELY if logprob is None else max(logprob, _VERY_UNLIKELY)


class CompletionLogprobs:
    """The completions format: four parallel lists. `text_offset` counts characters, an echoed prompt included. All
    tokens of a character begin where it does.

    With `return_token_ids` a fifth, `top_tokens`, has the alternatives with their ids, likeliest first: two of them may
    have the same text.
    """

    def __init__(self, body: CompletionBody) -> None:
        self._num_top = body.logprobs or 0
        self._has_ids = body.return_token_ids
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[Token]) -> Json:
        """Return the lists for the next tokens. A prompt's first token has no log-prob, which is null."""
        num_top = self._num_top
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if num_top else None, "text_offset": []}
        if num_top and self._has_ids:
            lists["top_tokens"] = []
        for token in tokens:
            lists["tokens"].append(_named(token))
            lists["token_logprobs"].append(None if token.logprob is None else _finite(token.logprob))
            if num_top:
                lists["top_logprobs"].append(_top(token, num_top))
            if num_top and self._has_ids:
                lists["top_tokens"].append([_top_token(top) for top in token.top[:num_top]])
            lists["text_offset"].append(self._begin(bytes_of(token)))
        return lists

    def _begin(self, own_bytes: bytes) -> int:
        """Return where the next token begins. If it does not go on with a character that was begun, that one shows as
        U+FFFD in front of it.
        """
        first = self._decoder.decode(own_bytes[:1])
        is_character_complete = bool(own_bytes) and not self._decoder.getstate()[0]
        begin = self._offset + len(first) - is_character_complete
        self._offset += len(first) + len(self._decoder.decode(own_bytes[1:]))
        return begin


def _top_token(top: TopToken) -> Json:
    return {"id": top.id, "text": top.text, "logprob": _finite(top.logprob)}


def _top(token: Token, num_top: int) -> dict[str, float] | None:
    """Log-probs by text: that of the sampled token, also if it is not among the likeliest, then the others, likeliest
    first. If two tokens have one text, the likelier one counts.
    """
    if token.logprob is None:
        return None
    best: dict[str, float] = {}
    for top in token.top[:num_top]:
        best.setdefault(_named(top), _finite(top.logprob))
    name = _named(token)
    return {name: _finite(token.logprob)} | best if name else best
