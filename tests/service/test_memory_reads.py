"""The transports "nixl" and "mooncake": a receiver reads the sender's memory, and what happens when it cannot.

The engine "plain" copies within this process. The libraries' own engines are tested where they are installed.
"""

import ctypes
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtransfer import ExpectedTransfer, TransferSettings
from kvtransfer.transports import memory_reads, open_receive_transports, open_send_transports
from kvtransfer.transports.base import Payload, TransportOffer
from kvtransfer.transports.memory_reads import HEADER_BYTES, ReadReceiveTransport, ReadSendTransport
from kvtransfer.transports.read_engines import MOONCAKE, NIXL, ReadEngine, ReadLibrary, Remote
from mesh.domain.errors import ConfigurationError, TransferCorrupt, TransferFailed
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION
from tests.service.transfer_pair import RESERVATION, Pair, soon

_LIBRARIES = {library.name: library for library in (NIXL, MOONCAKE)}


class PlainEngine(ReadEngine):
    """Copies within this process. `fails`: reads fail from now on."""

    fails = threading.Event()
    registered: dict[int, int]

    def __init__(self, host: str) -> None:
        self.registered = {}

    def register(self, address: int, num_bytes: int) -> None:
        self.registered[address] = num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        assert self.registered.pop(address) == num_bytes

    def told(self, address: int) -> Mapping[str, bytes]:
        return {"address": address.to_bytes(8, "little")}

    def reach(self, told: Mapping[str, bytes]) -> Remote:
        return PlainRemote(self, int.from_bytes(told["address"], "little"))


class PlainRemote(Remote):
    def __init__(self, engine: PlainEngine, address: int) -> None:
        self._engine = engine
        self._address = address

    def read(self, target: int, offset: int, num_bytes: int, timeout_s: float) -> None:
        if PlainEngine.fails.is_set():
            raise RuntimeError("the other side is gone")
        assert target in self._engine.registered
        ctypes.memmove(target, self._address + offset, num_bytes)

    def close(self) -> None:
        return


@pytest.fixture(params=["plain", "nixl", "mooncake"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a transport that works here."""
    PlainEngine.fails.clear()
    if request.param == "plain":
        plain = ReadLibrary("nixl", "json", PlainEngine)
        monkeypatch.setattr(memory_reads, "_LIBRARIES", {"nixl": plain})
        return "nixl"
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
        replace(offer, arena_bytes=HEADER_BYTES),
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
    for offset in (0, HEADER_BYTES - 1, offer.arena_bytes - 9, 2**64 - 1):
        with pytest.raises(TransferCorrupt, match="not inside the arena"):
            async with source.arrived(Payload(arena_offset=offset), 10):
                pass
    source.close()


async def test_another_transport_takes_over_where_the_memory_cannot_be_read(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name, trust_fabric=True)
    pair.settings = replace(pair.settings, transports=(name, "grpc"))
    receive = replace(pair.settings, max_arena_bytes=1 << 10)  # so the receiver takes no arena
    async with pair.running(receive=receive):
        for number in range(2):
            reservation = replace(RESERVATION, transfer_id=f"t{number}")
            assert (await pair.start(reservation).commit(11, FIRST_TOKEN)).transport == "grpc"


async def test_a_failed_read_ends_the_transfer_and_later_ones_reach_the_sender_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_reads, "_LIBRARIES", {"nixl": ReadLibrary("nixl", "json", PlainEngine)})
    PlainEngine.fails.clear()
    async with Pair(tmp_path, "nixl", trust_fabric=True).running() as pair:
        await pair.require_working()
        PlainEngine.fails.set()
        with pytest.raises(TransferFailed, match="nixl: the other side is gone"):
            await pair.start().commit(11, FIRST_TOKEN)
        PlainEngine.fails.clear()
        pair.outcomes.changed.clear()
        await pair.require_working()
        await soon(lambda: len(receiving(pair).senders) == 1)


@pytest.mark.parametrize("settings", [{}, {"trust_fabric": True}], ids=["not trusted", "not there"])
def test_without_trust_or_library_it_is_not_available(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ReadLibrary("nixl", "json" if not settings else "no_such_module", PlainEngine)
    monkeypatch.setattr(memory_reads, "_LIBRARIES", {"nixl": absent})
    for open_transports in (open_receive_transports, lambda settings: open_send_transports(settings, 1)):
        with pytest.raises(ConfigurationError, match="none of the KV transports nixl works here"):
            open_transports(TransferSettings(("nixl",), **settings))
