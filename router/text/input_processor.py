"""Prompts of one model become tokens, and bad structures are refused.

    chat ─▶ template process ─▶ text ─▶ does it fit? ─▶ a thread for short or for long texts ─▶ token ids

Tenants take turns at each thread (FairTurns), and short texts never wait for long ones.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpoint.grammar import GrammarCompiler
from mesh.domain.errors import InvalidRequest, TooLarge
from mesh.domain.structure import Structure
from router.served_model import ServedModel
from router.text.chat import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.text.fair_turns import FairTurns
from router.text.template_process import TemplateProcess
from router.text.tokenizer import TextToken, Tokenizer

T = TypeVar("T")
# Encoding texts up to this length is cheaper than handing them to a thread, and short enough for the event loop.
_SHORT_CHARS = 1024
_SHORT_TOKENS = 256
# Longer texts take tens of milliseconds or more.
_LONG_CHARS = 64 << 10
_LONG_TOKENS = 16 << 10


class InputProcessor:
    """Owns the threads and the template process. Call `start` once, and `close` at the end.

    Tokenize calls have an encoder of their own, so that they and generation do not wait for each other's tokenizer
    threads. Both encoders share the template process, one rendering at a time.
    """

    def __init__(self, model: ServedModel, model_dir: Path, *, disable_grammars: bool = False) -> None:
        self.model = model
        self._templates = None if model.chat_template is None else TemplateProcess(model.chat_template)
        self.encoder = PromptEncoder(model, self._templates)
        self.tokenize_encoder = PromptEncoder(model, self._templates)
        self.grammars = Grammars(model_dir, disabled=disable_grammars)

    async def start(self) -> None:
        """Start the template process. Raises ConfigurationError if the chat template cannot be compiled."""
        if self._templates is not None:
            await asyncio.to_thread(self._templates.start)

    def close(self) -> None:
        """Stop the threads and the template process. No request may run any more."""
        self.encoder.close()
        self.tokenize_encoder.close()
        if self._templates is not None:
            self._templates.close()
        self.grammars.close()


class _Thread:
    """One worker thread at which tenants take turns."""

    def __init__(self, name: str) -> None:
        self._turns = FairTurns()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T], tenant: str = "", num_chars: int = 0) -> T:
        """Run `call` on the thread and return its result. Raises Overloaded if too much text waits."""
        loop = asyncio.get_running_loop()
        return await self._turns.run(lambda: loop.run_in_executor(self._pool, call), tenant=tenant, num_chars=num_chars)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Grammars:
    """Compiles structures on a thread of its own, as workers will, so that a bad structure is refused at once."""

    def __init__(self, model_dir: Path, *, disabled: bool = False) -> None:
        self._compiler = GrammarCompiler(model_dir)
        self._disabled = disabled
        self._thread = _Thread("grammars")

    async def check(self, structure: Structure | None, tenant: str = "") -> None:
        """Raise InvalidRequest if workers could not compile the structure, Overloaded if too many wait.

        Timing reveals nothing about other tenants: a structure that only they have used is compiled again.
        """
        if structure is None:
            return
        if self._disabled:
            raise InvalidRequest("structured output is turned off here: disable_grammar_support is set")
        await self._thread.run(lambda: self._compiler.compile(structure, tenant), tenant, structure.num_chars)

    def close(self) -> None:
        self._thread.close()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as ids; `text` is their source, None if unknown. `in_reasoning`: see ChatTemplate.is_in_reasoning."""

    ids: Sequence[int]
    text: str | None
    in_reasoning: bool = False

    def last(self, num_tokens: int | None) -> "EncodedPrompt":
        """Return the last `num_tokens` tokens; the whole prompt for None."""
        if num_tokens is None or num_tokens >= len(self.ids):
            return self
        return EncodedPrompt(self.ids[len(self.ids) - num_tokens :], None, self.in_reasoning)


