"""Cores that workers lend each other."""

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.cores import ComputeCores, SharedCores, make_core_table, threads_born_on
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import parse_cores
from prefill_worker.settings import PrefillSettings

PREFILL, DECODE = (0, 1), (2,)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "cores"
    make_core_table(path, 4)
    return path


def write_line(table: Path, core: int, since_ns: int, pid: int) -> None:
    """As a worker whose first core is `core` would."""
    with table.open("r+b") as file:
        file.seek(64 * core)
        file.write(struct.pack("=qq", since_ns, pid))


def test_a_worker_gets_its_partners_cores_only_while_that_one_rests(table: Path) -> None:
    prefill, decode = SharedCores(table, PREFILL, DECODE), SharedCores(table, DECODE, PREFILL)
    assert prefill.begin_step() == DECODE
    assert decode.begin_step() == ()
    assert prefill.begin_step() == ()  # between its steps, decode is still at work
    prefill.set_idle()
    assert decode.begin_step() == PREFILL
    decode.set_idle()
    assert prefill.begin_step() == DECODE


def test_a_worker_that_does_not_borrow_leaves_its_partners_cores_alone(table: Path) -> None:
    prefill, decode = SharedCores(table, PREFILL, DECODE), SharedCores(table, DECODE, PREFILL)
    assert prefill.begin_step(borrow=False) == ()
    begun_ns = time.monotonic_ns()
    assert decode.begin_step() == ()  # prefill is busy, on its own cores
    assert time.monotonic_ns() - begun_ns < 20_000_000


def test_who_wants_its_cores_back_waits_for_the_step_that_is_on_them_but_not_for_long(table: Path) -> None:
    prefill, decode = SharedCores(table, PREFILL, DECODE), SharedCores(table, DECODE, PREFILL)
    assert decode.begin_step(has_prompt=True) == PREFILL
    ended_ns: list[int] = []

    def end() -> None:
        ended_ns.append(time.monotonic_ns())
        decode.end_step()

    timer = threading.Timer(0.005, end)
    timer.start()
    assert prefill.begin_step() == ()
    assert ended_ns[0] < time.monotonic_ns()
    timer.join()
    prefill.set_idle()
    assert decode.begin_step() == PREFILL
    for waits in (True, False):  # the step does not end: it is waited for once
        begun_ns = time.monotonic_ns()
        assert prefill.begin_step() == ()
        assert (time.monotonic_ns() - begun_ns >= 40_000_000) is waits
    decode.set_idle()


def test_a_step_on_lent_cores_sees_that_it_must_yield(table: Path) -> None:
    prefill, decode = SharedCores(table, PREFILL, DECODE), SharedCores(table, DECODE, PREFILL)
    assert prefill.begin_step() == DECODE
    assert not prefill.must_yield()
    began = threading.Event()
    waiting = threading.Thread(target=lambda: (decode.begin_step(), began.set()))
    waiting.start()
    while not prefill.must_yield():
        time.sleep(0.0001)
    assert not began.is_set()
    prefill.end_step()
    assert began.wait(5)
    waiting.join()
    assert not prefill.must_yield()


def test_a_decode_step_that_waited_leaves_lent_cores_alone_for_a_while(table: Path) -> None:
    decode = SharedCores(table, DECODE, PREFILL)
    for num_alone in (2, 4, 8):
        assert decode.begin_step() == PREFILL
        time.sleep(0.002)  # as a thread does that waits for another one
        decode.end_step()
        assert decode.begin_step(has_prompt=True) == PREFILL
        decode.end_step()
        assert {decode.begin_step() for _ in range(num_alone)} == {()}


def test_a_dead_borrower_is_not_waited_for(table: Path) -> None:
    SharedCores(table, DECODE, PREFILL)
    long_ago_ns = time.monotonic_ns() - 60_000_000_000
    with table.open("r+b") as file:
        file.seek(64 * DECODE[0] + 16)
        file.write(struct.pack("=q", long_ago_ns))
    prefill = SharedCores(table, PREFILL, DECODE)
    begun_ns = time.monotonic_ns()
    prefill.begin_step(has_prompt=True)
    assert time.monotonic_ns() - begun_ns < 20_000_000


def test_a_long_step_keeps_its_cores_and_a_dead_worker_does_not(table: Path) -> None:
    prefill = SharedCores(table, PREFILL, DECODE)
    long_ago_ns = time.monotonic_ns() - 60_000_000_000
    write_line(table, DECODE[0], long_ago_ns, os.getpid())
    assert prefill.begin_step() == ()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_line(table, DECODE[0], long_ago_ns, dead.pid)
    assert prefill.begin_step() == DECODE


def test_a_worker_that_starts_anew_rests_at_first(table: Path) -> None:
    SharedCores(table, DECODE, PREFILL).begin_step()
    prefill = SharedCores(table, PREFILL, DECODE)
    assert prefill.begin_step() == ()
    SharedCores(table, DECODE, PREFILL)
    assert prefill.begin_step() == DECODE


def test_threads_stay_on_the_cores_they_were_born_on() -> None:
    own = os.sched_getaffinity(0)
    lent = (max(own),)
    seen: list[set[int]] = []
    with threads_born_on(lent):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
    thread.join()
    assert seen == [set(lent)]
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize(("text", "cores"), [("3", (3,)), ("4,0-2", (0, 1, 2, 4)), ("1,1", (1,))])
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


def settings(**values: str) -> PrefillSettings:
    return PrefillSettings(model="m", registry_address="r:1", **values)


def test_settings_say_with_whom_cores_are_shared(table: Path, tmp_path: Path) -> None:
    assert type(settings(cpu_list="0").compute_cores()) is ComputeCores
    pair = {"cpu_list": "0-1", "lent_cores": "2"}
    assert settings(core_table=str(table), **pair).compute_cores().begin_step() == (2,)
    assert type(settings(core_table=str(tmp_path / "gone"), **pair).compute_cores()) is ComputeCores
    with pytest.raises(ConfigurationError, match="lent_cores"):
        settings(core_table=str(table), cpu_list="0-1").compute_cores()
    with pytest.raises(ConfigurationError, match="4 lines"):
        settings(core_table=str(table), cpu_list="0-1", lent_cores="7").compute_cores()
