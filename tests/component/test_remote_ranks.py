"""Ranks that dial in to their leader: they compute as one rank, the wrong ones are refused, and all end together."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from decode_worker.settings import DecodeSettings
from engine.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.models.model_config import ModelConfig
from engine.ranks import remote
from engine.ranks.remote import load_remote_runner
from engine.ranks.remote_messages import Step
from engine.ranks.shared import Forward, StepMemory, encode_command
from engine.resolve import kv_layout, resolve
from engine.sequence import SequenceState
from mesh.domain.errors import ConfigurationError, WorkerLost
from mesh.domain.kv import KVSpan, Span
from mesh.rpc.credentials import MeshKey
from mesh.rpc.server import Listen
from rank_worker import joining
from rank_worker.settings import RankSettings
from tests.component.arms import settings
from tests.component.driving import Driver
from tests.component.parity import check_parity, run_mixed
from tests.component.test_forks import choices, run
from tests.fakes.certificates import Authority, Issued
from tests.fakes.requests import make_request
from tests.waiting import LIMIT_S, until
from worker.rank_link import own_address
from worker.rank_listener import RankListener

LOAD_S = 4 * LIMIT_S  # processes that import torch, on a busy machine
KEY = "a key of these tests"

Checkpoint = Callable[[str], Path]


class RankProcess:
    """`python -m rank_worker` that dials `port`."""

    def __init__(self, port: int, rank: int, model_dir: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "rank_worker", "--leader", f"127.0.0.1:{port}", "--rank", str(rank)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            [*command, "--model", str(model_dir), "--num-threads", "1", *flags],
            env=os.environ | {"TANDEM_MESH_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def wait_for(self, event: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if json.loads(line)["event"] == event:
                return
        raise AssertionError(self.end())

    def end(self) -> tuple[int, str]:
        """Wait for its end. Returns its status and its log."""
        status = self.process.wait(LOAD_S)
        self._log.seek(0)
        return status, self._log.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()


@contextmanager
def rank_processes(port: int, model_dir: Path, size: int, *flags: str) -> Iterator[list[RankProcess]]:
    ranks = [RankProcess(port, rank, model_dir, *flags) for rank in range(1, size)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def listener(size: int = 2, timeout_s: float = LOAD_S, tls: Issued | None = None) -> RankListener:
    listen = Listen("127.0.0.1", 0, MeshKey(KEY), tls=None if tls is None else tls.identity)
    return RankListener(listen, size, timeout_s=timeout_s, on_leaving=lambda: None)


@contextmanager
def remote_runner(
    model_dir: Path,
    size: int = 2,
    *flags: str,
    tls: Issued | None = None,
    on_lost: Callable[[str], None] = pytest.fail,
    **changes: object,
) -> Iterator[tuple[ModelRunner, list[RankProcess]]]:
    ranks = listener(size, tls=tls)
    with rank_processes(ranks.port, model_dir, size, *flags, *(tls.flags if tls else ())) as processes:
        runner = load_remote_runner(settings(model_dir, tensor_parallel=size, **changes), ranks, on_lost=on_lost)
        try:
            yield runner, processes
        finally:
            runner.close()


def whole_kv(runner: ModelRunner) -> torch.Tensor:
    cache = runner.kv_cache
    kv = bytearray(cache.payload_bytes(cache.num_blocks, cache.layout.whole))
    cache.read_blocks(range(cache.num_blocks), cache.layout.whole, kv)
    return torch.frombuffer(kv, dtype=torch.float32)


def test_ranks_compute_as_one(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, forks, whose blocks are copied, and KV, in small pieces. Under TLS, as in a mesh that has it."""
    monkeypatch.setattr(remote, "_PIECE_BYTES", 3000)
    model_dir = checkpoint("llama")
    alone = load_model_runner(settings(model_dir, enforce_eager=True))
    with remote_runner(model_dir, tls=Authority(tmp_path / "ca").issue("all")) as (runner, processes):
        check_parity(model_dir, runner)
        run_mixed(alone)
        torch.testing.assert_close(whole_kv(runner), whole_kv(alone), atol=1e-4, rtol=1e-4)
        forked = [_forked_tokens(each) for each in (runner, alone)]
        assert forked[0] == forked[1]
        _move_kv(runner)
        runner.close()
        status, log = processes[0].end()
        assert (status, "the leader has stopped" in log) == (0, True), log


