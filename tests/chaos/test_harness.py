"""The harness itself: what it is there to find, it finds."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tandem
from tandem.models import Choice, FinishReason
from tests.chaos.history import FINISHED, Disturbance, History, failed_in, faults_of, judge, percentile
from tests.chaos.proxy import Conditions, FrameFlipper
from tests.chaos.samples import Held, Sample, keys_have_grown, longest_lives, read, slope, table, to_line

TOKENS = tuple(tandem.Token(id=10 + n, text=chr(97 + n), logprob=-0.5 * n) for n in range(4))
USAGE = tandem.Usage(prompt_tokens=3, completion_tokens=4)
EXPECTED = tandem.Result("r", (Choice(0, "abcd", TOKENS, FinishReason.LENGTH, USAGE),))


def events() -> list[tandem.TokenEvent]:
    plain = [tandem.TokenEvent(0, token, "r") for token in TOKENS]
    return [*plain[:-1], replace(plain[-1], finish_reason=FinishReason.LENGTH, usage=USAGE)]


def history(ending: str = FINISHED, started_s: float = 0.0, ended_s: float = 1.0) -> History:
    return History("ask-0", "router-0", started_s, started_s + 60, ending=ending, ended_s=ended_s)


def test_an_undisturbed_stream_and_a_beginning_of_it_have_no_faults() -> None:
    assert faults_of(history(), events(), EXPECTED) == []
    for count in range(4):
        assert faults_of(history("ConnectionFailed"), events()[:count], EXPECTED) == []


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ([], "without a terminal event"),
        (events()[:3], "without a terminal event"),
        ([*events(), events()[-1]], "ended 2 times"),
        ([*events(), events()[0]], "followed the terminal event"),
        ([events()[0], *events()], "differ from index 1"),
        ([events()[0], *events()[2:]], "differ from index 1"),
        ([replace(events()[0], token=replace(TOKENS[0], id=99)), *events()[1:]], "differ from index 0"),
        ([replace(events()[0], token=replace(TOKENS[0], logprob=0.01)), *events()[1:]], "log-prob at index 0"),
        ([replace(events()[0], token=replace(TOKENS[0], text="x")), *events()[1:]], "text differs"),
        ([*events()[:3], replace(events()[3], finish_reason=FinishReason.EOS_TOKEN)], "ended with eos_token"),
        ([*events()[:3], replace(events()[3], usage=tandem.Usage(3, 5))], "usage"),
        ([*events(), replace(events()[0], index=1)], "not asked for"),
    ],
)
def test_every_kind_of_fault_is_found(seen: list[tandem.TokenEvent], what: str) -> None:
    assert any(what in fault for fault in faults_of(history(), seen, EXPECTED))


def test_errors_need_a_disturbance_that_allows_them_and_has_budget() -> None:
    failed = [history("NoWorkers", started_s=float(n), ended_s=n + 0.5) for n in range(4)]
    nearby = Disturbance("kill", 1.0, 2.9, frozenset({"NoWorkers"}), budget=1)
    assert len(judge(failed, [nearby]).unexcused) == 3
    assert len(judge(failed, [replace(nearby, budget=None)]).unexcused) == 2
    assert len(judge(failed, [replace(nearby, budget=None, router="router-1")]).unexcused) == 4
    assert len(judge(failed, [replace(nearby, allowed=frozenset({"Overloaded"}))]).unexcused) == 4


def test_a_stream_that_outlasts_a_disturbance_may_fail_in_another_one() -> None:
    stream, wipe = history("ConnectionFailed", ended_s=5.0), Disturbance("wipe redis", 0.5, 1.0)
    kill = Disturbance("kill router", 4.0, 6.0, frozenset({"ConnectionFailed"}), None)
    assert failed_in(wipe, [stream], [kill]) == []
    assert failed_in(wipe, [stream], [replace(kill, began_s=5.5)]) == [stream]


def test_deadlines_excuse_only_those_who_have_asked_for_one() -> None:
    early = replace(history("DeadlineExceeded", ended_s=0.5), deadline_s=2.0, has_own_deadline=True)
    in_time = replace(early, ended_s=2.0)
    hung = history("DeadlineExceeded", ended_s=60.0)
    assert [stream.has_failed for stream in (early, in_time, hung)] == [True, False, True]
    assert [stream.is_late for stream in (in_time, replace(in_time, ended_s=3.5))] == [False, True]


def frame(kind: int, length: int) -> bytes:
    return length.to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + bytes(length)


@given(st.lists(st.sampled_from([(0, 100), (0, 4096), (0, 9000), (1, 5000)]), max_size=8), st.integers(1, 5000))
def test_bytes_are_flipped_inside_of_bulk_frames_only(frames: list[tuple[int, int]], step: int) -> None:
    sent = bytes(24) + b"".join(frame(*each) for each in frames)
    flipper, conditions = FrameFlipper(), Conditions(flips=2)
    pieces = [flipper.change(sent[at : at + step], conditions) for at in range(0, len(sent), step)]
    passed = b"".join(piece for piece, _ in pieces)
    changed = [at for at, (ours, theirs) in enumerate(zip(sent, passed, strict=True)) if ours != theirs]
    num_bulk = sum(kind == 0 and length >= 4096 for kind, length in frames)
    assert len(changed) == sum(flipped for _, flipped in pieces) == min(2, num_bulk)
    at, middles = 24, []
    for kind, length in frames:
        if kind == 0 and length >= 4096:
            middles.append(at + 9 + length - length // 2 - 1)
        at += 9 + length
    assert changed == middles[:2]


def test_slope_and_percentile() -> None:
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    assert slope([(0.0, 1.0)]) == 0.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([], 95) == 0.0


def look(at_s: float, pid: int, num_fds: int, num_keys: int) -> Sample:
    held = Held(pid, rss_mib=100.0 + at_s / 60, uss_mib=50.0, pss_mib=60.0, num_fds=num_fds, num_threads=9)
    return Sample(at_s, {"decode-0": held}, num_keys, {"requests": int(at_s)})


def test_a_killed_process_begins_a_new_series_and_the_longest_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    samples = [look(5.0 * n, pid=1 if n < 10 else 2, num_fds=20, num_keys=6) for n in range(50)]
    path.write_text("".join(map(to_line, samples)) + '{"at_s": 250.0, "he')  # the run was killed while it wrote
    assert read(path) == samples
    life = longest_lives(samples)["decode-0"]
    assert (life.num_lives, life.points[0][0], life.points[-1][0]) == (2, 50.0, 245.0)
    assert life.slope_per_min(lambda held: held.rss_mib) == pytest.approx(1.0)
    assert not life.has_grown
    assert any("100.8 to 104.1 (+1.000)" in line for line in table(samples))


def test_growth_is_found_and_a_dip_is_none() -> None:
    steady = [look(5.0 * n, 1, num_fds=20 if n != 30 else 3, num_keys=6) for n in range(100)]
    growing = [look(5.0 * n, 1, num_fds=20 + n // 10, num_keys=6 + n // 10) for n in range(100)]
    assert [longest_lives(samples)["decode-0"].has_grown for samples in (steady, growing)] == [False, True]
    assert [keys_have_grown(samples) for samples in (steady, growing)] == [False, True]
