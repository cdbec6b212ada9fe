"""KV moves between caches of GPUs, which are simulated, in whatever order these work."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import SequenceState
from kvtransfer import ExpectedTransfer, KVReceiver, KVSender, TransferSettings, TransferSpec
from mesh.domain.kv import KVSpan, Span
from mesh.rpc.credentials import Credentials
from tests.component.arms import load_arm
from tests.component.without_gpu.kv_schedules import HEADS, LAYOUT, Schedule, WrongKV, simulated_cache
from tests.fakes.requests import make_request
from tests.fakes.streams import NotPinned, SimulatedStreams
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION, Outcomes
from tests.service.transfer_pair import KEY, arenas, serving

LAYOUT_ROWS = (LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
_NUM_FAULTY = 60
_MOVES = (((3, 0, 4), (1, 2, 0)), ((1, 2), (4, 3)), ((0, 4, 3), (2, 0, 1)))  # the last ones use blocks again
_CAUGHT = (WrongKV, IndexError)  # an IndexError where POISON is taken for the id of a block


@pytest.mark.parametrize(
    "num_schedules", [200, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1_800)])]
)
def test_what_arrives_is_what_was_computed(num_schedules: int) -> None:
    num_late = 0
    for seed in range(num_schedules):
        schedule = Schedule(seed)
        schedule.run()
        num_late += schedule.here.gpu.num_late + schedule.there.gpu.num_late
    assert num_late > 30 * num_schedules, "the GPUs were hardly ever late"


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        pytest.param("wait", "", id="KV is read before the model has written it"),
        pytest.param("synchronize", "", id="a slot is sent and used again before KV is in it"),
        pytest.param("", "wait", id="KV is written before its blocks are cleared"),
        pytest.param("", "synchronize", id="KV is committed before it is in its blocks"),
    ],
)
def test_a_mistake_is_found(sender: str, receiver: str) -> None:
    num_found = 0
    for seed in range(_NUM_FAULTY):
        try:
            Schedule(seed, sender, receiver).run()
        except _CAUGHT:
            num_found += 1
    assert num_found >= 3


def test_layers_are_copied_while_the_next_are_computed() -> None:
    """Of some GPUs that are late: others compute layer 1 for reasons of their own."""
    num_left = 0
    for seed in range(20):
        gpu = SimulatedStreams(seed)
        cache, kv = simulated_cache(gpu), gpu.adopt(torch.ones(2, 1, *LAYOUT_ROWS))
        for layer in (0, 1):
            with gpu.on(gpu.current()):
                cache.layer(layer).index_copy_(1, torch.tensor([3]), kv)
            cache.note_written(Span(layer, 1))
        payload = bytearray(LAYOUT.layer_block_bytes)
        cache.read_blocks([3], KVSpan(Span(0, 1), HEADS), payload)
        assert payload == kv.numpy().tobytes()
        num_left += gpu.has_work()
    assert num_left, "reads waited for all that the GPU was given"


def test_a_step_that_runs_holds_up_no_copy_into_other_blocks() -> None:
    num_left = 0
    for seed in range(20):
        gpu = SimulatedStreams(seed)
        cache, kv = simulated_cache(gpu), gpu.adopt(torch.ones(2, 1, *LAYOUT_ROWS))
        with gpu.on(gpu.current()):
            cache.layer(0).index_copy_(1, torch.tensor([3]), kv)
        cache.write_blocks([2], KVSpan(Span(0, 1), HEADS), kv.numpy().tobytes())
        assert torch.equal(cache.layer(0)[:, [2]], kv)
        num_left += gpu.has_work()
    assert num_left, "writes waited for the step"


def test_the_simulator_refuses_copies_for_which_the_host_would_wait() -> None:
    gpu = SimulatedStreams(0)
    with gpu.on(gpu.new_stream()), pytest.raises(NotPinned):
        gpu.device_memory(8).copy_(torch.zeros(8, dtype=torch.uint8), non_blocking=True)


def test_other_threads_run_while_a_payload_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python never interrupts a thread here, so another runs only if the copy lets it."""
    cache = simulated_cache(SimulatedStreams(0), replace(LAYOUT, block_size=1 << 16), num_blocks=2)
    payload = bytes(cache.payload_bytes(2, LAYOUT.whole))
    assert cache._copies is not None
    land, turn, has_run, ran_meanwhile = cache._copies.landing, threading.Semaphore(0), threading.Event(), False

    @contextmanager
    def landing(units: torch.Tensor, block_ids: list[int]) -> Iterator[object]:
        with land(units, block_ids) as memory:
            turn.release()
            yield memory

    def checksum(_: object, seed: int) -> int:
        nonlocal ran_meanwhile
        ran_meanwhile |= has_run.is_set()
        return seed

    def run() -> None:
        turn.acquire()
        has_run.set()

    monkeypatch.setattr(cache._copies, "landing", landing)
    monkeypatch.setattr("engine.kv.cache.xxhash.xxh3_64_intdigest", checksum)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(50):
            has_run.clear()
            other = threading.Thread(target=run)
            other.start()
            cache.copy_in([0, 1], LAYOUT.whole, payload, 0)
            other.join()
            if ran_meanwhile:
                return
    finally:
        sys.setswitchinterval(interval_s)
    pytest.fail("no other thread ran while a payload was copied")


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_sender_and_a_receiver_on_gpus(tmp_path: Path, transport: str) -> None:
    """With their real threads: layers are announced while the GPU has not begun to compute them."""
    here, there = SimulatedStreams(seed=1), SimulatedStreams(seed=2)
    source, target = simulated_cache(here), simulated_cache(there)
    limits = TransferSettings(
        transports=(transport,), chunk_bytes=2 * LAYOUT.layer_block_bytes, arena_bytes=4 * 4096, shm_dir=str(tmp_path)
    )
    outcomes = Outcomes()
    receiver = KVReceiver(target, INCARNATION, outcomes.callbacks(), limits)
    async with serving(receiver) as server:
        sender = KVSender(source, "prefill-0", Credentials(KEY), limits)
        for number, (blocks, to_blocks) in enumerate(
            [((3, 0, 4), (1, 2, 0)), ((1, 2), (4, 3)), ((0, 4, 3), (2, 0, 1))]
        ):
            kv = here.adopt(torch.randn(LAYOUT.num_layers, 2, len(blocks), *source.tensor.shape[3:]))
            name, num_tokens = f"transfer {number}", len(blocks) * LAYOUT.block_size
            receiver.expect(ExpectedTransfer(name, 1, to_blocks, 0, num_tokens))
            spec = TransferSpec(name, 1, server.address, INCARNATION, blocks, LAYOUT.whole)
            transfer = sender.open(spec)
            for layer in range(LAYOUT.num_layers):
                with here.on(here.current()):
                    source.layer(layer).index_copy_(1, torch.tensor(blocks), kv[layer])
                source.note_written(Span(layer, 1))
                transfer.announce(Span(0, len(blocks)), Span(layer, 1))
            await transfer.commit(num_tokens, FIRST_TOKEN)
            arrived = there.adopt(torch.empty_like(kv))
            with there.on(there.current()):
                torch.index_select(target.tensor, 2, torch.tensor(to_blocks), out=arrived)
                target.clear_blocks(to_blocks)
            assert torch.equal(there.read_back(arrived), kv)
        assert [memory.nbytes for memory in here.unpinned] == []
        await sender.close()
        await receiver.close()
    assert [memory.nbytes for memory in here.unpinned] == [4 * 4096] * (transport == "shm")
    assert arenas(tmp_path) == []
    assert len(outcomes.committed) == 3


def test_layers_are_noted_before_they_are_announced(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_arm(checkpoint("llama"), "torch")
    said: list[tuple[str, Span]] = []
    monkeypatch.setattr(runner.kv_cache, "note_written", lambda layers: said.append(("noted", layers)))
    sequence = SequenceState(make_request("r", range(6)))
    sequence.block_table += [0, 1]
    batch = ScheduledBatch((ScheduledSequence(sequence, 0, 6),))
    runner.begin(batch, lambda _, layers: said.append(("announced", layers)))()
    noted, announced = said[::2], said[1::2]
    assert [layers for _, layers in noted] == [layers for _, layers in announced]
    assert sum(layers.count for _, layers in noted) == runner.config.num_layers
    assert {name for name, _ in noted} == {"noted"}
    assert {name for name, _ in announced} == {"announced"}
