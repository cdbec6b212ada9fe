"""Shared-memory arenas: who may open them, what they refuse, and that slots and files come back."""

import asyncio
import errno
import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvtransfer.settings import TransferSettings
from kvtransfer.transports import arena as arenas
from kvtransfer.transports import open_receive_transports, open_send_transports
from kvtransfer.transports.arena import Arena, open_arena, receive_fd, remove_orphans
from kvtransfer.transports.base import Payload, TransportOffer
from kvtransfer.transports.shm import ShmReceiveTransport, ShmSendTransport, open_sender
from kvtransfer.transports.slots import ARENA_HEADER_BYTES
from mesh.domain.errors import ConfigurationError, TransferCorrupt, TransferFailed
from tests.defects import Repaired
from tests.waiting import until

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def settings(tmp_path: Path) -> TransferSettings:
    return TransferSettings(shm_dir=str(tmp_path), arena_bytes=ARENA_HEADER_BYTES + 2 * PAGE)


def names(settings: TransferSettings) -> list[str]:
    return os.listdir(settings.shm_dir)


def make_sender(settings: TransferSettings, max_chunk_bytes: int = PAGE) -> ShmSendTransport:
    transport = open_sender(settings, max_chunk_bytes)
    assert transport is not None
    return transport


def unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def orphan(directory: Path) -> Path:
    """A socket as a killed owner leaves it."""
    path = directory / f"tandem-kv-{os.urandom(16).hex()}"
    with (
        arenas._address(str(directory), path.name) as address,
        unix_socket() as listener,
    ):
        listener.bind(address)
        listener.listen()
    return path


@contextmanager
def handing_out(directory: Path, fd: int) -> Iterator[str]:
    """A sender of another make, whose socket hands out `fd`; yields its name."""
    name = f"tandem-kv-{'0' * 32}"
    loop = asyncio.get_running_loop()
    with (
        arenas._address(str(directory), name) as address,
        unix_socket() as listener,
    ):
        listener.bind(address)
        listener.listen()

        def hand_out() -> None:
            with listener.accept()[0] as connection:
                socket.send_fds(connection, [b"\0"], [fd])

        loop.add_reader(listener, hand_out)
        yield name
        loop.remove_reader(listener)


async def test_round_trip(settings: TransferSettings) -> None:
    sender, receiver = make_sender(settings), ShmReceiveTransport(settings)
    slot = await sender.slots.acquire(100)
    slot.buffer()[:] = bytes(range(100))
    source = await receiver.connect(sender.offer())
    assert source is not None
    assert bytes(source.fetch(slot.seal(), 100)) == bytes(range(100))
    source.close()
    receiver.close()
    slot.release(is_acknowledged=True)
    sender.close()
    assert names(settings) == []


async def test_sockets_are_private(settings: TransferSettings) -> None:
    sender = make_sender(settings)
    (name,) = names(settings)
    assert os.stat(os.path.join(settings.shm_dir, name)).st_mode & 0o777 == 0o600
    sender.close()


async def test_only_the_very_arena_is_opened(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), 2 * PAGE)
    good = (str(tmp_path), arena.name, arena.nonce, arena.num_bytes)
    opened = await open_arena(*good)
    assert opened is not None
    opened.close()
    fd, connection, _ = await receive_fd(good[0], arena.name)
    with connection, pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"read-only")
    os.close(fd)
    assert await open_arena(good[0], good[1], bytes(32), good[3]) is None
    assert await open_arena(good[0], good[1], b"", good[3]) is None
    assert await open_arena(good[0], good[1], good[2], good[3] + 1) is None
    assert await open_arena(str(tmp_path / "elsewhere"), *good[1:]) is None
    for name in (f"../{tmp_path.name}/{arena.name}", f"{arena.name}\n", f"./{arena.name}", "", "/etc/passwd"):
        assert await open_arena(good[0], name, good[2], good[3]) is None
    arena.close()


async def test_fifos_and_directories_do_not_block_or_break(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"tandem-kv-{'0' * 32}")
    (tmp_path / f"tandem-kv-{'1' * 32}").mkdir()
    (tmp_path / f"tandem-kv-{'2' * 32}").touch()
    for digit in "012":
        assert await open_arena(str(tmp_path), f"tandem-kv-{digit * 32}", bytes(32), PAGE) is None
    assert remove_orphans(str(tmp_path)) == 0
    assert len(os.listdir(tmp_path)) == 3


async def test_a_socket_of_an_older_make_is_passed_over_and_stays(tmp_path: Path) -> None:
    name = f"tandem-kv-{'0' * 32}"
    with arenas._address(str(tmp_path), name) as address, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        assert await open_arena(str(tmp_path), name, bytes(32), PAGE) is None
        assert remove_orphans(str(tmp_path)) == 0


