"""Writes lines to a file descriptor that may be full, closed or unread. Callers neither block nor fail.

`put` adds lines to a bounded queue, and a thread writes them. Lines that do not fit into the queue, or that the system
refuses (full disk, closed pipe), are dropped and counted. When writing works again, a notice with their number comes
first.
"""

import contextlib
import io
import os
import queue
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

_MAX_QUEUED_BYTES = 4 << 20
_MAX_BATCH_BYTES = 64 << 10
_IDLE_S = 5.0
FLUSH_LIMIT_S = 2.0
_QUEUE_FULL = "the reader is too slow, or reads nothing"
_CLOSED = "the log is closed"


class LineWriter:
    """Writes to `fd` but does not close it. Call `close` before `fd` is closed: the system soon gives its number to
    another file or socket. `notice(num_dropped, reason)` renders the line that reports dropped lines. The writing
    thread calls `on_idle` after every few seconds without lines.
    """

    def __init__(
        self,
        fd: int,
        *,
        notice: Callable[[int, str], bytes] | None = None,
        on_idle: Callable[[], None] = lambda: None,
        max_queued_bytes: int = _MAX_QUEUED_BYTES,
    ) -> None:
        self.fd = fd
        self.num_dropped = 0
        self._notice = notice
        self._on_idle = on_idle
        self._max_queued_bytes = max_queued_bytes
        self._pid = 0
        self._is_closed = False
        self._lock = threading.RLock()  # a finaliser may write a line within `put`
        self._start()

    def put(self, data: bytes) -> None:
        """Queue `data`, one or more lines, or drop it. May be called on any thread, and in a forked child."""
        if self._pid != os.getpid() and not self._is_closed:
            self._start()
        with self._lock:
            if self._is_closed:
                self._count_dropped(data, _CLOSED)
            elif self._queued_bytes + len(data) > self._max_queued_bytes:
                self._count_dropped(data, _QUEUE_FULL)
            else:
                self._queued_bytes += len(data)
                self._queue.put(data)

    def flush(self, limit_s: float = FLUSH_LIMIT_S) -> bool:
        """Wait until all queued lines are written or dropped. Return False after `limit_s` seconds."""
        if self._is_closed or self._pid != os.getpid():
            return True
        written = threading.Event()
        self._queue.put(written)
        return written.wait(limit_s)

    def close(self, limit_s: float = FLUSH_LIMIT_S) -> None:
        """Write the queued lines and end the thread, which never uses `fd` again. Later lines are dropped and counted.
        Raises TimeoutError if a write still blocks after `limit_s` seconds. Idempotent.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(self._end)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"a write to file descriptor {self.fd} has blocked for {limit_s:g} s")

    def _start(self) -> None:
        """Set up queue and thread; again after a fork, because a child has no threads and may inherit a held lock."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._end = threading.Event()  # the last item of the queue
        self._queued_bytes = 0
        self._num_reported = self.num_dropped
        self._reason = ""
        self._is_torn = False
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                self._on_idle()
                self._write_lines(b"")
                continue
            flush = self._write_batch(item) if isinstance(item, bytes) else item
            if flush is not None:
                flush.set()
            if flush is self._end:
                return

    def _write_batch(self, first: bytes) -> threading.Event | None:
        """Write `first` and other queued lines with one call. Return the `flush` event that ended the batch, if any."""
        batch, num_bytes, flush = [first], len(first), None
        with contextlib.suppress(queue.Empty):
            while num_bytes < _MAX_BATCH_BYTES and flush is None:
                item = self._queue.get_nowait()
                if isinstance(item, bytes):
                    batch.append(item)
                    num_bytes += len(item)
                else:
                    flush = item
        self._write_lines(b"".join(batch))
        with self._lock:
            self._queued_bytes -= num_bytes
        return flush

    def _write_lines(self, data: bytes) -> None:
        num_dropped, notice = self.num_dropped, b""
        if self._notice is not None and num_dropped > self._num_reported:
            notice = self._notice(num_dropped - self._num_reported, self._reason)
        output = (b"\n" if self._is_torn else b"") + notice + data
        num_written, error = self._write(output)
        if num_written:
            self._is_torn = not output[:num_written].endswith(b"\n")
        if error is None:
            self._num_reported = num_dropped
        else:
            with self._lock:
                unwritten = output[num_written:] if num_written > len(output) - len(data) else data
                self._count_dropped(unwritten, error.strerror or type(error).__name__)

    def _write(self, data: bytes) -> tuple[int, OSError | None]:
        """Return the number of bytes written, and the error that stopped the write."""
        unwritten = memoryview(data)
        while unwritten:
            try:
                unwritten = unwritten[os.write(self.fd, unwritten) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.fd, select.POLLOUT)
                poll.poll()
            except OSError as error:
                return len(data) - len(unwritten), error
        return len(data), None

    def _count_dropped(self, data: bytes, reason: str) -> None:
        self.num_dropped += data.count(b"\n")
        self._reason = reason


class _Raw(io.RawIOBase):
    """A LineWriter with the interface of a raw file."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self._writer.put(piece)
        return len(piece)

    def fileno(self) -> int:
        return self._writer.fd

    def isatty(self) -> bool:
        return os.isatty(self._writer.fd)


def text_stream(writer: LineWriter) -> TextIO:
    """Return a text stream over `writer` that can replace sys.stdout or sys.stderr."""
    return io.TextIOWrapper(_Raw(writer), "utf-8", "backslashreplace", line_buffering=True)  # type: ignore[type-var]


_STEADY: list[LineWriter] = []  # those of steady_output


@contextlib.contextmanager
def steady_output() -> Iterator[None]:
    """Within the block, printing to stdout and stderr neither blocks nor fails. At the end of the block, queued lines
    are flushed for at most FLUSH_LIMIT_S; before `os._exit` call `flush_steady_output`.
    """
    with contextlib.ExitStack() as stack:
        for stream, redirect in (
            (sys.stdout, contextlib.redirect_stdout),
            (sys.stderr, contextlib.redirect_stderr),
        ):
            stream.flush()
            try:
                _STEADY.append(LineWriter(stream.fileno()))
            except io.UnsupportedOperation:  # the stream is in memory, as when a test captures the output
                continue
            stack.enter_context(redirect(text_stream(_STEADY[-1])))
        try:
            yield
        finally:
            flush_steady_output()
            _STEADY.clear()


def flush_steady_output() -> None:
    """Flush what was printed in a block of `steady_output`, within FLUSH_LIMIT_S."""
    flush_all(_STEADY)


def flush_all(writers: Iterable[LineWriter]) -> None:
    """Flush all `writers` before the process ends, within FLUSH_LIMIT_S in total."""
    until_s = time.monotonic() + FLUSH_LIMIT_S
    for writer in writers:
        writer.flush(max(0.0, until_s - time.monotonic()))


def make_private(fd: int) -> None:
    """If `fd` is a pipe, reopen it as non-blocking for this process only. C libraries that write to a full pipe then
    lose output instead of blocking their thread.
    """
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return
    with contextlib.suppress(OSError):  # there is no /proc, or the reader has closed the pipe
        opened = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(opened, fd)
        os.close(opened)
