"""Tensor-parallel ranks as processes: equal to one rank, to the bit, and nothing is left when one of them ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from structlog.testing import capture_logs

from engine.kernels.cpu.machine import why_no_loops
from engine.loading.load_phases import measured_load
from engine.loading.resolve import resolve
from engine.model_runner import ModelRunner
from engine.models.model_config import ModelConfig
from engine.ranks import launch
from engine.ranks.commands import Command, Forward, Logits, PutAdapter, decode_command, encode_command
from engine.ranks.launch import RankProcesses, load_ranked_runner
from engine.ranks.shared import StepMemory, max_sequence_blocks
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from engine.speculation.drafters import NgramDrafter
from mesh.domain.errors import ConfigurationError, WorkerLost
from mesh.domain.kv import Degrees
from tests.component.arms import load_arm, settings
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.kv.test_forks import choices, run
from tests.component.parity import run_mixed
from tests.component.ranks.logged_process import LoggedProcess
from tests.component.sampling.test_speculation import answer, requests
from tests.evidence import Evidence
from tests.waiting import LIMIT_S, until
from worker import load_engine

Checkpoint = Callable[[str], Path]


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of a leader's ranks, rank 1 first."""
    children = (c for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE)
    return sorted((c for c in children if "rank_worker" in c.cmdline()), key=lambda c: c.pid)