async def test_a_file_that_could_be_cut_short_is_never_mapped(tmp_path: Path) -> None:
    """Reading a mapping behind the end of its file ends a process with SIGBUS."""
    nonce = bytes(32)
    header = b"tandem-kv-arena2" + nonce
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    for fd in (plain, unsealed):
        os.pwrite(fd, header.ljust(2 * PAGE, b"\0"), 0)
        with handing_out(tmp_path, fd) as name:
            assert await open_arena(str(tmp_path), name, nonce, 2 * PAGE) is None
        (tmp_path / name).unlink()
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with handing_out(tmp_path, unsealed) as name:
        opened = await open_arena(str(tmp_path), name, nonce, 2 * PAGE)
    assert opened is not None
    opened.close()
    for fd in (plain, unsealed):
        os.close(fd)


async def test_nobody_can_cut_an_arena_short(settings: TransferSettings) -> None:
    sender = make_sender(settings)
    fd, connection, _ = await receive_fd(settings.shm_dir, sender.offer().arena)
    with connection, pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{fd}", ARENA_HEADER_BYTES + 5)
    os.close(fd)
    sender.close()


async def test_a_sender_that_hands_out_nothing_is_passed_over(
    settings: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.transports.arena._CONNECT_S", 0.05)
    sender = make_sender(settings)
    monkeypatch.setattr(socket, "send_fds", lambda connection, *_: connection.send(b"\0"))
    assert await ShmReceiveTransport(settings).connect(sender.offer()) is None
    asyncio.get_running_loop().remove_reader(sender._arena._socket)  # as one that has stopped
    assert await ShmReceiveTransport(settings).connect(sender.offer()) is None
    sender.close()


async def test_an_arena_stays_mapped_between_transfers(settings: TransferSettings) -> None:
    sender, receiver = make_sender(settings), ShmReceiveTransport(settings)
    slot = await sender.slots.acquire(4)
    slot.buffer()[:] = b"good"
    for _ in range(2):  # the second time the sender is not asked
        source = await receiver.connect(sender.offer())
        assert source is not None
        assert bytes(source.fetch(slot.seal(), 4)) == b"good"
        source.close()
        asyncio.get_running_loop().remove_reader(sender._arena._socket)
    assert await receiver.connect(replace(sender.offer(), nonce=bytes(32))) is None
    slot.release(is_acknowledged=True)
    sender.close()
    receiver.close()


async def test_an_arena_is_unmapped_when_its_sender_has_gone_and_nobody_reads_it(settings: TransferSettings) -> None:
    sender, receiver = make_sender(settings), ShmReceiveTransport(settings)
    slot = await sender.slots.acquire(4)
    slot.buffer()[:] = b"good"
    payload, name = slot.seal(), sender.offer().arena
    source = await receiver.connect(sender.offer())
    assert source is not None
    slot.release(is_acknowledged=False)
    sender.close()
    await until(lambda: receiver._arenas.get(name) is None)
    assert bytes(source.fetch(payload, 4)) == b"good"
    source.close()
    assert len(receiver._arenas) == 0
    sender = make_sender(settings)
    source = await receiver.connect(sender.offer())
    assert source is not None
    source.close()
    assert len(receiver._arenas) == 1
    sender.close()
    await until(lambda: len(receiver._arenas) == 0)


async def test_a_receiver_that_goes_leaves_no_connection(settings: TransferSettings) -> None:
    sender, receiver = make_sender(settings), ShmReceiveTransport(settings)
    source = await receiver.connect(sender.offer())
    assert source is not None
    source.close()
    assert len(sender._arena.links_by_token) == 1
    receiver.close()
    await until(lambda: not sender._arena.links_by_token)
    sender.close()


async def test_without_a_thread_an_arena_is_passed_over(
    settings: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender would send conversations that nobody reads."""
    sender, receiver = make_sender(settings), ShmReceiveTransport(settings)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert await receiver.connect(sender.offer()) is None
    assert len(receiver._arenas) == 0
    await until(lambda: not sender._arena.links_by_token)
    sender.close()


async def test_without_descriptors_a_receiver_waits_and_the_loop_does_not_spin(
    settings: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.transports.arena._NO_ROOM_S", 0.2)
    num_tries = 0
    hand_out = Arena._hand_out

    def counted(arena: Arena) -> None:
        nonlocal num_tries
        num_tries += 1
        hand_out(arena)

    monkeypatch.setattr(Arena, "_hand_out", counted)
    sender = make_sender(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        arenas._address(settings.shm_dir, sender.offer().arena) as address,
        unix_socket() as connection,
    ):
        connection.connect(address)
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        try:
            await asyncio.sleep(0.1)
            assert num_tries == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: bool(sender._arena.links_by_token))
        _, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        os.close(*fds)
    sender.close()


@pytest.mark.parametrize("arena_bytes", [0, ARENA_HEADER_BYTES, (1 << 30) + 1])
async def test_offers_of_absurd_size_are_declined(settings: TransferSettings, arena_bytes: int) -> None:
    offer = TransportOffer("shm", f"tandem-kv-{'0' * 32}", bytes(32), arena_bytes)
    assert await ShmReceiveTransport(settings).connect(offer) is None


async def test_offsets_outside_of_the_arena_are_refused(settings: TransferSettings) -> None:
    sender = make_sender(settings)
    offer = sender.offer()
    receiver = ShmReceiveTransport(settings)
    source = await receiver.connect(offer)
    assert source is not None
    for offset in (0, ARENA_HEADER_BYTES - 1, offer.arena_bytes - 9, offer.arena_bytes, 2**64 - 1):
        with pytest.raises(TransferCorrupt):
            source.fetch(Payload(arena_offset=offset), 10)
    with pytest.raises(TransferCorrupt):
        source.fetch(Payload(inline=b"x", arena_offset=ARENA_HEADER_BYTES), 1)
    source.close()
    with pytest.raises(TransferFailed):
        source.fetch(Payload(arena_offset=ARENA_HEADER_BYTES), 10)
    receiver.close()
    sender.close()


async def test_waiters_get_slots_in_order_and_cancelled_ones_leave_nothing(settings: TransferSettings) -> None:
    sender = make_sender(settings)
    assert sender.slots.num_slots == 2
    held = [await sender.slots.acquire(10), await sender.slots.acquire(PAGE)]
    order: list[int] = []

    async def wait_for_slot(number: int) -> None:
        slot = await sender.slots.acquire(10)
        order.append(number)
        slot.release(is_acknowledged=True)

    waiters = [asyncio.create_task(wait_for_slot(number)) for number in range(4)]
    await asyncio.sleep(0)
    waiters[1].cancel()
    held[0].release(is_acknowledged=True)
    held[0].release(is_acknowledged=True)  # idempotent
    await asyncio.gather(*waiters, return_exceptions=True)
    assert order == [0, 2, 3]
    held[1].release(is_acknowledged=True)
    assert sender.slots.num_free == 2
    with pytest.raises(TransferFailed, match="does not fit"):
        await sender.slots.acquire(PAGE + 1)
    sender.close()


async def test_an_arena_has_room_for_the_largest_chunk(settings: TransferSettings) -> None:
    sender = make_sender(settings, 5 * PAGE + 1)
    assert sender.slots.num_slots == 1
    (await sender.slots.acquire(5 * PAGE + 1)).release(is_acknowledged=True)
    sender.close()


async def test_orphans_are_removed_and_living_arenas_stay(settings: TransferSettings) -> None:
    directory = Path(settings.shm_dir)
    living = Arena(str(directory), 2 * PAGE)
    left, other = orphan(directory), directory / "tandem-kv-not-ours"
    other.touch()
    sender = make_sender(settings)
    assert not left.exists()
    assert set(names(settings)) == {living.name, other.name, sender.offer().arena}
    living.close()
    sender.close()


def test_a_socket_that_never_listened_is_removed_after_a_while(tmp_path: Path) -> None:
    early = orphan(tmp_path).rename(tmp_path / f"tandem-kv-{'0' * 32}.new")
    assert remove_orphans(str(tmp_path)) == 0
    os.utime(early, (0, 0))
    assert remove_orphans(str(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_no_directory_no_orphans(tmp_path: Path) -> None:
    assert remove_orphans(str(tmp_path / "nowhere")) == 0


async def test_without_room_other_transports_are_used(
    settings: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert [transport.name for transport in open_send_transports(settings, PAGE)] == ["grpc"]
    assert names(settings) == []
    only_shm = TransferSettings(transports=("shm",), shm_dir=settings.shm_dir)
    with pytest.raises(ConfigurationError, match="none of the KV transports shm works here"):
        open_send_transports(only_shm, PAGE)


@pytest.mark.parametrize("missing", [(os, "memfd_create"), (socket.socket, "bind")], ids=["memfd", "sockets"])
async def test_where_memory_cannot_be_shared_other_transports_are_used(
    settings: TransferSettings, monkeypatch: pytest.MonkeyPatch, repaired: Repaired, missing: tuple[object, str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(*missing, unsupported)
    assert [transport.name for transport in open_send_transports(settings, PAGE)] == ["grpc"]
    assert names(settings) == []
    repaired("S6", "a folder without sockets: gRPC carries the KV, no file is left")


def test_unknown_transports_and_senseless_settings_are_named() -> None:
    with pytest.raises(ConfigurationError, match="no KV transport 'rdma'; choose from shm, grpc"):
        open_receive_transports(TransferSettings(transports=("rdma",)))
    for change in ({"transports": ()}, {"chunk_bytes": 0}, {"chunk_bytes": 9 << 20}, {"credit_chunks": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(change))):
            TransferSettings(**change)
