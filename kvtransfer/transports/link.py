"""A link: conversations of two workers of one machine at a Unix socket, at a fraction of the cost of gRPC.

It is the connection at which a receiver has got a sender's arena (shm.py). The sender knows whose it is, because the
receiver has proved so in a conversation over gRPC, which asks for the mesh's credentials. Each packet has the number of
a call, its kind, and a body:

    sender                receiver
    MESSAGE       ──▶
                  ◀──     MESSAGE ...
    END           ──▶                   the sender has given up
                  ◀──     END           the class and text of the error with which the call fails

A call that succeeds has no end: its last message says so. When either side closes the socket or dies, all calls end.

The sender's end reads on the event loop. The receiver's end has a thread that reads, and may do what a message asks for
before it reads the next one (`Call.take`): so a chunk costs no hand-off between threads. If that hangs, another thread
takes over the reading, so that other calls go on.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable

from mesh.domain.errors import MeshError, WorkerLost
from mesh.rpc.status import details_of, named_error
from mesh.tasks import call_on, spawn

_HEAD = struct.Struct("<QB")
_MESSAGE, _END = 0, 1
_MAX_PACKET_BYTES = 64 << 10
_MAX_WAITING = 1024
"""Packets that wait until the other side reads, and messages of a call that wait for their reader. Credit and leases
allow far fewer, so with more of them a side is broken."""
_PACKETS_A_TURN = 16
_HANGS_AFTER_S = 0.5
_MAX_READERS = 4


Work = Callable[[], None]


class Call:
    """One conversation. All methods but `send` run on the event loop."""

    def __init__(self, link: "Link", number: int) -> None:
        self._link = link
        self._number = number
        self._bodies: deque[bytes] = deque()
        self._error: MeshError | None = None
        self._failure: BaseException | None = None
        self._waiting: asyncio.Future[None] | None = None
        self.on_end: Callable[[], object] = _nothing
        """Called when the other side has ended the call."""
        self.take: Callable[[bytes], Work | None] = _leave_it
        """At the receiver's end: called with each message, one after the other, on the thread that reads. That thread
        then does the returned work, and may hang in it. None leaves the message to `read`."""

    def send(self, body: bytes) -> None:
        """Send a message, from any thread. Raises the error that has ended the call."""
        if self._error is not None:
            raise self._error
        self._link.send(self._number, _MESSAGE, body)

    async def read(self) -> bytes:
        """Return the next message, to one reader at a time. Raises the error that ended the call, behind the messages
        before it."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._bodies:
                return self._bodies.popleft()
            if self._error is not None:
                raise self._error
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def fail(self, error: BaseException) -> None:
        """Let `read` raise `error` from now on."""
        self._failure = error
        self._wake()

    def leave(self, error: MeshError | None = None) -> None:
        """Leave the call, and tell the other side of the error, unless it has ended the call. Idempotent."""
        if self._error is None:
            self._error = error or WorkerLost("the call is over")
            if error is not None:
                self._link.send(self._number, _END, f"{type(error).__name__}\0{details_of(error)}".encode())
        self._link.forget(self._number)

    def put(self, body: bytes) -> None:
        self._bodies.append(body)
        self._wake()

    def end(self, error: MeshError) -> None:
        """The other side has ended the call, or is gone."""
        if self._error is None:
            self._error = error
            self._wake()
            self.on_end()

    @property
    def num_unread(self) -> int:
        return len(self._bodies)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


Serve = Callable[[Call], Awaitable[None]]


