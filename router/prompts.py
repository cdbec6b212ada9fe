"""Prompts, in their three forms, into token ids; long ones off the event loop."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from mesh.domain.errors import InvalidRequest
from router.served_model import ServedModel
from router.text.chat import ChatMessage
from router.text.tokenizer import TextToken

T = TypeVar("T")

# Work on texts up to this long takes less than handing it to a thread, and the event loop can bear it.
_SHORT_CHARS = 1024
_SHORT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Ready-made token ids, as they came: they may be far too many, so nothing is copied before they are checked."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, oldest turn first, and what the model may call."""

    messages: tuple[ChatMessage, ...]
    tools: Sequence[Any] | None = None


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as ids; `text` is what they were made from, None if that is not known."""

    ids: Sequence[int]
    text: str | None

    def last(self, num_tokens: int | None) -> "EncodedPrompt":
        """Its end, so many tokens; all of it for None."""
        if num_tokens is None or num_tokens >= len(self.ids):
            return self
        return EncodedPrompt(self.ids[len(self.ids) - num_tokens :], None)


class PromptEncoder:
    """The model's template and tokenizer, with a small pool of threads. Close it at the end."""

    def __init__(self, model: ServedModel, *, num_threads: int = 2) -> None:
        self._model = model
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prompts")

    async def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Raises InvalidRequest if there is no chat template, or it rejects the messages."""
        if isinstance(prompt, TokenPrompt):
            return EncodedPrompt(prompt.ids, None)
        if isinstance(prompt, TextPrompt):
            return await self._run(lambda: self._encode_text(prompt), short=len(prompt.text) <= _SHORT_CHARS)
        return await self._run(lambda: self._encode_chat(prompt), short=False)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""
        return await self._run(lambda: self._model.tokenizer.decode(token_ids), short=len(token_ids) <= _SHORT_TOKENS)

    async def pieces(self, token_ids: Sequence[int]) -> list[TextToken]:
        """Each id with the text it adds."""
        return await self._run(lambda: self._model.tokenizer.pieces(token_ids), short=len(token_ids) <= _SHORT_TOKENS)

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of words as they may come in a text: at its beginning, and behind a space. Short words only."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            alone, behind = (tuple(self._plain_ids(before + word.lstrip())) for before in ("", " "))
            found[alone] = None
            if behind[-len(alone) :] != alone:  # else the one rules out the other, too
                found[behind] = None
        return tuple(found)

    def text_of(self, token_id: int) -> str:
        """Text of one token on its own."""
        return self._model.tokenizer.text_of(token_id)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _plain_ids(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text, add_special_tokens=False)

    async def _run(self, work: Callable[[], T], *, short: bool) -> T:
        return work() if short else await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode_text(self, prompt: TextPrompt) -> EncodedPrompt:
        return EncodedPrompt(self._model.tokenizer.encode(prompt.text, add_special_tokens=True), prompt.text)

    def _encode_chat(self, prompt: ChatPrompt) -> EncodedPrompt:
        if self._model.chat_template is None:
            raise InvalidRequest(f"model {self._model.name} has no chat template: send a prompt or token_ids")
        text = self._model.chat_template.render(prompt.messages, prompt.tools)
        # The template writes the special tokens itself.
        return EncodedPrompt(self._plain_ids(text), text)
