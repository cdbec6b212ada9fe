"""The transports "nixl" and "mooncake": a receiver reads the sender's memory, and what happens when it cannot.

The engine "plain" copies within this process. The libraries' own engines are tested where they are installed.
"""

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtransfer import ExpectedTransfer, TransferSettings
from kvtransfer.transports import memory_reads, open_receive_transports, open_send_transports
from kvtransfer.transports.base import Payload, TransportOffer
from kvtransfer.transports.memory_reads import ReadReceiveTransport, ReadSendTransport
from kvtransfer.transports.read_engines import MOONCAKE, NIXL, ReadEngine, ReadLibrary, Remote
from kvtransfer.transports.slots import ARENA_HEADER_BYTES
from mesh.domain.errors import ConfigurationError, TransferCorrupt, TransferFailed
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION
from tests.service.transfer_pair import RESERVATION, Pair, pair_threads, soon
from tests.waiting import LIMIT_S

_LIBRARIES = {library.name: library for library in (NIXL, MOONCAKE)}


class PlainEngine(ReadEngine):
    """Copies within this process. `fails`: reads fail from now on. `goes_on`: reads wait for it. `wrong`: memory that
    was given up while it was read, and registrations on the event loop's thread."""

    fails = threading.Event()
    goes_on = threading.Event()
    num_reading = 0
    wrong: ClassVar[list[str]] = []
    started: ClassVar[list["PlainEngine"]] = []

    def __init__(self, host: str) -> None:
        self.registered: dict[int, int] = {}
        self.num_reached = 0
        self.unregister_fails = 0
        self.started.append(self)

    @classmethod
    def begin(cls) -> None:
        """Forget all that was before."""
        cls.fails.clear()
        cls.goes_on.set()
        cls.wrong.clear()
        cls.started.clear()

    def register(self, address: int, num_bytes: int) -> None:
        if threading.current_thread() is threading.main_thread():
            self.wrong.append("registered on the event loop")
        self.registered[address] = num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        if PlainEngine.num_reading:
            self.wrong.append("memory was given up while it was read")
        if self.unregister_fails:
            self.unregister_fails -= 1
            raise RuntimeError("cannot unregister")
        assert self.registered.pop(address) == num_bytes

    def rendezvous(self, address: int) -> Mapping[str, bytes]:
        return {"address": address.to_bytes(8, "little")}

    def reach(self, rendezvous: Mapping[str, bytes]) -> Remote:
        self.num_reached += 1
        return PlainRemote(self, int.from_bytes(rendezvous["address"], "little"))


class PlainRemote(Remote):
    def __init__(self, engine: PlainEngine, address: int) -> None:
        self._engine = engine
        self._address = address

    def read(self, target: int, offset: int, num_bytes: int, timeout_s: float) -> None:
        PlainEngine.num_reading += 1
        try:
            assert PlainEngine.goes_on.wait(LIMIT_S)
            if PlainEngine.fails.is_set():
                raise RuntimeError("the other side is gone")
            assert target in self._engine.registered
            ctypes.memmove(target, self._address + offset, num_bytes)
        finally:
            PlainEngine.num_reading -= 1

    def close(self) -> None:
        if PlainEngine.num_reading:
            PlainEngine.wrong.append("the sender was forgotten while it was read")
        self._engine.num_reached -= 1


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a transport by PlainEngine. Nothing wrong has happened at the test's end."""
    PlainEngine.begin()
    monkeypatch.setattr(memory_reads, "_LIBRARIES", {"nixl": ReadLibrary("nixl", "json", PlainEngine)})
    yield "nixl"
    assert PlainEngine.wrong == []


@pytest.fixture(params=["plain", "nixl", "mooncake"])
def name(request: pytest.FixtureRequest) -> str:
    """The name of a transport that works here."""
    if request.param == "plain":
        return str(request.getfixturevalue("plain"))
    reason = _LIBRARIES[request.param].why_not()
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture
async def pair(name: str, tmp_path: Path) -> AsyncIterator[Pair]:
    async with Pair(tmp_path, name, trust_fabric=True).running() as pair:
        yield pair


def sending(pair: Pair) -> ReadSendTransport:
    transport = pair.transports[0]
    assert isinstance(transport, ReadSendTransport)
    return transport


def receiving(pair: Pair) -> ReadReceiveTransport:
    transport = pair.receiver._transports[0]
    assert isinstance(transport, ReadReceiveTransport)
    return transport


async def offered(pair: Pair) -> TransportOffer:
    path = await sending(pair).path(pair.server.address, INCARNATION)
    assert path is not None
    return path.offer()


async def test_transfers_share_what_reaches_the_sender(pair: Pair) -> None:
    names = [f"t{number}" for number in range(6)]
    transfers = [pair.start(ExpectedTransfer(name, 1, (4, 9, 2), 0, 11)) for name in names]
    for transfer in transfers:
        result = await transfer.commit(11, FIRST_TOKEN)
        assert result.transport == pair.settings.transports[0]
    assert len(receiving(pair).senders) == 1
    await pair.require_working()