def _forked_tokens(runner: ModelRunner) -> list[list[int]]:
    first = SequenceState(choices(33))
    first.forks = [SequenceState(fork) for fork in first.request.forked()]
    outputs, _ = run(runner, [first])
    return [[token.id for token in tokens] for tokens in outputs.values()]


def _move_kv(runner: ModelRunner) -> None:
    """What is written is read, a copy happens before the next step, and cleared blocks are zeros."""
    cache, blocks = runner.kv_cache, [9, 3, 4]
    span = KVSpan(Span(1, 1), Span(1, cache.layout.num_kv_heads - 1))
    data = os.urandom(cache.payload_bytes(len(blocks), span))
    cache.write_blocks(blocks, span, data)
    out = bytearray(len(data))
    cache.read_blocks(blocks, span, out)
    assert out == data
    cache.copy_block(9, 3)
    Driver(runner).step((Driver(runner).add(make_request("0", [1, 2, 3])), 3))
    copied, source = (bytearray(cache.payload_bytes(1, cache.layout.whole)) for _ in range(2))
    cache.read_blocks([3], cache.layout.whole, copied)
    cache.read_blocks([9], cache.layout.whole, source)
    assert copied == source
    assert any(source)
    cache.clear_blocks([9])
    cache.read_blocks([9], cache.layout.whole, source)
    assert not any(source)


def test_experts_and_the_least_number_of_blocks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("mixtral")
    layout = kv_layout(resolve(settings(model_dir))[1], settings(model_dir))
    # Half of what is left, for a cache of about 60 blocks; the leader has memory for 500.
    fraction = 2 * 60 * (layout.block_bytes / 2) / psutil.virtual_memory().available
    flags = ("--kv-memory-fraction", f"{fraction:.12f}", "--kv-memory-ledger", str(tmp_path))
    with remote_runner(model_dir, 2, *flags, num_blocks=None, max_blocks=500) as (runner, _):
        assert 20 < runner.kv_cache.num_blocks < 200
        check_parity(model_dir, runner)


def test_a_rank_without_memory_ends_all_with_its_reason(checkpoint: Checkpoint, tmp_path: Path) -> None:
    flags = ("--kv-memory-fraction", "0.000000000001", "--kv-memory-ledger", str(tmp_path))
    ranks = listener()
    wanted = settings(checkpoint("llama"), tensor_parallel=2, num_blocks=None, max_blocks=64)
    with rank_processes(ranks.port, checkpoint("llama"), 2, *flags) as (process,):
        with pytest.raises(ConfigurationError, match=r"rank 1 \(127.0.0.1\): no memory for the KV cache"):
            load_remote_runner(wanted, ranks, on_lost=pytest.fail)
        assert process.end()[0] == 2


def test_a_killed_rank_is_told(checkpoint: Checkpoint) -> None:
    lost, is_lost = [], threading.Event()

    def on_lost(reason: str) -> None:
        lost.append(reason)
        is_lost.set()

    with remote_runner(checkpoint("llama"), 3, on_lost=on_lost) as (runner, processes):
        driver = Driver(runner)
        begun = driver.add(make_request("0", [1, 2, 3], max_new_tokens=20))
        driver.step((begun, 3))
        processes[1].process.kill()
        assert is_lost.wait(LIMIT_S)
        assert lost == ["rank 2 (127.0.0.1) is lost: its connection has ended"]
        with pytest.raises(WorkerLost):
            driver.step((begun, 1))
        with pytest.raises(WorkerLost):
            whole_kv(runner)
        status, log = processes[0].end()
        assert (status, "rank 2 (127.0.0.1) is lost" in log) == (1, True), log


