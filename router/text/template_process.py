"""Renders a model's chat template in a dedicated process.

Templates come with checkpoints and are only partly trusted, and their input comes from clients. Inside the router a
template could hold the interpreter lock, and block every stream, for the duration of one step. In its own process it
has limits on CPU time and memory. A process that exceeds them ends, and the request is refused as too big. A process
that ends for any other reason says nothing about the request: another one is started and renders once more.

A single step, such as sorting long texts, cannot be interrupted from inside. So there are two limits on CPU time (a
signal that ends the rendering between two steps, and one that kills the process) and one on memory. The limits count
CPU time, so that a busy machine makes no template fail.

Frames go over pipes: the length as four bytes, then JSON. The first frame has the template; the others are requests,
[[[role, content, extra_json], ...], tools_json, [the fields of Rendering]]. Answers are [kind, text]. The process has
none of the router's secrets in its environment, and ends when its standard input is closed.
"""

import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, NoReturn

import structlog

from mesh.domain.errors import ConfigurationError, InvalidRequest, MeshError, NoWorkers, Overloaded
from router.text.chat import (
    DEFAULT_RENDERING,
    MAX_RENDER_S,
    ChatMessage,
    ChatTemplate,
    Rendering,
    TooMuchWork,
    too_big,
)

log = structlog.get_logger(__name__)

# The process limits its own CPU time; this is for a machine so busy that the process gets none.
_MAX_WAIT_S = 60.0
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 28
_DONE, _REFUSED, _BROKEN = "done", "refused", "broken"
MAX_MEMORY_BYTES = 512 << 20
# The kernel counts whole seconds.
_MAX_STEP_S = 2
# The process's own exit status when it is over a limit and cannot answer.
_OVER_LIMIT = 3
_LIMIT_STATUSES = (_OVER_LIMIT, -signal.SIGXCPU)


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
        """Raises InvalidRequest, NoWorkers if the process ends twice or is closed, and Overloaded if it gets no CPU."""
        turns = [(turn.role, turn.content, turn.extra_json) for turn in messages]
        request = [turns, tools_json, (how.values_json, how.adds_generation_prompt, how.continues_final)]
        with self._lock:
            answer = self._try(request) or self._try(request)
        if answer is None:
            raise NoWorkers("the process of the chat template has ended twice; try again later")
        kind, text = answer
        if kind != _DONE:
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
                raise NoWorkers("this router is stopping; try again") from error
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
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        template = self._template
        sent = [template.source, template.special_tokens, template.tool_source, self._max_render_s]
        kind, text = self._ask(self._process, sent)
        if kind != _DONE:
            raise ConfigurationError(text)
        return self._process

    def _ask(self, process: "subprocess.Popen[bytes]", request: object) -> tuple[str, str]:
        """Raises OSError or EOFError if the process has ended or does not answer in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        _write(process.stdin, request)
        kind, text = _read(process.stdout, until_s=time.monotonic() + _MAX_WAIT_S)
        return kind, text

    def _kill(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with suppress(BrokenPipeError), process:  # a request that could not be written is still in the pipe's buffer
            process.wait()
        return process.returncode


def _environment() -> dict[str, str]:
    environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _write(pipe: IO[bytes], value: object) -> None:
    raw = json.dumps(value).encode()
    pipe.write(_LENGTH.pack(len(raw)) + raw)
    pipe.flush()


def _read(pipe: IO[bytes], *, until_s: float | None = None) -> Any:
    """Read one frame. Raises EOFError at the end, TimeoutError (an OSError) after `until_s` on the monotonic clock."""
    (length,) = _LENGTH.unpack(_read_bytes(pipe, _LENGTH.size, until_s))
    if length > _MAX_FRAME_BYTES:
        raise EOFError("a frame is too long")
    return json.loads(_read_bytes(pipe, length, until_s))


def _read_bytes(pipe: IO[bytes], count: int, until_s: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        if until_s is not None:
            _await_bytes(pipe, until_s)
        chunk = os.read(pipe.fileno(), min(1 << 20, count - len(received)))
        if not chunk:
            raise EOFError("closed")
        received += chunk
    return bytes(received)


def _await_bytes(pipe: IO[bytes], until_s: float) -> None:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if not poll.poll(1000 * max(0.0, until_s - time.monotonic())):
        raise TimeoutError("no answer in time")


def main() -> None:
    """Run the template process until its standard input is closed."""
    try:
        _serve()
    except (MemoryError, RecursionError, TooMuchWork):
        os._exit(_OVER_LIMIT)


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the router reacts to Ctrl-C in a terminal
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    limit_process()
    source, special_tokens, tool_source, max_render_s = _read(requests)
    template = ChatTemplate(source, special_tokens, tool_source)
    try:
        with limited_time(max_render_s):
            template.compile()
    except ConfigurationError as error:
        return _write(answers, (_BROKEN, str(error)))
    _write(answers, (_DONE, ""))
    while True:
        turns, tools_json, how = _read(requests)
        try:
            with limited_time(max_render_s):
                answer = _DONE, template.render([ChatMessage(*turn) for turn in turns], tools_json, Rendering(*how))
        except MeshError as error:
            answer = _REFUSED, str(error)
        _write(answers, answer)


if __name__ == "__main__":
    main()