def require_gone(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT_S)
    assert [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []


def has_ended(process: psutil.Process) -> bool:
    """True for a zombie: the system may be slow to reap orphans."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def mixed(runner: ModelRunner) -> object:
    """Tokens, log-probs and prompt log-probs of prompts in chunks, beside decodes."""
    return [(each.tokens, each.prompt_logprobs) for each in run_mixed(runner)]


def results(runner: ModelRunner) -> list[object]:
    """Those of `mixed`, of forks that sample, and of requests of all kinds with guesses."""
    first = SequenceState(choices(33))
    first.forks = [SequenceState(fork) for fork in first.spec.forked()]
    guessed, scheduler = answer(runner, NgramDrafter(), requests())
    assert scheduler.load().drafted_tokens > 0
    return [mixed(runner), run(runner, [first])[0], guessed]


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(1, 3)], ids=str)
def test_processes_equal_one(checkpoint: Checkpoint, degrees: Degrees) -> None:
    alone = results(load_arm(checkpoint("llama"), "compiled"))
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    wanted = settings(checkpoint("llama"), tensor_parallel=degrees.tensor, pipeline_parallel=degrees.pipeline)
    with closing(load_ranked_runner(wanted, on_lost=pytest.fail)) as runner:
        ranks = ranks_of(os.getpid())
        assert len(ranks) == degrees.num_ranks - 1
        assert results(runner) == alone
    require_gone(ranks)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, num_threads)


def test_more_processes_than_cores_are_slow_but_right(checkpoint: Checkpoint) -> None:
    alone = mixed(load_arm(checkpoint("llama"), "compiled", quantize="int8"))
    wanted = settings(checkpoint("llama"), quantize="int8", tensor_parallel=3)
    one_core = {min(os.sched_getaffinity(0))}
    with (
        capture_logs() as logs,
        pinned(one_core),
        closing(load_ranked_runner(wanted, on_lost=pytest.fail)) as runner,
    ):
        assert [rank.cpu_affinity() for rank in ranks_of(os.getpid())] == [[*one_core]] * 2
        assert mixed(runner) == alone
    warning = {"event": "ranks share cores and will wait for each other", "ranks": 3, "cores": 1}
    assert warning | {"log_level": "warning"} in logs


@pytest.mark.parametrize(
    ("family", "changes", "error"),
    [
        ("llama", {"tensor_parallel": 5}, "tensor_parallel 5 does not fit 4 KV heads: use 4 or fewer"),
        ("llama", {"tensor_parallel": 1, "pipeline_parallel": 4}, "4 does not fit 3 layers: use 3 or fewer"),
        ("llama", {"device": "cuda"}, r"cuda"),
        (
            "llama",
            {"quantize": "int8", "enforce_eager": True},
            r"in int8 needs the compiled decoder, which cannot run here \(enforce_eager is set\): use 1",
        ),
    ],
)
def test_what_ranks_cannot_compute_is_refused_before_they_start(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RankProcesses", lambda *_: pytest.fail("ranks are started"))
    wanted = settings(checkpoint(family), **{"tensor_parallel": 2} | changes)
    with pytest.raises(ConfigurationError, match=error):
        load_ranked_runner(wanted, on_lost=pytest.fail)


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    model_dir = build_encoder_decoder("t5", tmp_path)
    for name in ("tensor_parallel", "pipeline_parallel"):
        expected = f"{name} 2 does not fit an encoder-decoder model: ranks cannot divide its encoder yet; use 1"
        with pytest.raises(ConfigurationError, match=expected):
            load_ranked_runner(settings(model_dir, **{name: 2}), on_lost=pytest.fail)


@pytest.mark.parametrize("point", ["wait", "tell"])  # before "loaded", before "ready"
def test_rank_killed_while_loading(checkpoint: Checkpoint, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = getattr(RankProcesses, point)
    started: list[psutil.Process] = []

    def kill_first(self: RankProcesses, *arguments: Any, **fields: Any) -> Any:
        if not started:
            started.extend(ranks_of(os.getpid()))
            started[0].kill()
        return original(self, *arguments, **fields)

    monkeypatch.setattr(RankProcesses, point, kill_first)
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pytest.raises(WorkerLost, match="rank 1 was killed by SIGKILL"):
        load_ranked_runner(settings(checkpoint("llama"), tensor_parallel=3), on_lost=pytest.fail)
    assert len(started) == 2
    require_gone(started)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, num_threads)


@pytest.mark.parametrize("log_json", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_garbled_command_ends_the_rank_with_its_reason(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], log_json: bool
) -> None:
    watched: list[RankProcesses] = []
    lost, is_lost = [], threading.Event()
    watch: Any = RankProcesses.watch

    def note_and_watch(self: RankProcesses, *arguments: Any) -> None:
        watched.append(self)
        watch(self, *arguments)

    def on_lost(reason: str) -> None:
        lost.append(reason)
        is_lost.set()

    monkeypatch.setattr(RankProcesses, "watch", note_and_watch)
    wanted = RunnerSettings(checkpoint("llama"), num_blocks=8, tensor_parallel=2)
    with closing(load_ranked_runner(wanted, on_lost=on_lost, log_json=log_json)) as runner:
        ranks = ranks_of(os.getpid())
        assert runner.rank_pids == tuple(rank.pid for rank in ranks)
        watched[0].tell(garbled="?")
        assert is_lost.wait(LIMIT_S)
    assert lost == ["rank 1: ValueError: a command has 64 bytes, not 16; its log has the details"]
    require_gone(ranks)
    line = next(line for line in capfd.readouterr().err.splitlines() if "unexpected error, exiting" in line)
    assert line.startswith("{") == log_json
    if log_json:
        assert json.loads(line).items() >= {"service": "rank_worker", "rank": 1, "level": "critical"}.items()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * len(encode_command(Logits(1))),
        encode_command(Logits(-1)),
        encode_command(Forward(0, 0, -1, 1, 1, 1)),
        encode_command(Forward(0, 0, 2, 3, 1, 1)),
        encode_command(Forward(0, 0, 2, 1, -1, 1)),
        encode_command(Forward(0, 0, 3, 1, 1, 2)),
        encode_command(Forward(-1, 0, 2, 1, 1, 1)),
        encode_command(Forward(0, 0, 2, 1, 1, 1, 2)),
        encode_command(PutAdapter(0, -1)),
    ],
)
def test_impossible_commands_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="command"):
        decode_command(message)


@pytest.mark.parametrize("command", [Logits(3), Forward(1, 2, 9, 4, 5, 3, 2), PutAdapter(2, 7)])
def test_commands_arrive_as_they_were_sent(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


def test_steps_have_memory_for_sequences_beyond_the_models_limit(checkpoint: Checkpoint) -> None:
    num_seqs, blocks_of_each = 32, 500  # the model's limit is 32 blocks
    wanted = settings(checkpoint("llama"), max_batch_tokens=33, max_blocks=num_seqs * blocks_of_each)
    resolved, config = resolve(wanted)
    assert isinstance(config, ModelConfig)
    memory = StepMemory(config, max_rows=33, max_blocks=max_sequence_blocks(resolved, config))
    tables = num_seqs * blocks_of_each
    assert memory.get("sequences", tables + 3 * num_seqs + 1, np.int32).size >= tables


class Leader(LoggedProcess):
    """A process of `ranks_leader`, and its ranks."""

    def __init__(self, model_dir: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.component.ranks.ranks_leader", str(model_dir), *arguments]
        super().__init__(command, stdin=subprocess.PIPE)
        self.ranks: list[psutil.Process] = []

    def wait_loaded(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == '{"event": "loaded"}\n', self.end()
        self.ranks = ranks_of(self.process.pid)

    def begin_step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    async def stop_in_step(self) -> None:
        """Stop the last rank, and begin a step. Returns when another waits for it in the middle of the step."""
        if reason := why_no_loops():
            pytest.skip(f"ranks that wait for gloo sleep: {reason}")
        self.ranks[-1].suspend()
        waiting = self.ranks[-2]
        before_s = sum(waiting.cpu_times()[:2])
        self.begin_step()
        # It waits with its core: an idle process would take no CPU time.
        await until(lambda: sum(waiting.cpu_times()[:2]) > before_s + 0.3)


@contextmanager
def leader(model_dir: Path, *arguments: str) -> Iterator[Leader]:
    started = Leader(model_dir, *arguments)
    try:
        yield started
    finally:
        started.close()


async def test_rank_killed_while_idle_ends_all(checkpoint: Checkpoint) -> None:
    with leader(checkpoint("llama"), "steps", "1x2") as running:
        running.wait_loaded()
        running.ranks[0].kill()
        status, stderr = running.end()
        assert (status, "rank 1 was killed by SIGKILL" in stderr) == (1, True), stderr
        require_gone(running.ranks)


@pytest.mark.parametrize("degrees", [pytest.param("3x1", marks=pytest.mark.soak), "2x2"])
async def test_rank_killed_in_a_step_ends_all(checkpoint: Checkpoint, degrees: str) -> None:
    with leader(checkpoint("llama"), "steps", degrees) as running:
        running.wait_loaded()
        await running.stop_in_step()
        running.ranks[-1].kill()
        status, stderr = running.end()
        assert (status, f"rank {len(running.ranks)} was killed by SIGKILL" in stderr) == (1, True), stderr
        require_gone(running.ranks)


async def test_leader_killed_in_a_step_leaves_nothing(checkpoint: Checkpoint, evidence: Evidence) -> None:
    with leader(checkpoint("llama"), "steps", "2x2") as running:
        running.wait_loaded()
        mapped = {file.path.removesuffix(" (deleted)") for rank in running.ranks for file in rank.memory_maps()}
        await running.stop_in_step()
        running.process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        await until(lambda: all(map(has_ended, running.ranks)))
        took_s = time.monotonic() - killed_s
    measured = f"after {took_s:.2f} s"
    evidence("R6", "ranks of a killed leader ended", measured, target="<= 1 s", ok=took_s <= 1, is_reported_only=True)
    # The ranks' memory has no name, so nothing in a file system can outlive them.
    assert {"/memfd:tandem-steps", "/memfd:tandem-kv"} <= mapped
    assert [path for path in mapped if path.startswith("/dev/shm/")] == []


def test_rank_killed_before_the_first_step_ends_all(checkpoint: Checkpoint) -> None:
    with leader(checkpoint("llama"), "first-step") as running:
        status, stderr = running.end()
        assert (status, "rank 1 was killed by SIGKILL" in stderr) == (1, True), stderr


async def test_ranks_end_when_loading_takes_too_long(checkpoint: Checkpoint) -> None:
    with leader(checkpoint("llama"), "timeout") as running:
        status, stderr = running.end()
    events = {entry["event"]: entry for entry in map(json.loads, stderr.splitlines())}
    assert (status, "model not loaded in time" in events) == (1, True), stderr
    (pid,) = events["ranks started"]["pids"]
    await until(lambda: not psutil.pid_exists(pid) or has_ended(psutil.Process(pid)))


def test_ranks_log_as_their_worker(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, object] = {}
    monkeypatch.setattr(load_engine, "load_ranked_runner", lambda *_, **options: passed.update(options))
    monkeypatch.setattr(load_engine, "log_format", lambda: ("debug", False))
    load_engine.load_runner_with_ranks(settings(checkpoint("llama"), tensor_parallel=2))
    assert (passed["log_level"], passed["log_json"]) == ("debug", False)


def test_every_rank_reports_how_long_it_loaded(checkpoint: Checkpoint) -> None:
    wanted = settings(checkpoint("llama"), tensor_parallel=2)
    with capture_logs() as logs, measured_load() as phases:
        load_ranked_runner(wanted, on_lost=pytest.fail).close()
    (loaded,) = (entry for entry in logs if entry["event"] == "rank loaded")
    assert loaded["rank"] == 1
    assert loaded["phases"]["read"] > 0
    assert min(phases[name] for name in ("read", "ranks", "kv", "build")) > 0


def test_what_a_rank_cannot_load_is_told_by_the_worker(checkpoint: Checkpoint, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with leader(checkpoint("llama"), "refused", str(broken)) as running:
        status, stderr = running.end()
    assert status == 2
    assert stderr.splitlines()[-1].startswith(f"decode_worker: rank 1: {broken}")