@contextmanager
def worker_and_rank(model_dir: Path) -> Iterator[tuple[subprocess.Popen[str], RankProcess]]:
    """A decode worker that waits for a rank, which is ready."""
    command = [sys.executable, "-m", "decode_worker", "--model", str(model_dir), "--registry-address", "127.0.0.1:1"]
    command += ["--tensor-parallel", "2", "--rank-listen", "127.0.0.1:0", "--kv-cache-bytes", "1000000"]
    with subprocess.Popen(
        command, env=os.environ | {"TANDEM_MESH_KEY": KEY}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            events = map(json.loads, worker.stdout)
            port = next(event["port"] for event in events if event["event"] == "waiting_for_ranks")
            with rank_processes(port, model_dir, 2) as (rank,):
                rank.wait_for("ready")
                assert any(event["event"] == "ready" for event in events)
                yield worker, rank
        finally:
            worker.kill()


def test_a_killed_leader_ends_the_rank(checkpoint: Checkpoint) -> None:
    with worker_and_rank(checkpoint("llama")) as (worker, rank):
        worker.kill()
        status, log = rank.end()
        assert (status, "the leader is lost, exiting" in log) == (1, True), log


def test_a_rank_that_is_asked_to_stop_lets_the_worker_drain(checkpoint: Checkpoint) -> None:
    with worker_and_rank(checkpoint("llama")) as (worker, rank):
        rank.process.send_signal(signal.SIGTERM)
        assert worker.wait(LOAD_S) == 0
        assert rank.end()[0] == 0


def rank_settings(port: int, model_dir: Path, **changes: Any) -> RankSettings:
    wanted = {"leader": f"127.0.0.1:{port}", "rank": 1, "model": str(model_dir), "mesh_key": KEY}
    return RankSettings(**wanted | {"leader_timeout_s": 0.2} | changes)  # type: ignore[arg-type]


@asynccontextmanager
async def gathering(model_dir: Path, size: int = 2) -> AsyncIterator[tuple[RankListener, asyncio.Task[str]]]:
    """A leader that waits for its ranks."""
    ranks = listener(size)
    wanted = settings(model_dir, tensor_parallel=size)
    fingerprint = kv_layout(resolve(wanted)[1], wanted).model_fingerprint
    gathered = asyncio.create_task(asyncio.to_thread(ranks.gather, wanted, fingerprint))
    try:
        yield ranks, gathered
    finally:
        await asyncio.to_thread(ranks.close)
        await asyncio.gather(gathered, return_exceptions=True)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"mesh_key": "the key of another mesh"}, "refuses this rank: .*the mesh key is missing or wrong"),
        ({"mesh_key": ""}, "refuses this rank: .*the mesh key is missing or wrong"),
        ({"rank": 2}, "rank 2 is out of range: this worker has tensor_parallel 2, and takes ranks 1 to 1"),
        ({"group_size": 4}, "rank 1 is one of 4, this worker has tensor_parallel 2"),
    ],
)
async def test_ranks_that_do_not_fit_are_refused(checkpoint: Checkpoint, changes: dict[str, Any], error: str) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        with pytest.raises(ConfigurationError, match=error):
            await joining._dial(rank_settings(ranks.port, checkpoint("llama"), **changes))
        assert not gathered.done(), "the leader waits for the right one"


async def test_another_model_or_version_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        with pytest.raises(ConfigurationError, match=r"rank 1 has another model: fingerprint .* not the leader's"):
            await joining._dial(rank_settings(ranks.port, checkpoint("qwen3")))
        with monkeypatch.context() as patched:
            patched.setattr(joining, "versions", lambda: "tandem 0.0.1")
            with pytest.raises(ConfigurationError, match=r"rank 1 has tandem 0.0.1; the leader has tandem \d"):
                await joining._dial(rank_settings(ranks.port, checkpoint("llama")))
        member = await joining._dial(rank_settings(ranks.port, checkpoint("llama")))
        assert await gathered == "127.0.0.1"
        await member.channel.close()


async def test_a_rank_that_is_taken_is_free_again_once_it_leaves(checkpoint: Checkpoint) -> None:
    async with gathering(checkpoint("llama"), size=3) as (ranks, gathered):
        wanted = rank_settings(ranks.port, checkpoint("llama"))
        first = await joining._dial(wanted)
        with pytest.raises(WorkerLost, match=r"within leader_timeout_s 0.2: rank 1 is taken, by 127.0.0.1"):
            await joining._dial(wanted)
        await first.channel.close()
        again = await joining._dial(rank_settings(ranks.port, checkpoint("llama"), leader_timeout_s=LIMIT_S))
        assert not gathered.done()
        other = await joining._dial(rank_settings(ranks.port, checkpoint("llama"), rank=2))
        await gathered
        for member in (again, other):
            await member.channel.close()


async def test_missing_ranks_are_named(checkpoint: Checkpoint) -> None:
    ranks = listener(4, timeout_s=0.1)
    with pytest.raises(WorkerLost, match=r"ranks 1, 2, 3 of 4 not joined at 127.0.0.1:\d+ within rank_timeout_s 0.1"):
        await asyncio.to_thread(ranks.gather, settings(checkpoint("llama")), "")
    await asyncio.to_thread(ranks.close)


async def test_no_leader(checkpoint: Checkpoint) -> None:
    with pytest.raises(WorkerLost, match=r"rank 1 could not join 127.0.0.1:1 within leader_timeout_s 0.2"):
        await joining._dial(rank_settings(1, checkpoint("llama")))


