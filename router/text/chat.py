"""Chat templates: Jinja, sandboxed, from the operator's model folder only.

Templates see what Hugging Face transformers shows them: messages, tools, add_generation_prompt, the special tokens,
`raise_exception`, `strftime_now`, a `tojson` filter that leaves HTML alone, loop controls, and `{% generation %}`.
Rendering is bounded in time and size (`sandbox.py`), because messages come from clients.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mesh.domain.errors import ConfigurationError, InvalidRequest
from mesh.model_files import read_json
from router.text.sandbox import MAX_CHARS, BoundedSandbox, TooMuchWork

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MAX_RENDER_S = 1.0
_MAX_INDENT = 16
# What a template's code can raise beside Jinja's own errors.
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# By what is in the templates of each format's models.
_TOOL_CALLS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "hermes": lambda source: "<tool_call>" in source and "<function=" not in source,
        "mistral": lambda source: "[TOOL_CALLS]" in source,
        "llama3_json": lambda source: "<|python_tag|>" in source,
    }
)
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)


def parse_extra(text: str) -> dict[str, Any]:
    """What a client wants the template to see of a turn beside role and content. Raises InvalidRequest."""
    extra = _parse(text, "extra_json", {})
    if not isinstance(extra, dict):
        raise InvalidRequest("extra_json must be a JSON object")
    return extra


def parse_tools(text: str) -> list[Any] | None:
    """Functions the model may call. Raises InvalidRequest."""
    tools = _parse(text, "tools_json", None)
    if not isinstance(tools, list | None):
        raise InvalidRequest("tools_json must be a JSON array")
    return tools


def _parse(text: str, name: str, default: Any) -> Any:
    try:
        return json.loads(text) if text else default
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} is not valid JSON") from None


class ChatTemplate:
    """A model's way of writing a conversation as one text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`tool_source` is for conversations with tools, if they have a template of their own.

        Raises ConfigurationError if a template has a syntax error.
        """
        self._special_tokens = dict(special_tokens)
        self.tool_call_format = next((name for name, marks in _TOOL_CALLS.items() if marks(tool_source or source)), "")
        """How the model writes calls of functions: a key of _TOOL_CALLS, or "" if the template does not say."""
        try:
            self._sandbox = _environment()
            self._template = self._sandbox.from_string(source)
            self._tool_template = self._sandbox.from_string(tool_source) if tool_source else self._template
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise ConfigurationError(f"the chat template is broken: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate | None":
        """The folder's template: chat_template.jinja, else tokenizer_config.json; None if neither has one.

        Raises ConfigurationError.
        """
        config = read_json(model_dir / "tokenizer_config.json", optional=True)
        named = _by_name(config.get("chat_template"))
        path = model_dir / "chat_template.jinja"
        if path.exists():
            named[_DEFAULT] = _read_text(path)
        if _DEFAULT not in named:
            return None
        beside = read_json(model_dir / "special_tokens_map.json", optional=True)
        return cls(named[_DEFAULT], _special_tokens(beside | config), named.get(_WITH_TOOLS))

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None = None) -> str:
        """The prompt, ready for the assistant's turn. Raises InvalidRequest. May take long: run it on a thread."""
        turns = [{**message.extra, "role": message.role, "content": message.content} for message in messages]
        values = {"messages": turns, "tools": tools, "add_generation_prompt": True, **self._special_tokens}
        try:
            template = self._tool_template if tools else self._template
            with self._sandbox.budget(_MAX_RENDER_S):
                return "".join(self._bounded(template.generate(values)))
        except (TooMuchWork, MemoryError, RecursionError) as error:
            raise InvalidRequest(
                f"the rendered chat is too big: the limits are {MAX_CHARS} characters and {_MAX_RENDER_S:g} s"
            ) from error
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise InvalidRequest(f"the chat template rejects these messages: {error}") from error

    def _bounded(self, chunks: Iterator[str]) -> Iterator[str]:
        """Raises TooMuchWork when all chunks together are too big, or too late."""
        num_chars = 0
        for chunk in chunks:
            num_chars += len(chunk)
            self._sandbox.check_time()
            if num_chars > MAX_CHARS:
                raise TooMuchWork("it makes too long a text")
            yield chunk


def _environment() -> BoundedSandbox:
    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
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


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if isinstance(indent, int) and indent > _MAX_INDENT:
        raise TooMuchWork("tojson indents too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _by_name(template: Any) -> dict[str, str]:
    """Some checkpoints have a list of named templates: one for chat, perhaps one for chat with tools."""
    if isinstance(template, str):
        return {_DEFAULT: template}
    entries = template if isinstance(template, list) else []
    return {
        str(entry.get("name")): entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use. In the file each is a string, or an object with `content`."""
    found = {key: config.get(key) for key in _TOKEN_KEYS}
    return {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in found.items()
        if isinstance(value, str | dict)
    }
