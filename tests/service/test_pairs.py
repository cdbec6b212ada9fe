"""The transport "gloo": how its pairs come about, are shared, break and are replaced."""

import asyncio
import gc
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvtransfer import ExpectedTransfer, KVSender, TransferSpec
from kvtransfer.outgoing_conversation import OutgoingConversation
from kvtransfer.transports import open_send_transports, torch_distributed
from kvtransfer.transports import pair as pair_module
from kvtransfer.transports.base import Payload, TransportOffer
from kvtransfer.transports.pair import Pair as Group
from kvtransfer.transports.torch_distributed import PairReceiveTransport, PairSendTransport
from mesh.domain.errors import LayoutMismatch, TransferCorrupt, TransferFailed
from mesh.rpc.credentials import Credentials
from tests.evidence import Evidence
from tests.fakes.kv_store import TINY
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION
from tests.service.test_kvtransfer import Misbehaving, granted
from tests.service.transfer_pair import (
    KEY,
    RESERVATION,
    SOURCE_IDS,
    Pair,
    announce_all,
    pair_threads,
    serving,
    soon,
    until,
)
from tests.waiting import LIMIT_S

NUM_FAULTS = 200


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with Pair(tmp_path, "gloo").running() as pair:
        yield pair


def sending(pair: Pair) -> PairSendTransport:
    (transport,) = (transport for transport in pair.transports if transport.name == "gloo")
    assert isinstance(transport, PairSendTransport)
    return transport


def receiving(pair: Pair) -> PairReceiveTransport:
    (transport,) = (transport for transport in pair.receiver._transports if transport.name == "gloo")
    assert isinstance(transport, PairReceiveTransport)
    return transport


def current(pair: Pair) -> Group:
    group = sending(pair).pairs.get((pair.server.address, INCARNATION))
    assert group is not None
    return group


def reservation(name: str, first_block: int = 4) -> ExpectedTransfer:
    return ExpectedTransfer(name, 1, (first_block, 9, 2), 0, 11)


async def test_transfers_of_two_workers_share_a_pair_which_is_kept(pair: Pair) -> None:
    pair.target.writing.close()
    transfers = [pair.start(reservation(f"t{number}", number)) for number in (4, 5, 6, 7)]
    commits = [asyncio.create_task(transfer.commit(11, FIRST_TOKEN)) for transfer in transfers]
    await until(pair.target.writing.arrived)
    group = current(pair)
    assert sending(pair).pairs.num_users(group) == 4
    pair.target.writing.open()
    results = await asyncio.gather(*commits)
    assert {result.transport for result in results} == {"gloo"}
    await pair.require_working()
    assert current(pair) is group
    assert (len(sending(pair).pairs), len(receiving(pair).pairs)) == (1, 1)


async def test_an_abort_with_payloads_on_their_way_retires_the_pair_and_spares_other_transfers(pair: Pair) -> None:
    pair.target.writing.close()
    aborted, other = pair.start(), pair.start(reservation("other"))
    await until(pair.target.writing.arrived)
    group = current(pair)
    await soon(lambda: any(slot._work for slot in aborted._conversation._slots.values()))  # type: ignore[attr-defined]
    await aborted.abort()
    assert group.num_abandoned > 0
    assert sending(pair).pairs.get((pair.server.address, INCARNATION)) is None
    pair.target.writing.open()
    await other.commit(11, FIRST_TOKEN)
    await pair.require_working()
    assert current(pair) is not group
    assert len(sending(pair).pairs) == 1


async def test_a_receiver_that_has_lost_its_side_declines_and_gets_a_new_pair(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "gloo")
    pair.settings = replace(pair.settings, transports=("gloo", "grpc"))
    async with pair.running():
        for expected in ("gloo", "gloo", "grpc", "gloo"):
            if expected == "grpc":
                receiving(pair).pairs.close()
            result = await pair.start(reservation(f"t{random.random()}")).commit(11, FIRST_TOKEN)
            assert result.transport == expected