async def test_a_rank_of_an_earlier_run_disturbs_nothing(checkpoint: Checkpoint) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        member = await joining._dial(rank_settings(ranks.port, checkpoint("llama")))
        await gathered
        stale = joining.Member(member, rank_settings(ranks.port, checkpoint("llama")))
        stale._membership.setup.group = "another"
        with pytest.raises(WorkerLost, match="the rank is of an earlier run"):
            await asyncio.to_thread(stale._put_note, "stage-0/0", b"?")
        assert ranks._notes == {}
        await member.channel.close()
        await until(lambda: ranks._lost is not None)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quantize": "int8"}, "ranks on several machines cannot compute in int8: that needs the compiled decoder"),
        ({"tensor_parallel": 5}, "tensor_parallel 5 does not fit 4 KV heads"),
        ({"pipeline_parallel": 2}, "pipeline_parallel 2 over several machines is not built yet"),
    ],
)
def test_what_they_cannot_compute_is_refused(checkpoint: Checkpoint, changes: dict[str, Any], error: str) -> None:
    wanted = settings(checkpoint("llama"), **{"tensor_parallel": 2} | changes)
    with pytest.raises(ConfigurationError, match=error):
        load_remote_runner(wanted, listener(), on_lost=pytest.fail)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tensor_parallel": "1"}, "rank_listen needs tensor_parallel of 2 or more, as a number, got 1"),
        ({"tensor_parallel": "max"}, "rank_listen needs tensor_parallel of 2 or more, as a number, got max"),
        ({"pipeline_parallel": "2"}, "rank_listen does not fit pipeline_parallel 2"),
        ({"rank_listen": "127.0.0.1"}, "rank_listen must be host:port"),
        ({"rank_listen": "10.0.0.1:5"}, "rank_listen 10.0.0.1 is not on this machine: ranks exchange activations over"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s must be > 0"),
    ],
)
def test_wrong_settings_of_the_worker_are_named(changes: dict[str, Any], error: str) -> None:
    wanted = {"model": "m", "registry_address": "none", "tensor_parallel": "2", "rank_listen": "127.0.0.1:5"}
    with pytest.raises(ConfigurationError, match=error):
        DecodeSettings(**wanted | changes)


def test_a_worker_needs_cores_for_its_own_rank_only() -> None:
    wanted = {"model": "m", "registry_address": "none", "tensor_parallel": "2"}
    assert DecodeSettings(**wanted).num_local_ranks == 2  # type: ignore[arg-type]
    assert DecodeSettings(**wanted, rank_listen="127.0.0.1:5").num_local_ranks == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"leader": "10.0.0.1"}, "leader 10.0.0.1 is not on this machine: .*set trust_fabric"),
        ({"leader": "::1"}, "leader must be host:port, with IPv6 addresses in brackets"),
        ({"rank": 0}, "rank must be at least 1, got 0: the leader is rank 0"),
        ({"kv_memory_fraction": 2.0}, "kv_memory_fraction must be in"),
    ],
)
def test_wrong_settings_of_a_rank_are_named(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        rank_settings(5, tmp_path, **changes)


def test_addresses() -> None:
    assert rank_settings(5, Path("m"), leader="[::1]").leader_address == ("[::1]", 50060)
    assert rank_settings(5, Path("m"), leader="pod-0.group", trust_fabric=True).leader_address == ("pod-0.group", 50060)
    assert own_address(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(
        ConfigurationError, match=r"ranks dial in from 127.0.0.1, 192.0.2.1: those on the leader's machine"
    ):
        own_address(["127.0.0.1", "192.0.2.1"])


@pytest.mark.parametrize("wrong", [{"command": b"?"}, {"token_ids": b"\0" * 8}, {"sequences": b""}])
def test_garbled_steps_are_refused(checkpoint: Checkpoint, wrong: dict[str, bytes]) -> None:
    _, config = resolve(settings(checkpoint("llama")))
    assert isinstance(config, ModelConfig)
    memory = StepMemory(config, max_rows=8, max_blocks=4)
    step = {
        "command": encode_command(Forward(0, 0, 2, 1, 1, 0)),
        "token_ids": b"\0" * 16,
        "positions": b"\0" * 48,
        "sequences": b"\0" * 20,
    }
    remote._unpack(memory, Step(**step))
    with pytest.raises(ValueError, match=r"command|a step has"):
        remote._unpack(memory, Step(**step | wrong))
