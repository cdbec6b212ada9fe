"""The sandbox of chat templates: Jinja's own, in a process of its own (template_process.py), with limits on resources.

Jinja's sandbox denies templates access to attributes, modules and mutation. It does not stop them from running forever
or filling the memory, and a single step, such as sorting long texts, cannot be interrupted from inside. So there are
two limits on CPU time (a signal that ends the rendering between two steps, and one that kills the process) and one on
memory. The limits count CPU time, so that a busy machine makes no template fail.
"""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S = 1.0
# The kernel counts whole seconds.
_MAX_STEP_S = 2
MAX_MEMORY_BYTES = 512 << 20
# Not needed to render a conversation, and meant for long outputs.
_REMOVED_GLOBALS = ("lipsum",)


class TooMuchWork(SecurityError):
    """The template exceeds its limit on time or memory."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for untrusted templates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _REMOVED_GLOBALS:
            self.globals.pop(name, None)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` for a template. Bytes are denied, because the sandbox does not check their methods."""
        if getattr(__obj, "__name__", "") in ("encode", "to_bytes"):
            raise SecurityError("templates have no bytes")
        return super().call(__context, __obj, *args, **kwargs)


def limit_process() -> None:
    """Limit this process's memory for good, and disable core files."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _time_is_up)


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TooMuchWork in the body after `seconds` of CPU time; a step of _MAX_STEP_S more kills the process.

    Only for the main thread of a dedicated process, after `limit_process`.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    end_s = int(used.ru_utime + used.ru_stime + seconds) + _MAX_STEP_S
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _time_is_up(number: int, frame: FrameType | None) -> NoReturn:
    raise TooMuchWork("it takes too long")