async def test_with_no_other_transport_the_transfer_after_a_refused_one_gets_through(pair: Pair) -> None:
    await pair.require_working()
    receiving(pair).pairs.close()
    with pytest.raises(LayoutMismatch, match="no common KV transport"):
        await pair.start().commit(11, FIRST_TOKEN)
    await pair.require_working()


async def test_without_tags_chunks_are_sent_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NCCL, which matches operations by their order. The first chunk is the last to be filled, if it can be."""
    monkeypatch.setattr(torch_distributed, "_KINDS", {"gloo": replace(pair_module.GLOO, has_tags=False)})
    tags: list[int] = []
    has_sent = threading.Event()
    send = Group.send

    def note(group: Group, payload: Tensor, tag: int) -> Any:
        tags.append(tag)
        has_sent.set()
        return send(group, payload, tag)

    monkeypatch.setattr(Group, "send", note)
    async with Pair(tmp_path, "gloo").running() as pair:
        copy_out, number = pair.source.copy_out, itertools.count()

        def copy(*args: Any) -> int:
            if next(number) == 0:
                has_sent.wait(0.5)
            return copy_out(*args)

        monkeypatch.setattr(pair.source, "copy_out", copy)
        await pair.require_working()
    assert tags == sorted(tags)


async def test_a_broken_pair_fails_its_transfers_and_is_replaced(pair: Pair) -> None:
    await pair.require_working()
    group = current(pair)
    inbox = receiving(pair).pairs.get(group.name.partition("-")[0])
    assert inbox is not None
    pair.outcomes.changed.clear()
    pair.source.reading.close()
    transfer = pair.start()
    await until(pair.source.reading.arrived)
    inbox.pair._group = None  # as when the connection is cut: the last reference closes it
    inbox.pair.is_broken = True
    pair.source.reading.open()
    with pytest.raises(TransferFailed, match=r"Connection closed by peer|pair with the sender is broken"):
        await transfer.commit(11, FIRST_TOKEN)
    assert isinstance(await pair.failure(), TransferFailed)
    await pair.require_working()
    assert current(pair) is not group


async def test_a_sender_whose_payloads_do_not_come_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    lease_s = 2.0
    async with Pair(tmp_path, "gloo", lease_s=lease_s).running() as pair:
        transports = open_send_transports(pair.settings, TINY.layer_block_bytes)
        silent = KVSender(pair.source, "prefill-1", Credentials(KEY), pair.settings, transports)
        send = Group.send

        def send_nothing(group: Group, payload: Any, tag: int) -> Any:
            is_silent = any(group in transport.pairs._entries for transport in transports)  # type: ignore[attr-defined]
            return object() if is_silent else send(group, payload, tag)

        monkeypatch.setattr(Group, "send", send_nothing)
        pair.receiver.expect(RESERVATION)
        address = pair.server.address
        transfer = silent.open(TransferSpec("transfer", 1, address, INCARNATION, SOURCE_IDS, TINY.whole))
        announce_all(transfer)
        began = asyncio.get_running_loop().time()
        commit = asyncio.create_task(transfer.commit(11, FIRST_TOKEN))
        await soon(lambda: len(receiving(pair).pairs) == 1)
        await pair.require_working()  # on a pair of its own
        assert not commit.done()
        with pytest.raises(TransferFailed):
            await commit
        took_s = asyncio.get_running_loop().time() - began
        assert isinstance(await pair.failure(), TransferFailed)
        await silent.close()
        await pair.require_working()
    evidence(
        "R7",
        "transfer over gloo failed whose payloads did not come",
        f"after {took_s:.2f} s (lease {lease_s:g} s for 10 s)",
        target="<= 1 lease",
        ok=took_s <= lease_s + 1,
        is_reported_only=True,
    )


async def test_the_network_is_not_used_unless_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "is_loopback", lambda host: False)
    pair = Pair(tmp_path, "gloo")
    async with pair.running():
        for _ in range(2):  # the second time without trying
            with pytest.raises(TransferFailed, match="gloo cannot reach 127"):
                await pair.start().commit(11, FIRST_TOKEN)
            await pair.receiver.abort("transfer")
        assert len(sending(pair).pairs) == 0
    pair = Pair(tmp_path, "gloo")
    pair.settings = replace(pair.settings, transports=("gloo", "grpc"))
    trusting = replace(pair.settings, trust_fabric=True)
    async with pair.running(receive=trusting):
        assert (await pair.start().commit(11, FIRST_TOKEN)).transport == "grpc"
    pair.settings, distrusting = trusting, pair.settings
    async with pair.running(receive=distrusting):
        assert (await pair.start(reservation("a")).commit(11, FIRST_TOKEN)).transport == "grpc"
    async with pair.running():
        assert (await pair.start(reservation("b")).commit(11, FIRST_TOKEN)).transport == "gloo"


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({}, "has not told 0/1"),
        ({"0/1": b""}, "has not told 0/1"),
        ({"0/1": b"nonsense"}, "gloo: "),
        ({"0/1": bytes(1 << 16)}, "the other side has told 65539 bytes; the limit is 65536"),
    ],
)
async def test_a_receiver_that_answers_nonsense_is_avoided(
    tmp_path: Path, store: Mapping[str, bytes], message: str
) -> None:
    answer = granted("gloo")
    answer.granted.rendezvous.update(store)
    async with Pair(tmp_path, "gloo").running() as pair, serving(Misbehaving(answer, hang=True)) as server:
        with pytest.raises(TransferFailed, match=message):
            await pair.open(address=server.address).ended()
        with pytest.raises(TransferFailed, match="gloo cannot reach"):
            await pair.open(address=server.address).ended()
        await pair.require_working()  # other receivers are not avoided


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("", {"0/0": b"x"}),
        ("-1", {"0/0": b"x"}),
        ("a--1", {"0/0": b"x"}),
        ("a-" + "9" * 99, {"0/0": b"x"}),
        ("a-1", {}),
        ("a-1", {"0/0": b""}),
        ("a-1", {"0/0": b"nonsense"}),
        ("a-1", {"0/0": os.urandom(170)}),
        ("a-1", {"another": b"x"}),
        ("a-1", {"0/0": bytes(1 << 16)}),
    ],
)
async def test_offers_of_nonsense_end_that_transfer_only(pair: Pair, name: str, store: Mapping[str, bytes]) -> None:
    source = await receiving(pair).connect(TransportOffer("gloo", pair=name, host="127.0.0.1", rendezvous=store))
    if source is not None:
        with pytest.raises(TransferFailed):
            async with source.arrived(Payload(tag=1), 10):
                pass
        source.close()
    await pair.require_working()


async def test_older_pairs_of_a_sender_do_not_come_back(pair: Pair) -> None:
    await pair.require_working()
    sender = current(pair).name.partition("-")[0]
    assert await receiving(pair).connect(TransportOffer("gloo", pair=f"{sender}-0", rendezvous={"0/0": b"x"})) is None
    await pair.require_working()


async def test_beyond_the_limit_of_pairs_other_transports_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_distributed, "MAX_PAIRS", 1)
    pair = Pair(tmp_path, "gloo")
    pair.settings = replace(pair.settings, transports=("gloo", "grpc"))
    async with pair.running():
        pair.target.writing.close()
        first = pair.start()
        await until(pair.target.writing.arrived)
        pair.receiver.expect(reservation("second"))
        second = pair.open(reservation("second"), address=pair.server.address.replace("127.0.0.1", "localhost"))
        announce_all(second)
        pair.target.writing.open()
        assert (await second.commit(11, FIRST_TOKEN)).transport == "grpc"
        assert (await first.commit(11, FIRST_TOKEN)).transport == "gloo"


@pytest.mark.parametrize("phase", ["writing", "idle"])
async def test_a_killed_sender_fails_its_transfer_and_the_next_one_is_served(tmp_path: Path, phase: str) -> None:
    async with Pair(tmp_path, "gloo").running() as pair:
        if phase == "writing":
            pair.target.writing.close()
        process = await pair.start_process(transports=["gloo"])
        process.send_signal(signal.SIGKILL)
        await process.wait()
        pair.target.writing.open()
        assert isinstance(await pair.failure(), TransferFailed)
        await pair.require_working()


UNCLOSED_PROGRAM = """
import asyncio
from kvtransfer import TransferSettings
from kvtransfer.transports.pair import GLOO
from kvtransfer.transports.torch_distributed import PairSendTransport