class Link:
    """One end. The sender opens calls. At the receiver's end `serve` runs each call in a task of its own; it must not
    raise. `on_end` is called when the other side has gone or breaks the rules, but not by `close`. All methods but
    `send` run on the event loop.
    """

    def __init__(self, connection: socket.socket, on_end: "Callable[[Link], None]", serve: Serve | None = None) -> None:
        self._socket = connection
        self._on_end = on_end
        self._serve = serve
        self._calls: dict[int, Call] = {}
        self._num_opened = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._has_thread = serve is not None
        self._reading = threading.Lock()
        self._reader = 0  # the number of the thread that reads; those before it hang, or have ended
        self._num_readers = 0
        self._working_s: float | None = None  # since when the reader has been at work for a call
        self._look: asyncio.TimerHandle | None = None
        self._socket.setblocking(self._has_thread)  # the loop's socket must not block, the thread's must
        if serve is None:
            self._loop.add_reader(connection, self._read_some)
        else:
            self._start_reader()

    def call(self) -> Call:
        self._num_opened += 1
        call = self._calls[self._num_opened] = Call(self, self._num_opened)
        if not self._is_open:
            call.end(_lost())
        return call

    def send(self, number: int, kind: int, body: bytes) -> None:
        """Send a packet, now or when the other side has read others. A packet that is too large ends the link."""
        packet = _HEAD.pack(number, kind) + body
        with self._sending:
            if not self._is_open:
                return
            is_broken = len(self._unsent) > _MAX_WAITING or len(packet) > _MAX_PACKET_BYTES
            if not is_broken and not self._unsent:
                try:
                    self._socket.send(packet, socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:
                    pass
                except OSError:
                    is_broken = True
            self._unsent.append(packet)
        call_on(self._loop, self._fail if is_broken else self._write_later)

    def forget(self, number: int) -> None:
        """Drop what still comes for this call."""
        self._calls.pop(number, None)

    def close(self) -> None:
        """Close the connection and end all calls; idempotent."""
        with self._sending:
            if not self._is_open:
                return
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            if self._look is not None:
                self._look.cancel()
            if self._has_thread:
                with contextlib.suppress(OSError):  # the other side has gone
                    self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes the socket
            else:
                self._socket.close()
        self._unsent.clear()
        for call in list(self._calls.values()):
            call.end(_lost())
        self._calls.clear()

    def _fail(self) -> None:
        if self._is_open:
            self.close()
            self._on_end(self)

    def _write_later(self) -> None:
        if self._is_open:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._sending:
            try:
                while self._unsent:
                    self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
                    self._unsent.popleft()
            except BlockingIOError:
                return
            except OSError:
                call_on(self._loop, self._fail)
            self._loop.remove_writer(self._socket)

    def _read_some(self) -> None:
        for _ in range(_PACKETS_A_TURN):
            try:
                packet = self._socket.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not self._is_open:
                return
            if len(packet) < _HEAD.size:
                self._fail()
                return
            number, kind = _HEAD.unpack_from(packet)
            self._arrived(number, kind, packet[_HEAD.size :])

    def _start_reader(self) -> None:
        number = self._reader + 1
        threading.Thread(target=self._read_all, args=(number,), name="kv-link", daemon=True).start()
        self._reader, self._num_readers = number, self._num_readers + 1

    def _read_all(self, reader: int) -> None:
        """The thread of a receiver's end, or one that has taken over from it."""
        while len(packet := self._receive()) >= _HEAD.size:
            number, kind = _HEAD.unpack_from(packet)
            body = packet[_HEAD.size :]
            call = self._calls.get(number)
            work = call.take(body) if call is not None and kind == _MESSAGE else None
            if work is None:
                call_on(self._loop, self._arrived, number, kind, body)
                continue
            self._working_s = time.monotonic()
            work()
            with self._reading:
                if self._reader != reader:
                    self._num_readers -= 1
                    return
                self._working_s = None
        with self._sending:
            self._has_thread = False
            if not self._is_open:
                self._socket.close()
                return
        call_on(self._loop, self._fail)

    def _look_at_reader(self) -> None:
        """While there are calls: let another thread read if the one that does hangs."""
        with self._reading:
            hangs = self._working_s is not None and time.monotonic() - self._working_s >= _HANGS_AFTER_S
            if hangs and self._num_readers < _MAX_READERS:
                self._working_s = None
                with contextlib.suppress(RuntimeError):  # the system has no thread for it
                    self._start_reader()
        self._look = self._loop.call_later(_HANGS_AFTER_S, self._look_at_reader) if self._tasks else None

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_MAX_PACKET_BYTES)
        except OSError:
            return b""

    def _arrived(self, number: int, kind: int, body: bytes) -> None:
        call = self._calls.get(number)
        if call is None and kind == _MESSAGE and self._serve is not None and number > self._num_opened:
            self._num_opened = number
            call = self._calls[number] = Call(self, number)
            spawn(self._tasks, self._run(call, self._serve))
            self._look = self._look or self._loop.call_later(_HANGS_AFTER_S, self._look_at_reader)
        if call is None:  # it is over on this side
            return
        if kind == _END:
            self._calls.pop(number)
            name, _, text = body.decode(errors="replace").partition("\0")
            call.end(named_error(name, text))
        elif call.num_unread >= _MAX_WAITING:
            self._fail()
        else:
            call.put(body)

    async def _run(self, call: Call, serve: Serve) -> None:
        try:
            if self._is_open:  # else it was closed in the same turn
                await serve(call)
        finally:
            call.leave()


def _lost() -> MeshError:
    return WorkerLost("the connection has ended")


def _nothing() -> None:
    return


def _leave_it(body: bytes) -> None:
    return None
