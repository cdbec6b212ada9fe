"""What one client gets: chunks of its choices, the first one with the prompt's facts."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

from mesh.domain.tokens import PromptLogprob
from router.choice import Choice, Chunk, TokenEvent, TopToken
from router.generation import GenerationStream
from router.prompts import PromptEncoder
from router.validation import ValidRequest


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Facts about the prompt; `tokens` only if log-probs were asked for."""

    request_id: str
    num_tokens: int
    tokens: list[TokenEvent]


class Delta(NamedTuple):
    """One message to the client. `echo` goes in front of the choice's first token."""

    chunk: Chunk
    prompt: PromptInfo | None = None
    echo: str = ""


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """What an answer is made of. `first_choice` brings the prompt's log-probs; `echo` is the text to repeat."""

    valid: ValidRequest
    first_choice: Choice
    encoder: PromptEncoder
    echo: str


class Answer:
    """Read `deltas()` to the end, or `close()`."""

    def __init__(self, parts: AnswerParts, stream: GenerationStream) -> None:
        self._valid = parts.valid
        self._choice = parts.first_choice
        self._encoder = parts.encoder
        self._echo = parts.echo
        self._stream = stream

    def close(self) -> None:
        """The client is gone."""
        self._stream.close()

    async def deltas(self) -> AsyncIterator[Delta]:
        """All messages. Raises the error the request ends with. Each choice's first message carries the echo."""
        waiting: list[Chunk] = []
        prompt: PromptInfo | None = None
        echoed: set[int] = set()
        async with aclosing(self._stream.chunks()) as chunks:
            async for chunk in chunks:
                waiting.append(chunk)
                if prompt is None and not self._knows_prompt(chunk):
                    continue
                for ready in waiting:
                    first = prompt is None
                    prompt = prompt or await self._prompt_info()
                    echo = "" if ready.index in echoed else self._echo
                    echoed.add(ready.index)
                    yield Delta(ready, prompt if first else None, echo)
                waiting.clear()

    def _knows_prompt(self, chunk: Chunk) -> bool:
        """The prompt's log-probs come with the first tokens of the first choice; others wait for them."""
        return not self._valid.asked.prompt_logprobs or chunk.index == 0

    async def _prompt_info(self) -> PromptInfo:
        ids = self._valid.prompt_ids
        tokens = await self._prompt_tokens() if self._valid.asked.prompt_logprobs else []
        return PromptInfo(self._valid.request_id, len(ids), tokens)

    async def _prompt_tokens(self) -> list[TokenEvent]:
        pieces = await self._encoder.pieces(self._valid.prompt_ids)
        known = self._choice.prompt_logprobs or ()
        return [
            TokenEvent(piece.id, piece.text, entry.logprob, self._top(entry), piece.special)
            for piece, entry in zip(pieces, chain(known, repeat(PromptLogprob(None))), strict=False)
        ]

    def _top(self, entry: PromptLogprob) -> tuple[TopToken, ...]:
        return tuple(TopToken(top.id, self._encoder.text_of(top.id), top.logprob) for top in entry.top)
