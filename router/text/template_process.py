"""Renders a model's chat template in a dedicated process.

Templates come with checkpoints and are only partly trusted, and their input comes from clients. Inside the router a
template could hold the interpreter lock, and block every stream, for the duration of one step. In its own process it
has limits on CPU time and memory. A process that exceeds them ends, and the request is refused as too big. A process
that ends for any other reason says nothing about the request: another one is started and renders once more.

A single step, such as sorting long texts, cannot be interrupted from inside. So there are two limits on CPU time (a
signal that ends the rendering between two steps, and one that kills the process) and one on memory. The limits count
CPU time, so that a busy machine makes no template fail.

The process runs `template_program.py`, which describes what goes over its pipes. It has none of the router's secrets in
its environment.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import structlog

from mesh.domain.errors import ConfigurationError, InvalidRequest, NoWorkers, Overloaded, RouterStopping
from router.text import template_program
from router.text.chat import (
    DEFAULT_RENDERING,
    MAX_RENDER_S,
    ChatMessage,
    ChatTemplate,
    Rendering,
    too_big,
)
from router.text.template_program import DONE, OVER_LIMIT, read_frame, write_frame

log = structlog.get_logger(__name__)

# The process limits its own CPU time; this is for a machine so busy that the process gets none.
_MAX_WAIT_S = 60.0
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
_LIMIT_STATUSES = (OVER_LIMIT, -signal.SIGXCPU)


class TemplateProcess:
    """Renders one chat at a time. Methods block and are thread-safe. Call `close` at the end."""

    def __init__(self, template: ChatTemplate, *, max_render_s: float = MAX_RENDER_S) -> None:
        self._template = template
        self._max_render_s = max_render_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the process before the first rendering. Raises ConfigurationError if the template is broken."""
        with self._lock:
            try:
                self._running()
            except (OSError, EOFError) as error:
                raise ConfigurationError(
                    f"the chat template cannot be compiled: its process ended with {self._kill()}"
                ) from error

    def render(self, messages: Sequence[ChatMessage], tools_json: str = "", how: Rendering = DEFAULT_RENDERING) -> str:
        """Raises InvalidRequest, NoWorkers if the process ends twice, RouterStopping if it is closed, and Overloaded if
        it gets no CPU.
        """
        turns = [(turn.role, turn.content, turn.extra_json) for turn in messages]
        request = [turns, tools_json, (how.values_json, how.adds_generation_prompt, how.continues_final)]
        with self._lock:
            answer = self._try(request) or self._try(request)
        if answer is None:
            raise NoWorkers("the process of the chat template has ended twice; try again later")
        kind, text = answer
        if kind != DONE:
            raise InvalidRequest(text)
        return text

    def _try(self, request: object) -> tuple[str, str] | None:
        """Ask the process. Returns None if it has ended through no fault of the request."""
        try:
            return self._ask(self._running(), request)
        except TimeoutError as error:
            log.warning("chat template process got no CPU time", status=self._kill(), waited_s=_MAX_WAIT_S)
            raise Overloaded("the machine is too busy to render the chat; try again later") from error
        except (OSError, EOFError) as error:
            status = self._kill()
            if self._closed:
                raise RouterStopping("this router is stopping; try again") from error
            log.warning("chat template process ended", status=status, cause=str(error))
            if status in _LIMIT_STATUSES:
                raise too_big() from error
            return None

    def close(self) -> None:
        """End the process, even while it renders."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # a waiting render call gets an EOFError
        with self._lock:
            self._kill()

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if there is none. Raises OSError, EOFError, or ConfigurationError if the template
        is broken."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        if self._closed:
            raise EOFError("closed")
        self._process = subprocess.Popen(
            [sys.executable, "-m", template_program.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        template = self._template
        sent = [template.source, template.special_tokens, template.tool_source, self._max_render_s]
        kind, text = self._ask(self._process, sent)
        if kind != DONE:
            raise ConfigurationError(text)
        return self._process

    def _ask(self, process: "subprocess.Popen[bytes]", request: object) -> tuple[str, str]:
        """Raises OSError or EOFError if the process has ended or does not answer in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        until_s = time.monotonic() + _MAX_WAIT_S
        write_frame(process.stdin, request, until_s=until_s)
        kind, text = read_frame(process.stdout, until_s=until_s)
        return kind, text

    def _kill(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with process:
            process.wait()
        return process.returncode


def _environment() -> dict[str, str]:
    environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
