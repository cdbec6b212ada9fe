"""A sender's arena: memory that it shares with the receivers of its machine, and the socket where they get it.

An arena is a memory file without a name (memfd) that one sender writes. Layout: one page of header (magic, nonce), then
payload. It is sealed against shrinking, which the receiver checks before it maps it: reading a mapped file that was cut
short would end the decode worker with SIGBUS. The sender hands out a read-only descriptor at a socket in the directory.
The connection stays open as long as the arena and its mapping: if the sender closes the arena or dies, the receiver
unmaps it. The memory is free once no process has it open. A socket that refuses connections has a dead owner.
"""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from kvtransfer.transports.link import Link, Serve

log = structlog.get_logger(__name__)

_MAGIC = b"tandem-kv-arena2"
_NONCE_BYTES = _TOKEN_BYTES = 32
_NAME = re.compile(r"tandem-kv-[0-9a-f]{32}")
_EARLY, _EARLY_S = ".new", 60.0
"""Name and longest age of a socket that does not listen yet."""
_CONNECT_S = 2.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_S = 1.0  # pause before the next receiver is let in, after the system had no room for one
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """Shared memory that this process owns, and the socket where others get it. Raises OSError if either is not
    available. Created on the event loop that serves the socket."""

    def __init__(self, directory: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.name = f"tandem-kv-{secrets.token_hex(16)}"
        self._path = Path(directory, self.name)
        self._loop = asyncio.get_running_loop()
        self.links_by_token: dict[bytes, Link] = {}  # by the token that its receiver got
        self.links_by_receiver: dict[
            tuple[str, str], Link
        ] = {}  # of them those that are identified, by address and incarnation
        self._pause: asyncio.TimerHandle | None = None
        with contextlib.ExitStack() as undo:
            fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            # Allocates the memory now: too little memory is an error here, not at a later write.
            os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(fd, num_bytes)
            self._memory[: len(_MAGIC) + _NONCE_BYTES] = _MAGIC + self.nonce
            self._shared_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            undo.callback(os.close, self._shared_fd)
            self._socket = _listen(directory, self.name)
            undo.pop_all()
        os.close(fd)
        self._loop.add_reader(self._socket, self._hand_out)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + num_bytes)."""
        return memoryview(self._memory)[offset : offset + num_bytes]

    def close(self) -> None:
        """Close the sockets and unmap the arena. Receivers that are reading it can finish."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._path.unlink(missing_ok=True)
        self._socket.close()
        for link in list(self.links_by_token.values()):
            link.close()
        self.links_by_token.clear()
        self.links_by_receiver.clear()
        os.close(self._shared_fd)
        with contextlib.suppress(BufferError):  # a view is still referenced; unmapped with its last reference
            self._memory.close()

    def _hand_out(self) -> None:
        try:
            receiver, _ = self._socket.accept()
        except OSError as error:  # the other side has gone, or must wait
            if error.errno in _NO_ROOM:  # the socket stays readable: without a pause the loop would only spin
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(_NO_ROOM_S, self._loop.add_reader, self._socket, self._hand_out)
            return
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            socket.send_fds(receiver, [token], [self._shared_fd])
        except OSError:
            receiver.close()
            return
        self.links_by_token[token] = Link(receiver, lambda _: self._forget(token))

    def _forget(self, token: bytes) -> None:
        """The receiver has closed its connection."""
        gone = self.links_by_token.pop(token)
        self.links_by_receiver = {
            receiver: link for receiver, link in self.links_by_receiver.items() if link is not gone
        }


class MappedArena:
    """A sender's arena, mapped for reading. `sender` is the connection that ends when the sender closes the arena or
    dies. Raises OSError."""

    is_broken = False

    def __init__(self, fd: int, num_bytes: int, nonce: bytes, sender: socket.socket, token: bytes) -> None:
        self.nonce = nonce
        self.token = token
        self._memory = mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
        self.view = memoryview(self._memory)
        self._sender = sender
        self._link: Link | None = None

    def watch(self, on_end: "Callable[[MappedArena], None]", serve: Serve) -> None:
        """Serve the sender's conversations. Calls `on_end` once the sender has closed the arena or is dead, unless this
        side closes it first."""
        self._link = Link(self._sender, lambda _: on_end(self), serve)

    def close(self) -> None:
        if self._link is None:
            self._sender.close()
        else:
            self._link.close()
        with contextlib.suppress(BufferError):  # unmapped with the last reference
            self.view.release()
            self._memory.close()


async def open_arena(directory: str, name: str, nonce: bytes, num_bytes: int) -> MappedArena | None:
    """Map the arena with this name and nonce. Return None if it is not on this host, or cannot be mapped."""
    if not _NAME.fullmatch(name) or len(nonce) != _NONCE_BYTES:
        return None
    try:
        async with asyncio.timeout(_CONNECT_S):
            fd, sender, token = await receive_fd(directory, name)
    except (OSError, TimeoutError):
        return None
    opened = None
    try:
        if _is_arena(fd, nonce, num_bytes):
            opened = MappedArena(fd, num_bytes, nonce, sender, token)
    except OSError as error:
        log.warning("a sender's shared memory cannot be mapped", error=str(error))
    finally:
        os.close(fd)
        if opened is None:
            sender.close()
    return opened


def _is_arena(fd: int, nonce: bytes, num_bytes: int) -> bool:
    is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK  # raises if it is no memory file
    is_whole = is_sealed and os.fstat(fd).st_size == num_bytes
    return bool(is_whole) and os.pread(fd, len(_MAGIC) + _NONCE_BYTES, 0) == _MAGIC + nonce


async def receive_fd(directory: str, name: str) -> tuple[int, socket.socket, bytes]:
    """Get the descriptor that a sender hands out, the connection to it, and its token. Raises OSError."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.setblocking(False)
        with _address(directory, name) as address:
            await loop.sock_connect(connection, address)
        readable = asyncio.Event()
        loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(connection)
        token, fds, _, _ = socket.recv_fds(connection, _TOKEN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise OSError(errno.ENOMSG, f"{name} handed out no descriptor")
        undo.pop_all()
    return fds[0], connection, token


def remove_orphans(directory: str) -> int:
    """Remove the sockets of dead owners. Return their number."""
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name.removesuffix(_EARLY))]
    except OSError:
        return 0
    removed = [name for name in names if _remove_if_orphan(directory, name)]
    if removed:
        log.info("removed sockets of senders that are gone", arenas=removed)
    return len(removed)


@contextlib.contextmanager
def _address(directory: str, name: str) -> Iterator[str]:
    """Yield a path of a file in the directory that is short enough for a socket's address. Raises OSError."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def _listen(directory: str, name: str) -> socket.socket:
    """Listen at a new socket that only this user can connect to. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    path, early = Path(directory, name), name + _EARLY
    try:
        with _address(directory, early) as address:
            listener.bind(address)
            Path(address).chmod(0o600)
            listener.listen()
            # Under its own name only now: another sender would remove a socket that does not listen yet.
            Path(address).rename(path)
    except OSError:
        listener.close()
        Path(directory, early).unlink(missing_ok=True)
        raise
    return listener


def _remove_if_orphan(directory: str, name: str) -> bool:
    path = os.path.join(directory, name)
    try:
        status = os.lstat(path)
        is_early = name.endswith(_EARLY) and time.time() - status.st_mtime < _EARLY_S
        if is_early or not stat.S_ISSOCK(status.st_mode):
            return False
        with _address(directory, name) as address, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            if connection.connect_ex(address) != errno.ECONNREFUSED:
                return False
        os.unlink(path)
    except OSError:  # gone meanwhile, or another user's
        return False
    return True
