"""A Jinja sandbox whose work is bounded, not only its reach.

Jinja's own sandbox keeps templates away from attributes, modules and mutation. It does not stop them from working for
ever, and a thread cannot be stopped from outside. So work is bounded where it happens: every turn of a loop and every
call looks at the time, and whatever could make a long text in one step is refused before it does: operators, `~`,
methods of strings, and filters that take a number. What is left in one step is linear in texts of at most _MAX_CHARS.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 8 << 20
_MAX_SMALL_NUMBER = 10_000
_MAX_NUMBER = 1 << 64
# A width such as %1000000d or {:>1000000}, or one that is an argument: %*d, {:{}}.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)|\{[^{}]*(\d{5,}|\{)")
# Not needed to write a conversation, and made for long outputs.
_REMOVED_GLOBALS = ("lipsum",)
# How Jinja marks filters that get a context as their first argument.
_PASS_MARK = "jinja_pass_arg"
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")


class TooMuchWork(SecurityError):
    """The template wants more time or memory than it may have."""


class _CheckedCode(CodeGenerator):
    """Compiles loops so that each turn is checked, and `a ~ b` so that its length is."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        """Rewrite the template before it is compiled."""
        for loop in list(node.find_all(nodes.For)):
            loop.iter = _call("checked_turns", loop.iter)
        for concat in list(node.find_all(nodes.Concat)):
            concat.nodes = [_call("checked_parts", nodes.List(concat.nodes, lineno=concat.lineno))]
        super().visit_Template(node, frame)


def _call(method: str, argument: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=argument.lineno)
    return nodes.Call(function, [argument], [], None, None, lineno=argument.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Render inside `with sandbox.budget(seconds):`. Any number of threads may, each with a budget of its own."""

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thread = threading.local()
        for name in _REMOVED_GLOBALS:
            self.globals.pop(name, None)
        for name in _SIZED_FILTERS:
            self.filters[name] = _checked(self.filters[name], _require_all_small)
        for name, check in (("format", _check_format), ("replace", _check_replace), ("join", _check_join)):
            self.filters[name] = _checked(self.filters[name], check)

    @contextmanager
    def budget(self, seconds: float) -> Iterator[None]:
        """Everything this thread renders inside must be done in time."""
        self._thread.deadline_s = time.monotonic() + seconds
        try:
            yield
        finally:
            self._thread.deadline_s = None

    def check_time(self) -> None:
        """Raise TooMuchWork if the budget is used up."""
        deadline_s = getattr(self._thread, "deadline_s", None)
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TooMuchWork("it takes too long")

    def checked_turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, with a look at the time before each."""
        for item in items:
            self.check_time()
            yield item

    def checked_parts(self, parts: list[Any]) -> str:
        """What `~` gives."""
        return self.concat(map(str, parts))

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a block, macro or `~` has made."""
        self.check_time()
        texts = list(parts)
        _require_chars(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` for a template."""
        __self.check_time()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str | int | float):
            _require_all_small(*args, *kwargs.values())
            _check_method(__obj.__name__, __obj.__self__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right` for a template."""
        self.check_time()
        if isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            _check_sequence(operator, left, right)
        elif operator == "**":
            _require_small(right)
            _require_small(left)
            _require_small(abs(right) * max(1, len(str(left))))
        elif isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) > _MAX_NUMBER:
            raise TooMuchWork("a number is too big")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format`, for templates without wide fields only."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise TooMuchWork("a format is too wide")
        return wrapped


def _check_sequence(operator: str, left: Any, right: Any) -> None:
    """Lengths of what an operator makes of texts and lists."""
    if operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif operator == "+":
        _require_chars(_length(left) + _length(right))
    elif operator == "*":
        times = right if isinstance(right, int) else left
        _require_chars(max(_length(left), _length(right)) * times if isinstance(times, int) else 0)


def _check_method(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Lengths of what a method of a text gives."""
    if name in ("encode", "to_bytes"):
        raise TooMuchWork("templates have no bytes")
    if name == "replace":
        _check_replace(owner, *args)
    elif name == "join":
        _check_join(*args, owner)
    elif name in ("translate", "expandtabs"):
        _require_chars(_length(owner) * 100)


def _checked(filter_: Any, check: Callable[..., None]) -> Any:
    """The filter, after `check` has seen its arguments (without the context that Jinja puts in front of some)."""
    passes = hasattr(filter_, _PASS_MARK)

    def checked(*args: Any, **kwargs: Any) -> Any:
        first = 1 if passes else 0
        if check is _check_join:
            args = (*args[:first], list(args[first]), *args[first + 1 :])  # a generator could be read only once
        check(*args[first:], *kwargs.values())
        return filter_(*args, **kwargs)

    if passes:
        setattr(checked, _PASS_MARK, getattr(filter_, _PASS_MARK))
    return checked


def _check_format(text: Any, *_: Any) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise TooMuchWork("a format is too wide")


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    _require_chars(_length(text) + str(text).count(str(old)) * len(str(new)))


def _check_join(items: Any, separator: Any = "", *_: Any) -> None:
    if isinstance(items, list | tuple | str):
        _require_chars(len(items) * len(str(separator)) + sum(map(_length, items)))


def _require_all_small(*values: Any) -> None:
    for value in values:
        _require_small(value)


def _require_small(value: Any) -> None:
    if isinstance(value, int | float) and abs(value) > _MAX_SMALL_NUMBER:
        raise TooMuchWork("a number is too big")


def _require_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TooMuchWork("it makes too long a text")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | Mapping) else 0
