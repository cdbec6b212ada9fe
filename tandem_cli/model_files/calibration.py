"""Prompts of `tandem quantize`: read from JSON lines, as token ids, a part of them held out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from checkpoint.tokenizer_files import load_tokenizer
from mesh.domain.errors import ConfigurationError, InvalidRequest
from router.text.chat import ChatMessage, ChatTemplate, Rendering
from tandem_cli.load_test.jobs import Job, Lengths, read_entries

_HELD_OUT = 4
"""Every fourth prompt is held out."""
_TOKEN_CHARS = 64
"""More characters than a token has on average. Of a longer text, only `max_tokens` times this is tokenised."""


@dataclass(frozen=True, slots=True)
class CalibrationPrompts:
    """Token ids. `num_cut` prompts were longer than allowed, `num_left` are more than allowed."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    num_cut: int
    num_left: int


def read_prompts(
    path: Path, model_dir: Path, *, vocab_size: int, max_prompts: int, max_tokens: int
) -> CalibrationPrompts:
    """Read the first prompts of a file, and cut the long ones. Raises ConfigurationError."""
    entries = read_entries(path, Lengths())
    encoder = CalibrationEncoder(model_dir, vocab_size, max_chars=(max_tokens + 1) * _TOKEN_CHARS)
    prompts = []
    for number, (line, job) in enumerate(entries[:max_prompts], start=1):
        try:
            prompt = encoder.encode(job) + encoder.answer(_answer_beside(line, job))
            if len(prompt) < 2:
                raise ConfigurationError("it has fewer than two tokens, so there is nothing to predict: remove it")
            prompts.append(prompt)
        except (ConfigurationError, InvalidRequest) as error:
            raise ConfigurationError(f"{path}, prompt {number}: {error}") from error
    if len(prompts) < 2:
        raise ConfigurationError(
            f"{path} has one prompt (or --max-prompts allows one): two are needed, as one is held out for the report"
        )
    cut = [prompt[:max_tokens] for prompt in prompts]
    chosen = set(range(_HELD_OUT - 1, len(cut), _HELD_OUT)) or {len(cut) - 1}
    held_out = tuple(prompt for number, prompt in enumerate(cut) if number in chosen)
    calibration = tuple(prompt for number, prompt in enumerate(cut) if number not in chosen)
    num_cut = sum(len(prompt) > max_tokens for prompt in prompts)
    return CalibrationPrompts(calibration, held_out, num_cut, len(entries) - len(prompts))


def _answer_beside(line: dict[str, Any], job: Job) -> str:
    """The `reference` of a line as `tandem optimize` takes it, unless its messages have the answer."""
    reference, messages = line.get("reference"), job.messages or ()
    has_answer = bool(messages) and messages[-1]["role"] == "assistant"
    return reference if isinstance(reference, str) and not has_answer else ""


class CalibrationEncoder:
    """Makes token ids of prompts as the router does. The tokenizer and the chat template are loaded when needed. Only
    the first `max_chars` characters of a text are tokenised, if it is given.
    """

    def __init__(self, model_dir: Path, vocab_size: int, *, max_chars: int | None = None) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._max_chars = max_chars
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    def encode(self, job: Job) -> tuple[int, ...]:
        """Raises ConfigurationError and InvalidRequest."""
        if job.messages is not None:
            return self._ids(self._render(job), is_chat=True)
        if job.prompt is not None:
            return self._ids(job.prompt, is_chat=False)
        if job.token_ids is None or job.ignore_eos:
            raise ConfigurationError(
                "input_tokens stands for a random prompt, which is no text: give prompt or messages"
            )
        return self._known(job.token_ids, "give ids of this model, or prompt")

    def answer(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer, as they follow those of its prompt."""
        return self._ids(text, is_chat=True) if text else ()

    def _ids(self, text: str, *, is_chat: bool) -> tuple[int, ...]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_dir)
        ids = tuple(self._tokenizer.encode(text[: self._max_chars], add_special_tokens=not is_chat).ids)
        return self._known(ids, "the tokenizer in its folder is that of another model")

    def _known(self, ids: tuple[int, ...], hint: str) -> tuple[int, ...]:
        """`ids`. Raises ConfigurationError for a token that the model does not have."""
        if ids and max(ids) >= self._vocab_size:
            raise ConfigurationError(f"token {max(ids)} is not in the model's vocabulary of {self._vocab_size}: {hint}")
        return ids

    def _render(self, job: Job) -> str:
        if self._template is None:
            self._template = ChatTemplate.load(self._model_dir)
        if self._template is None:
            raise ConfigurationError("the model has no chat template: give prompt or token_ids in place of messages")
        messages = [ChatMessage(message["role"], message["content"]) for message in job.messages or ()]
        if not all(isinstance(text, str) for message in messages for text in (message.role, message.content)):
            raise ConfigurationError("role and content of messages must be texts")
        ends_with_answer = messages[-1].role == "assistant"
        return self._template.render(messages, how=Rendering(adds_generation_prompt=not ends_with_answer))