class PromptEncoder:
    """The model's template and tokenizer, with threads. Call `close` at the end. The caller owns `templates`."""

    def __init__(self, model: ServedModel, templates: TemplateProcess | None) -> None:
        self._model = model
        self._templates = templates
        self._rendering, self._short, self._long = map(_Thread, ("templates", "prompts", "long-prompts"))

    async def encode(self, prompt: Prompt, *, tenant: str = "", max_tokens: int | None = None) -> EncodedPrompt:
        """Return the prompt's token ids.

        Raises InvalidRequest if there is no chat template, it rejects the messages, or the text has halves of surrogate
        pairs; TooLarge for more characters than `max_tokens` tokens can stand for; Overloaded if too much text waits.
        """
        if isinstance(prompt, TokenPrompt):
            return EncodedPrompt(prompt.ids, None)
        text = prompt.text if isinstance(prompt, TextPrompt) else await self._render(prompt, tenant)
        self._require_fits(text, max_tokens)
        _require_whole_characters(text)
        # A template adds special tokens itself.
        ids = await self._ids(text, tenant, special=isinstance(prompt, TextPrompt) and prompt.adds_special_tokens)
        return EncodedPrompt(ids, text, isinstance(prompt, ChatPrompt) and self._is_in_reasoning(text, prompt))

    async def _ids(self, text: str, tenant: str, *, special: bool) -> Sequence[int]:
        encode = self._model.tokenizer.encode
        if len(text) <= _SHORT_CHARS:
            return encode(text, add_special_tokens=special)
        thread = self._short if len(text) <= _LONG_CHARS else self._long
        return await thread.run(lambda: encode(text, add_special_tokens=special), tenant, len(text))

    def _is_in_reasoning(self, text: str, prompt: ChatPrompt) -> bool:
        template = self._model.chat_template
        return template is not None and template.is_in_reasoning(text, prompt.messages, prompt.how)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, without special tokens."""
        return await self._run(lambda: self._model.tokenizer.decode(token_ids), len(token_ids))

    async def pieces(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[TextToken]:
        """Return each id with the text it adds."""
        pieces = self._model.tokenizer.pieces
        return await self._run(lambda: pieces(token_ids, skip_special_tokens=skip_special_tokens), len(token_ids))

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the spellings of short words in ids: at the beginning of a text, and after a space."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            texts = (word.lstrip(), " " + word.lstrip())
            alone, behind = (tuple(self._model.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
            spellings[alone] = None
            if behind[-len(alone) :] != alone:  # otherwise the first spelling covers the second
                spellings[behind] = None
        return tuple(spellings)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def close(self) -> None:
        for thread in (self._rendering, self._short, self._long):
            thread.close()

    async def _run(self, call: Callable[[], T], num_tokens: int) -> T:
        """Run `call` for a request that is already in service: it waits for its turn and is never refused."""
        if num_tokens <= _SHORT_TOKENS:
            return call()
        return await (self._short if num_tokens <= _LONG_TOKENS else self._long).run(call)

    async def _render(self, prompt: ChatPrompt, tenant: str) -> str:
        templates = self._templates
        if templates is None:
            raise InvalidRequest(
                f"model {self._model.name} has no chat template, so it takes no chats: send plain text"
            )
        return await self._rendering.run(
            lambda: templates.render(prompt.messages, prompt.tools_json, prompt.how), tenant, prompt.num_chars
        )

    def _require_fits(self, text: str, max_tokens: int | None) -> None:
        max_chars = None if max_tokens is None else self._model.tokenizer.max_chars(max_tokens)
        if max_chars is not None and len(text) > max_chars:
            raise TooLarge(
                f"the prompt has {len(text)} characters, and at most {max_chars} fit into the {max_tokens} tokens "
                "(max_input_length) that are allowed"
            )


def _require_whole_characters(text: str) -> None:
    """Raise InvalidRequest for text that no tokenizer takes. JSON escapes can bring it, and so can templates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise InvalidRequest(f"the prompt has {half}, half of a surrogate pair: send whole characters") from None