async def main():
    path = await PairSendTransport(GLOO, TransferSettings(), 1 << 20).path("127.0.0.1:1", "")
    print(path.offer().rendezvous)

asyncio.run(main())
"""


async def test_an_offer_that_nobody_takes_up_does_not_keep_the_process() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UNCLOSED_PROGRAM, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, output[:2]) == (0, b"{'")


def used() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Faults:
    """Transfers that fail, each in one of several ways, beside others that must get through or fail with a name."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pair = pair
        self._random = random.Random(1)
        self._spoilt: dict[str, str] = {}
        self.num_failed = 0
        fill, send = OutgoingConversation._fill, Group.send

        def fill_and_spoil(conversation: OutgoingConversation, slot: Any, number: int, chunk_range: Any) -> Any:
            filled = fill(conversation, slot, number, chunk_range)
            if number == 4 and self._spoilt.get(conversation._spec.transfer_id) == "flip":
                slot.buffer()[-1] ^= 8
            return filled

        def send_or_break(group: Group, payload: Any, tag: int) -> Any:
            if "break" in self._spoilt.values() and self._random.random() < 0.1:
                raise group._broken(RuntimeError("broken by a test"))
            return send(group, payload, tag)

        monkeypatch.setattr(OutgoingConversation, "_fill", fill_and_spoil)
        monkeypatch.setattr(Group, "send", send_or_break)

    async def one(self, number: int) -> None:
        name, kind = f"t{number}", ("flip", "break", "abort", "refuse", "lose")[number % 5]
        self._spoilt[name] = kind
        transfer = self._pair.start(reservation(name, 4 + number % 2))
        commit = asyncio.create_task(transfer.commit(11, FIRST_TOKEN))
        for _ in range(self._random.randrange(40)):
            await asyncio.sleep(0)
        if kind == "abort":
            await transfer.abort()
        elif kind == "refuse":
            await self._pair.receiver.abort(name)
        elif kind == "lose":
            for group in list(sending(self._pair).pairs._entries):
                group.is_broken = True
        try:
            await commit
        except (TransferFailed, TransferCorrupt, LayoutMismatch):
            self.num_failed += 1
        await self._pair.receiver.abort(name)
        del self._spoilt[name]


async def test_faults_leave_nothing_behind(pair: Pair, monkeypatch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    await pair.require_working()
    await soon(lambda: len(pair_threads()) <= 4)
    before = used()
    with monkeypatch.context() as patch:
        faults = Faults(pair, patch)
        for first in range(0, NUM_FAULTS, 2):
            await asyncio.gather(faults.one(first), faults.one(first + 1))
    assert faults.num_failed > NUM_FAULTS / 3
    pair.require_slots_back()
    await pair.require_working()
    await soon(lambda: len(sending(pair).pairs) == 1, state=lambda: sending(pair).pairs._entries)
    gc.collect()
    await soon(lambda: used()[0] <= before[0] + 4 and used()[1] <= before[1] + 4, state=lambda: (before, used()))
    evidence(
        "R23",
        f"descriptors and threads more after {faults.num_failed} failed transfers over gloo",
        f"{used()[0] - before[0]}, {used()[1] - before[1]}",
        target="<= 4",
        ok=True,
    )
