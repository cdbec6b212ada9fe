"""Signed records: what is let through, and the many things that are not."""

import hmac
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import wire
from mesh.domain.worker import WorkerLoad
from mesh.rpc.credentials import MeshKey
from mesh.signed_messages import MAX_AGE_S, MAX_MESSAGE_BYTES, FreshnessGuard, MessageSigner, Refused
from mesh.v1 import worker_pb2
from tests.defects import Repaired
from tests.unit.router.test_membership import INFO

KEY = MeshKey("a-key-for-tests-only")
BEAT = worker_pb2.RegisterRequest(
    heartbeat=worker_pb2.Heartbeat(load=wire.load_to_proto(WorkerLoad(num_running=3)), state=1)
)


class WallClock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_what_is_signed_comes_out() -> None:
    beat = MessageSigner(KEY).verify(MessageSigner(KEY).sign(INFO, BEAT))
    assert (beat.info, beat.message) == (INFO, BEAT)


@given(st.data())
def test_any_changed_byte_is_refused(data: st.DataObject) -> None:
    signed = bytearray(MessageSigner(KEY).sign(INFO, BEAT))
    signed[data.draw(st.integers(0, len(signed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused, match="signature"):
        MessageSigner(KEY).verify(bytes(signed))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(Refused):
        MessageSigner(KEY).verify(noise)


def test_another_key_a_cut_and_a_giant_are_refused() -> None:
    signed = MessageSigner(KEY).sign(INFO, BEAT)
    for wrong in (signed[:-1], signed[1:], signed + b"x", b"", bytes(MAX_MESSAGE_BYTES + 1)):
        with pytest.raises(Refused):
            MessageSigner(KEY).verify(wrong)
    with pytest.raises(Refused, match="another key"):
        MessageSigner(MeshKey("another-key-entirely")).verify(signed)


@pytest.mark.parametrize("skew_s", [MAX_AGE_S + 1, -MAX_AGE_S - 1])
def test_stale_and_future_ones_are_refused(skew_s: float) -> None:
    clock = WallClock()
    signed = MessageSigner(KEY, clock).sign(INFO, BEAT)
    clock.now += skew_s
    with pytest.raises(Refused, match="stale"):
        MessageSigner(KEY, clock).verify(signed)


def test_each_message_counts_once_and_only_forwards() -> None:
    clock = WallClock()  # it stands still, and numbers grow all the same
    monotonic = WallClock()
    signer, guard = MessageSigner(KEY, clock), FreshnessGuard(clock, monotonic)
    first, second, third = (signer.verify(signer.sign(INFO, BEAT)) for _ in range(3))
    assert [guard.is_new(beat) for beat in (first, first, third, second, third)] == [True, False, True, False, False]
    guard.forget_silent()
    assert not guard.is_new(second)
    monotonic.now += 301
    guard.forget_silent()
    assert guard.is_new(second)  # nothing is kept about this worker


class Worker:
    """One run of a worker, on a machine whose clock may be set."""

    def __init__(self, clock: WallClock, incarnation: str) -> None:
        self._signer = MessageSigner(KEY, clock)
        self._info = replace(INFO, incarnation=incarnation)

    def beat(self) -> bytes:
        return self._signer.sign(self._info, BEAT)


class Router:
    """Takes beats as the registry does."""

    def __init__(self, clock: WallClock) -> None:
        self._signer = MessageSigner(KEY, clock)
        self._guard = FreshnessGuard(clock)

    def hears(self, signed: bytes) -> bool:
        try:
            return self._guard.is_new(self._signer.verify(signed))
        except Refused:
            return False


@pytest.mark.parametrize("step_s", [-3600.0, -60.0, -10.0, 60.0, 3600.0])
def test_a_clock_that_is_set_hides_no_worker(step_s: float, repaired: Repaired) -> None:
    clock = WallClock()
    worker, router, other = Worker(clock, "first"), Router(clock), Router(clock)
    captured = [worker.beat() for _ in range(5)]
    assert all(map(router.hears, captured[:4]))
    assert all(map(other.hears, captured[:4]))
    clock.now += step_s
    assert router.hears(worker.beat()), "a router that knew it"
    assert Router(clock).hears(worker.beat()), "a router that has just started"
    if abs(step_s) < MAX_AGE_S:  # what the first run has said is still fresh, so it could be replayed
        clock.now += MAX_AGE_S
    clock.now += 1
    again = Worker(clock, "second")
    assert router.hears(again.beat()), "a worker that has been started again"
    assert other.hears(again.beat()), "a worker that was started again before it said anything"
    clock.now -= step_s  # what was caught before becomes as fresh as it was
    assert router.hears(again.beat())
    assert not any(map(router.hears, captured)), "a former run"
    repaired("D12", f"clock {step_s:+g} s: 0 beats refused, of workers started again and by new routers as well")


def test_messages_without_a_number_are_ordered_by_their_time() -> None:
    clock = WallClock()
    signer, guard = MessageSigner(KEY, clock), FreshnessGuard(clock)
    beats = []
    for _ in range(3):
        body = signer.sign(INFO, BEAT)[: -32 - 8]
        beats.append(signer.verify(body + hmac.digest(signer._key, body, "sha256")))
        clock.now += 0.5
    assert [beat.number for beat in beats] == [beat.freshness_us for beat in beats]
    assert [guard.is_new(beats[place]) for place in (0, 2, 1)] == [True, True, False]


def test_a_reason_is_for_one_run_only() -> None:
    signer = MessageSigner(KEY)
    letter = signer.sign_refusal("one", "x" * 5000)
    assert signer.verify_refusal("one", letter) == "x" * 1000
    with pytest.raises(Refused, match="another run"):
        signer.verify_refusal("two", letter)
    with pytest.raises(Refused, match="format"):
        signer.verify(letter)
    with pytest.raises(Refused, match="format"):
        signer.verify_refusal(INFO.incarnation, signer.sign(INFO, worker_pb2.RegisterRequest()))
    with pytest.raises(Refused, match="signature"):
        signer.verify_refusal("one", letter[:-1] + bytes([letter[-1] ^ 1]))
