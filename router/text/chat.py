"""Chat templates: Jinja, sandboxed, from the operator's model folder only.

Templates see what Hugging Face transformers shows them: messages, tools, add_generation_prompt, the special tokens,
the client's own values, `raise_exception`, `strftime_now`, a `tojson` filter that leaves HTML alone, loop controls, and
`{% generation %}`. The router only parses a template; `template_process.py` has it compiled and rendered.

Jinja's sandbox denies templates access to attributes, modules and mutation. It does not stop them from running forever
or filling the memory, so the process has limits on both.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.config_json import read_json
from checkpoint.source import NAMED_TEMPLATES
from checkpoint.tokenizer_fingerprint import tokenizer_settings
from mesh.domain.errors import ConfigurationError, InvalidRequest
from mesh.domain.json_text import parse_json
from router.text import template_marks, template_turns

MAX_RENDER_S = 1.0
# Not needed to render a conversation, and meant for long outputs.
_REMOVED_GLOBALS = ("lipsum",)

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
MAX_CHARS = 8 << 20
# Errors that a template's code can raise, besides Jinja's own.
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# DeepSeek's templates join a call's arguments with other texts.
_TEXT_ARGUMENTS = re.compile(r"\['arguments'\]\s*\+")
# Mistral's templates refuse ids of calls that are not of this length.
_ID_LENGTH = re.compile(r"id\s*\|\s*length\s*!=\s*(\d{1,2})\b")
# DeepSeek's templates up to R1 show calls, or these alone, only if the content is none, not if it is empty.
_NO_CONTENT = re.compile(r"message(?:\.content|\['content'\]) is (?:not )?none")
# Names under which templates may take the reasoning of earlier turns, beside `reasoning_content`.
_REASONING_NAMES = re.compile(r"message\.(?:tool_plan|thinking)\b")
# Appended to the message that is to be continued, to find its end in the rendered text. Its trailing space disappears
# if the template trims messages.
_END_OF_MESSAGE = "END_OF_THE_MESSAGE_TO_CONTINUE "
_PROBE = "PROBE"
_MAX_KWARGS_CHARS, _MAX_SHOWN = 8 << 10, 100
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TooMuchWork(SecurityError):
    """The template exceeds its limit on time or memory."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for untrusted templates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _REMOVED_GLOBALS:
            self.globals.pop(name, None)

    def call(__self, __context: Context, __obj: object, *args: Any, **kwargs: Any) -> object:
        """Call `__obj` for a template. Bytes are denied, because the sandbox does not check their methods."""
        if getattr(__obj, "__name__", "") in ("encode", "to_bytes"):
            raise SecurityError("templates have no bytes")
        return super().call(__context, __obj, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `extra_json`: further members that the template sees, as a JSON object, or ""."""

    role: str
    content: str
    extra_json: str = ""

    def members(self) -> dict[str, object]:
        """Return the message as templates see it. Raises InvalidRequest."""
        extra = _parse(self.extra_json, "extra_json", {})
        if not isinstance(extra, dict):
            raise InvalidRequest("extra_json must be a JSON object")
        return {**extra, "role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Rendering:
    """Options of a rendering. `values_json`: the client's values for the template, as a JSON object, or "".

    With `continues_final` the prompt ends after the content of the last message. The constructor raises InvalidRequest.
    """

    values_json: str = ""
    adds_generation_prompt: bool = True
    continues_final: bool = False

    def __post_init__(self) -> None:
        if self.adds_generation_prompt and self.continues_final:
            raise InvalidRequest("add_generation_prompt contradicts continue_final_message: leave it out")
        if len(self.values_json) > _MAX_KWARGS_CHARS:
            raise InvalidRequest(
                f"chat_template_kwargs has {len(self.values_json)} characters, at most {_MAX_KWARGS_CHARS} are allowed"
            )

    def values(self) -> dict[str, object]:
        """Return the client's values for the template. Raises InvalidRequest."""
        values = _parse(self.values_json, "chat_template_kwargs", {})
        if not isinstance(values, dict) or not all(name.isidentifier() for name in values):
            raise InvalidRequest("chat_template_kwargs must be a JSON object whose keys are identifiers")
        return values


DEFAULT_RENDERING = Rendering()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as plain text, without a template."""

    text: str
    adds_special_tokens: bool = True
    """With the tokens that the tokenizer puts around a text."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, unchecked and not copied: there may be far too many."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, oldest message first. `tools_json`: the callable tools as a JSON array, or "" for none."""

    messages: tuple[ChatMessage, ...]
    tools_json: str = ""
    how: Rendering = DEFAULT_RENDERING

    @property
    def num_chars(self) -> int:
        """Total characters of messages, tools and template values."""
        turns = sum(len(turn.content) + len(turn.extra_json) for turn in self.messages)
        return turns + len(self.tools_json) + len(self.how.values_json)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


def _parse_tools(text: str) -> list[object] | None:
    tools = _parse(text, "tools_json", None)
    if not isinstance(tools, list | None):
        raise InvalidRequest("tools_json must be a JSON array")
    return tools


def _parse(text: str, name: str, default: object) -> object:
    try:
        return parse_json(text, parse_constant=_refuse_constant) if text else default
    except ValueError:
        raise InvalidRequest(f"{name} is not valid JSON") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class ChatTemplate:
    """Renders a conversation as one text. Compiled on first use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`tool_source` is for conversations with tools, if they have a template of their own.

        Raises ConfigurationError if a template has a syntax error.
        """
        self.source = source
        self.tool_source = tool_source
        self.special_tokens = dict(special_tokens)
        self.tool_call_format = template_marks.tool_call_format(tool_source or source)
        """The model's format of tool calls: a key of template_marks.TOOL_CALLS, or "" if unknown."""
        self.has_reasoning = template_marks.has_reasoning(source)
        """True if the model reasons between <think> and </think>, or other marks, before it answers."""
        self._sandbox = _environment()
        try:
            for text in (source, tool_source or ""):
                self._sandbox.parse(text)
        except (jinja2.TemplateError, RecursionError, *_TEMPLATE_FAULTS) as error:
            raise ConfigurationError(f"the chat template is broken: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate | None":
        """The folder's template: chat_template.jinja, with others beside it, else tokenizer_config.json, else
        chat_template.json, which older multimodal models have; None if there is none.

        Raises ConfigurationError.
        """
        config = tokenizer_settings(model_dir)
        older = read_json(model_dir / "chat_template.json", optional=True)
        templates = _by_name(older, "chat_template.json") | _by_name(config, "tokenizer_config.json")
        for path in model_dir.glob(NAMED_TEMPLATES):
            templates[path.stem] = _read_text(path)
        path = model_dir / "chat_template.jinja"
        if path.exists():
            templates[_DEFAULT] = _read_text(path)
        if _DEFAULT not in templates:
            return None
        beside = read_json(model_dir / "special_tokens_map.json", optional=True)
        try:
            return cls(templates[_DEFAULT], _special_tokens(beside | config), templates.get(_WITH_TOOLS))
        except ConfigurationError as error:
            raise ConfigurationError(f"{model_dir}: {error}") from error

    def compile(self) -> None:
        """Compile the templates, which evaluates their constants. Raises ConfigurationError if one is broken."""
        try:
            self._compiled  # noqa: B018
        except (jinja2.TemplateError, MemoryError, RecursionError, *_TEMPLATE_FAULTS) as error:
            raise ConfigurationError(f"the chat template is broken: {error}") from error

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, jinja2.Template]:
        """The templates for conversations without and with tools."""
        template = self._sandbox.from_string(self.source)
        return template, self._sandbox.from_string(self.tool_source) if self.tool_source else template

    @cached_property
    def _takes_parts(self) -> tuple[bool, ...]:
        """True for each of the two if it shows a message whose content is a list of parts, and not one whose content is
        a string, as templates of some multimodal models do.
        """
        parts = template_turns.as_parts(_PROBE)
        return tuple(not self._shows(t, _PROBE) and self._shows(t, parts) for t in self._compiled)

    def _shows(self, template: jinja2.Template, content: object) -> bool:
        values = {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": True}
        try:
            return _PROBE in "".join(_bounded(template.generate({**values, **self.special_tokens})))
        except TooMuchWork:
            raise
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS):
            return False

    def render(self, messages: Sequence[ChatMessage], tools_json: str = "", how: Rendering = DEFAULT_RENDERING) -> str:
        """Return the prompt. Raises InvalidRequest. Does not limit CPU time or memory."""
        try:
            values = self._values(messages, tools_json, how)
            text = "".join(_bounded(self._compiled[bool(values["tools"])].generate(values)))
        except (TooMuchWork, MemoryError, RecursionError) as error:
            raise too_big() from error
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise InvalidRequest(f"the chat template rejects these messages: {error}") from error
        return _cut_at_mark(text) if how.continues_final else text

    def is_in_reasoning(self, text: str, messages: Sequence[ChatMessage], how: Rendering) -> bool:
        """True if the rendered text, or the message it continues, ends within the model's reasoning.

        Reasoning marks in other messages do not count.
        """
        if not self.has_reasoning:
            return False
        return template_marks.ends_in_reasoning(text, messages[-1].content if how.continues_final else "")

    def _values(self, messages: Sequence[ChatMessage], tools_json: str, how: Rendering) -> dict[str, object]:
        """Return the variables of the template. Raises InvalidRequest."""
        turns = [message.members() for message in messages]
        if how.continues_final:
            turns[-1]["content"] = messages[-1].content + _END_OF_MESSAGE
        tools = _parse_tools(tools_json)
        source = self.tool_source if tools and self.tool_source else self.source
        if _TEXT_ARGUMENTS.search(source):
            turns = [template_turns.with_text_arguments(turn) for turn in turns]
        if length := _ID_LENGTH.search(source):
            turns = [template_turns.with_ids_of_length(turn, int(length[1])) for turn in turns]
        if self.tool_call_format == "kimi_k2":
            turns = template_turns.with_numbered_ids(turns)
        if _NO_CONTENT.search(source):
            turns = [turn | {"content": turn["content"] or None} if turn.get("tool_calls") else turn for turn in turns]
        if self.tool_call_format == "openai":
            turns = [template_turns.with_thinking(turn) for turn in turns]
        elif _REASONING_NAMES.search(source):
            turns = [template_turns.with_reasoning(turn) for turn in turns]
        if tools and template_marks.TOOLS_IN_SYSTEM in source:
            turns = template_turns.with_tools_in_system(turns, tools)
        if self._takes_parts[bool(tools)]:
            turns = [turn | {"content": template_turns.as_parts(turn["content"])} for turn in turns]
        reserved = {
            "messages": turns,
            "tools": tools,
            "add_generation_prompt": how.adds_generation_prompt,
            "continue_final_message": how.continues_final,
            **self.special_tokens,
        }
        values = how.values()
        conflicts = sorted(values.keys() & (reserved.keys() | set(_TOKEN_KEYS) | self._sandbox.globals.keys()))
        if conflicts:
            raise InvalidRequest(
                f"chat_template_kwargs: {', '.join(conflicts)[:_MAX_SHOWN]} cannot be set by a request"
            )
        return {"documents": None} | values | reserved


def too_big() -> InvalidRequest:
    """Return the error for a rendering that exceeds a limit."""
    return InvalidRequest(
        f"the rendered chat is too big: the limits are {MAX_CHARS} characters and {MAX_RENDER_S:g} s of CPU time"
    )


def _bounded(chunks: Iterator[str]) -> Iterator[str]:
    """Yield the chunks. Raises TooMuchWork if they are too long together."""
    num_chars = 0
    for chunk in chunks:
        num_chars += len(chunk)
        if num_chars > MAX_CHARS:
            raise TooMuchWork("it makes too long a text")
        yield chunk


def _cut_at_mark(text: str) -> str:
    """Return the text up to the end of the message to continue, without trailing blanks if the template trims it."""
    before, mark, after = text.rpartition(_END_OF_MESSAGE.rstrip())
    if not mark:
        raise InvalidRequest("continue_final_message: this model's chat template does not show the last message")
    return before if after.startswith(" ") else before.rstrip()


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it renders its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block with its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _by_name(content: Mapping[str, object], file: str) -> dict[str, str]:
    """The templates in a file by name: some checkpoints have a list of them, such as one for chat with tools."""
    template = content.get("chat_template")
    if isinstance(template, str):
        return {_DEFAULT: template}
    if template is not None and not isinstance(template, list):
        raise ConfigurationError(f"{file}: chat_template must be a text or a list, got {template!r:.100}")
    return {
        str(entry.get("name")): entry["template"]
        for entry in template or ()
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return special tokens by the names that templates use.

    In the file they are strings, or objects with `content`.
    """
    entries = {key: config.get(key) for key in _TOKEN_KEYS}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in entries.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