async def test_a_receiver_accepts_only_memory_that_it_has_read(pair: Pair) -> None:
    offer = await offered(pair)
    for wrong in (
        replace(offer, nonce=bytes(32)),
        replace(offer, nonce=b""),
        replace(offer, arena_bytes=ARENA_HEADER_BYTES),
        replace(offer, arena_bytes=pair.settings.max_arena_bytes + 1),
        replace(offer, rendezvous={}),
        replace(offer, rendezvous={**offer.rendezvous, "more": bytes(1 << 17)}),
    ):
        assert await receiving(pair).connect(wrong) is None
    assert len(receiving(pair).senders) == 0
    await pair.require_working()


async def test_payloads_outside_of_the_arena_are_refused(pair: Pair) -> None:
    offer = await offered(pair)
    source = await receiving(pair).connect(offer)
    assert source is not None
    for offset in (0, ARENA_HEADER_BYTES - 1, offer.arena_bytes - 9, 2**64 - 1):
        with pytest.raises(TransferCorrupt, match="not inside the arena"):
            async with source.arrived(Payload(arena_offset=offset), 10):
                pass
    source.close()


async def test_a_sender_that_is_reached_anew_outlives_what_there_was_of_it(pair: Pair) -> None:
    """As after a failed read, when transfers that began before it are still ending."""
    offer, senders = await offered(pair), receiving(pair).senders
    former = await receiving(pair).connect(offer)
    sender = senders.get(offer.arena)
    assert former is not None
    assert sender is not None
    senders.retire(sender)
    later = await receiving(pair).connect(offer)
    assert later is not None
    former.close()
    await soon(lambda: not [name for name in pair_threads() if name.endswith("free")])
    async with later.arrived(Payload(arena_offset=ARENA_HEADER_BYTES), 10) as payload:
        assert len(payload.inline) == 10
    later.close()


async def test_another_transport_takes_over_where_the_memory_cannot_be_read(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name, trust_fabric=True)
    pair.settings = replace(pair.settings, transports=(name, "grpc"))
    receive = replace(pair.settings, max_arena_bytes=1 << 10)  # so the receiver takes no arena
    async with pair.running(receive=receive):
        for number in range(2):
            reservation = replace(RESERVATION, transfer_id=f"t{number}")
            assert (await pair.start(reservation).commit(11, FIRST_TOKEN)).transport == "grpc"


async def test_a_failed_read_ends_the_transfer_and_later_ones_reach_the_sender_anew(plain: str, tmp_path: Path) -> None:
    async with Pair(tmp_path, plain, trust_fabric=True).running() as pair:
        await pair.require_working()
        PlainEngine.fails.set()
        with pytest.raises(TransferFailed, match="nixl: the other side is gone"):
            await pair.start().commit(11, FIRST_TOKEN)
        PlainEngine.fails.clear()
        pair.outcomes.changed.clear()
        await pair.require_working()
        await soon(lambda: len(receiving(pair).senders) == 1)


async def test_memory_is_given_up_when_reads_that_nobody_waits_for_have_ended(plain: str, tmp_path: Path) -> None:
    """As when a sender dies: one read fails and ends the transfer, while another one still runs."""
    async with Pair(tmp_path, plain, trust_fabric=True).running() as pair:
        source = await receiving(pair).connect(await offered(pair))
        assert source is not None
        PlainEngine.goes_on.clear()

        async def read() -> None:
            async with source.arrived(Payload(arena_offset=ARENA_HEADER_BYTES), 10):
                pass

        reading = [asyncio.create_task(read()) for _ in range(2)]
        await soon(lambda: PlainEngine.num_reading == 2)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        source.close()
        receiving(pair).senders.close()
        await soon(lambda: "kv-nixl-free" in pair_threads())
        PlainEngine.goes_on.set()
        _, engine = PlainEngine.started  # the sender's has its arena
        await soon(lambda: not engine.registered and not engine.num_reached)


async def test_a_slot_that_cannot_be_given_up_keeps_no_other(plain: str, tmp_path: Path) -> None:
    async with Pair(tmp_path, plain, trust_fabric=True).running() as pair:
        source = await receiving(pair).connect(await offered(pair))
        assert source is not None
        async with (
            source.arrived(Payload(arena_offset=ARENA_HEADER_BYTES), 10),
            source.arrived(Payload(arena_offset=ARENA_HEADER_BYTES), 10),
        ):
            pass
        _, engine = PlainEngine.started
        num_registered = len(engine.registered)
        engine.unregister_fails = 1
        source.close()
        receiving(pair).senders.close()
        await soon(lambda: len(engine.registered) == 1 and not engine.num_reached)
        assert num_registered > 1


@pytest.mark.parametrize("settings", [{}, {"trust_fabric": True}], ids=["not trusted", "not there"])
def test_without_trust_or_library_it_is_not_available(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ReadLibrary("nixl", "json" if not settings else "no_such_module", PlainEngine)
    monkeypatch.setattr(memory_reads, "_LIBRARIES", {"nixl": absent})
    for open_transports in (open_receive_transports, lambda settings: open_send_transports(settings, 1)):
        with pytest.raises(ConfigurationError, match="none of the KV transports nixl works here"):
            open_transports(TransferSettings(("nixl",), **settings))
