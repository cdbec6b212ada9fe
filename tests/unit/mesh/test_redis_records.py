"""Signed records: what is let through, and the many things that are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import wire
from mesh.domain.worker import WorkerLoad
from mesh.registry.redis_connection import LogLimit
from mesh.registry.redis_records import MAX_AGE_S, MAX_MESSAGE_BYTES, RecordSeal, Refused, ReplayGuard
from mesh.rpc.credentials import MeshKey
from tandem.v1 import worker_pb2
from tests.unit.mesh.test_membership import INFO

KEY = MeshKey("a-key-for-tests-only")
BEAT = worker_pb2.RegisterRequest(
    heartbeat=worker_pb2.Heartbeat(load=wire.load_to_proto(WorkerLoad(num_running=3)), state=1)
)


class WallClock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_what_is_sealed_comes_out() -> None:
    beat = RecordSeal(KEY).open(RecordSeal(KEY).seal(INFO, BEAT))
    assert (beat.info, beat.message) == (INFO, BEAT)


@given(st.data())
def test_any_changed_byte_is_refused(data: st.DataObject) -> None:
    sealed = bytearray(RecordSeal(KEY).seal(INFO, BEAT))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused, match="signature"):
        RecordSeal(KEY).open(bytes(sealed))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(Refused):
        RecordSeal(KEY).open(noise)


def test_another_key_a_cut_and_a_giant_are_refused() -> None:
    sealed = RecordSeal(KEY).seal(INFO, BEAT)
    for wrong in (sealed[:-1], sealed[1:], sealed + b"x", b"", bytes(MAX_MESSAGE_BYTES + 1)):
        with pytest.raises(Refused):
            RecordSeal(KEY).open(wrong)
    with pytest.raises(Refused, match="another key"):
        RecordSeal(MeshKey("another-key-entirely")).open(sealed)


@pytest.mark.parametrize("skew_s", [MAX_AGE_S + 1, -MAX_AGE_S - 1])
def test_stale_and_future_ones_are_refused(skew_s: float) -> None:
    clock = WallClock()
    sealed = RecordSeal(KEY, clock).seal(INFO, BEAT)
    clock.now += skew_s
    with pytest.raises(Refused, match="stale"):
        RecordSeal(KEY, clock).open(sealed)


def test_each_message_counts_once_and_only_forwards() -> None:
    clock = WallClock()  # it stands still, and freshness grows all the same
    seal, guard = RecordSeal(KEY, clock), ReplayGuard()
    first, second, third = (seal.open(seal.seal(INFO, BEAT)) for _ in range(3))
    assert [guard.is_new(beat) for beat in (first, first, third, second, third)] == [True, False, True, False, False]
    clock.now += 3 * MAX_AGE_S
    guard.forget_stale(int(clock.now * 1e6))
    assert guard.lag_s(first) < 0  # nothing is kept about this worker


def test_one_line_a_second_for_each_cause() -> None:
    clock = WallClock()
    limit = LogLimit(clock)
    assert [limit.allows("a"), limit.allows("a"), limit.allows("b")] == [True, False, True]
    clock.now += 1
    assert limit.allows("a")


def test_a_reason_is_for_one_run_only() -> None:
    seal = RecordSeal(KEY)
    letter = seal.seal_refusal("one", "x" * 5000)
    assert seal.open_refusal("one", letter) == "x" * 1000
    with pytest.raises(Refused, match="another run"):
        seal.open_refusal("two", letter)
    with pytest.raises(Refused, match="format"):
        seal.open(letter)
    with pytest.raises(Refused, match="format"):
        seal.open_refusal(INFO.incarnation, seal.seal(INFO, worker_pb2.RegisterRequest()))
    with pytest.raises(Refused, match="signature"):
        seal.open_refusal("one", letter[:-1] + bytes([letter[-1] ^ 1]))
