"""The program of the process that renders a model's chat template; `template_process.py` starts it.

Frames go over pipes: the length as four bytes, then JSON. The first frame has the template; the others are requests,
[[[role, content, extra_json], ...], tools_json, [the fields of Rendering]]. Answers are [kind, text]. The process ends
when its standard input is closed. It imports little, because each model of each router has one.
"""

import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, NoReturn

from mesh.domain.errors import ConfigurationError, MeshError
from router.text.chat import ChatMessage, ChatTemplate, Rendering, TooMuchWork

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 28
DONE, REFUSED, BROKEN = "done", "refused", "broken"
MAX_MEMORY_BYTES = 512 << 20
# The kernel counts whole seconds.
_MAX_STEP_S = 2
# The process's own exit status when it is over a limit and cannot answer.
OVER_LIMIT = 3


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


def main() -> None:
    """Run the template process until its standard input is closed."""
    try:
        _serve()
    except (MemoryError, RecursionError, TooMuchWork):
        os._exit(OVER_LIMIT)


def _serve() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # only the router reacts to what a terminal sends
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    limit_process()
    source, special_tokens, tool_source, max_render_s = read_frame(requests)
    template = ChatTemplate(source, special_tokens, tool_source)
    try:
        with limited_time(max_render_s):
            template.compile()
    except ConfigurationError as error:
        return write_frame(answers, (BROKEN, str(error)))
    write_frame(answers, (DONE, ""))
    while True:
        turns, tools_json, how = read_frame(requests)
        try:
            with limited_time(max_render_s):
                answer = DONE, template.render([ChatMessage(*turn) for turn in turns], tools_json, Rendering(*how))
        except MeshError as error:
            answer = REFUSED, str(error)
        write_frame(answers, answer)


def write_frame(pipe: IO[bytes], value: object, *, until_s: float | None = None) -> None:
    """Write one frame. Raises TimeoutError (an OSError) after `until_s` on the monotonic clock."""
    raw = json.dumps(value).encode()
    unwritten = memoryview(_LENGTH.pack(len(raw)) + raw)
    while unwritten:
        _await(pipe, select.POLLOUT, until_s)
        # No more than the pipe takes without blocking once it takes anything.
        unwritten = unwritten[os.write(pipe.fileno(), unwritten[: select.PIPE_BUF]) :]


def read_frame(pipe: IO[bytes], *, until_s: float | None = None) -> Any:
    """Read one frame. Raises EOFError at the end, TimeoutError (an OSError) after `until_s` on the monotonic clock."""
    (length,) = _LENGTH.unpack(_read_bytes(pipe, _LENGTH.size, until_s))
    if length > _MAX_FRAME_BYTES:
        raise EOFError("a frame is too long")
    return json.loads(_read_bytes(pipe, length, until_s))


def _read_bytes(pipe: IO[bytes], count: int, until_s: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        _await(pipe, select.POLLIN, until_s)
        chunk = os.read(pipe.fileno(), min(1 << 20, count - len(received)))
        if not chunk:
            raise EOFError("closed")
        received += chunk
    return bytes(received)


def _await(pipe: IO[bytes], event: int, until_s: float | None) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(None if until_s is None else 1000 * max(0.0, until_s - time.monotonic())):
        raise TimeoutError("the other process got no CPU time")


if __name__ == "__main__":
    main()
