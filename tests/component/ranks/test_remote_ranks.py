"""Ranks that dial in to their leader: they compute as one rank, the wrong ones are refused, and all end together."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout, resolve
from engine.memory import device_memory
from engine.model_runner import ModelRunner
from engine.models.model_config import ModelConfig
from engine.ranks import remote
from engine.ranks.collectives import NoteStore
from engine.ranks.commands import Forward, encode_command
from engine.ranks.messages import StepMessage
from engine.ranks.remote import OwnMemoryRank, load_remote_runner
from engine.ranks.shared import StepMemory
from engine.sequence import SequenceState
from engine.settings import KVMemorySettings
from kvtransfer import (
    SERVICE_NAME,
    ExpectedTransfer,
    KVReceiver,
    KVSender,
    MultiRankReceiver,
    MultiRankSender,
    TransferSpec,
)
from mesh.domain.errors import ConfigurationError, InvalidRequest, WorkerBusy, WorkerLost
from mesh.domain.kv import Degrees, Span
from mesh.domain.worker import KVEndpoint
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.v1 import rank_pb2
from rank_worker import remote_rank
from rank_worker.settings import RankSettings
from tests.component.arms import settings
from tests.component.driving import Driver
from tests.component.kv.test_forks import choices, run
from tests.component.parity import check_parity, run_mixed
from tests.component.ranks.logged_process import LOAD_S, LoggedProcess
from tests.fakes.certificates import Authority, Issued
from tests.fakes.kv_store import FakeKVStore
from tests.fakes.requests import make_request
from tests.fakes.transfers import FIRST_TOKEN, GRPC_ONLY, INCARNATION, Outcomes
from tests.waiting import LIMIT_S, until
from worker import load_watch
from worker.ranks.connection import RankConnection, own_address
from worker.ranks.listener import RankListener

END_S = 1.0
KEY = "a key of these tests"

Checkpoint = Callable[[str], Path]


class RankProcess(LoggedProcess):
    """`python -m rank_worker`, or another module like it, that dials `port`."""

    def __init__(self, port: int, rank: int, model_dir: Path, *flags: str, module: str = "rank_worker") -> None:
        command = [sys.executable, "-m", module, "--leader", f"127.0.0.1:{port}", "--rank", str(rank)]
        words = [*command, "--model", str(model_dir), "--num-threads", "1", *flags]
        super().__init__(words, stdin=subprocess.DEVNULL, env=os.environ | {"TANDEM_MESH_KEY": KEY})

    def wait_for(self, event: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if json.loads(line)["event"] == event:
                return
        raise AssertionError(self.end())


@contextmanager
def rank_processes(
    port: int, model_dir: Path, size: int, *flags: str, module: str = "rank_worker"
) -> Iterator[list[RankProcess]]:
    ranks = [RankProcess(port, rank, model_dir, *flags, module=module) for rank in range(1, size)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def listener(size: int = 2, timeout_s: float = LOAD_S, tls: Issued | None = None) -> RankListener:
    listen = Listen("127.0.0.1", 0, MeshKey(KEY), tls=None if tls is None else tls.identity)
    return RankListener(listen, Degrees(size), timeout_s=timeout_s, on_leaving=lambda: None)


@contextmanager
def remote_runner(
    model_dir: Path,
    size: int = 2,
    *flags: str,
    tls: Issued | None = None,
    on_lost: Callable[[str], None] = pytest.fail,
    module: str = "rank_worker",
    **changes: object,
) -> Iterator[tuple[ModelRunner, list[RankProcess], tuple[RankConnection, ...]]]:
    ranks = listener(size, tls=tls)
    with rank_processes(ranks.port, model_dir, size, *flags, *(tls.flags if tls else ()), module=module) as processes:
        runner = load_remote_runner(settings(model_dir, tensor_parallel=size, **changes), ranks, on_lost=on_lost)
        try:
            yield runner, processes, ranks.connections
        finally:
            runner.close()


class MovingKV:
    """Moves KV into the ranks of a runner and out of them, as the other worker's ranks do."""

    def __init__(self, runner: ModelRunner, connections: Sequence[RankConnection], tls: Issued) -> None:
        self._cache = runner.kv_cache
        self._connections = connections
        self._credentials = Credentials(MeshKey(KEY), tls.identity)
        setup = rank_pb2.KvSetup(transports=["grpc"], worker_id="w")
        taking = rank_pb2.KvSetup(transports=["grpc"], incarnation=INCARNATION)
        for request in (setup, taking):  # a worker's ranks do one of them
            ports = [connection.ask(rank_pb2.KvOrder(setup=request)).result(LIMIT_S).port for connection in connections]
        self._endpoints = [
            KVEndpoint(f"127.0.0.1:{port}", connection.span)
            for connection, port in zip(connections, ports, strict=True)
        ]
        self._num_moved = itertools.count()

    def all(self) -> np.ndarray:
        """All KV of all ranks: [layers, 2, blocks, tokens, heads, bytes]."""
        target = FakeKVStore(self._cache.layout, self._cache.num_blocks)
        asyncio.run(self._move(self._cache, self._connections, target, (), range(self._cache.num_blocks)))
        return target.data

    def put(self, source: FakeKVStore, block_ids: Sequence[int]) -> None:
        asyncio.run(self._move(source, (), self._cache, self._connections, block_ids))

    async def _move(
        self,
        source: Any,
        senders: Sequence[RankConnection],
        target: Any,
        takers: Sequence[RankConnection],
        ids: Sequence[int],
    ) -> None:
        transfer_id, block_ids, outcomes = f"t{next(self._num_moved)}", tuple(ids), Outcomes()
        num_tokens = len(block_ids) * self._cache.layout.block_size
        receiver = MultiRankReceiver(
            lambda callbacks: KVReceiver(target, INCARNATION, callbacks, GRPC_ONLY), takers, outcomes.callbacks()
        )
        sender = MultiRankSender(KVSender(source, "w", self._credentials, GRPC_ONLY), senders)
        server = Server(Listen("127.0.0.1", 0, MeshKey(KEY), tls=self._credentials.tls))
        receiver.own.add_to(server.grpc)
        await server.start([SERVICE_NAME])
        try:
            await receiver.expect(ExpectedTransfer(transfer_id, 1, block_ids, 0, num_tokens))
            spec = TransferSpec(transfer_id, 1, "", INCARNATION, block_ids, target.layout.whole)
            endpoints = [KVEndpoint(server.address, target.span), *(self._endpoints if takers else ())]
            transfer = sender.open(spec, endpoints)
            transfer.announce(Span(0, len(block_ids)), target.layout.whole.layers)
            await transfer.commit(num_tokens, FIRST_TOKEN)
            await asyncio.wait_for(outcomes.changed.wait(), LIMIT_S)
            assert outcomes.committed == [(transfer_id, FIRST_TOKEN)]
        finally:
            await sender.close()
            await receiver.close()
            await server.stop(0)


def floats(kv: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(kv.reshape(-1).view(np.float32))


def test_ranks_compute_as_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Steps, forks, whose blocks are copied, and KV. Under TLS, as in a mesh that has it."""
    model_dir, tls = checkpoint("llama"), Authority(tmp_path / "ca").issue("all")
    alone = load_model_runner(settings(model_dir, enforce_eager=True))
    with remote_runner(model_dir, tls=tls) as (runner, processes, connections):
        moving = MovingKV(runner, connections, tls)
        check_parity(model_dir, runner)
        run_mixed(alone)
        cache = alone.kv_cache
        expected = bytearray(cache.payload_bytes(cache.num_blocks, cache.span))
        cache.read_blocks(range(cache.num_blocks), cache.span, expected)
        torch.testing.assert_close(
            floats(moving.all()), torch.frombuffer(expected, dtype=torch.float32), atol=1e-4, rtol=1e-4
        )
        forked = [_forked_tokens(each) for each in (runner, alone)]
        assert forked[0] == forked[1]
        _move_kv(runner, moving)
        runner.close()
        status, log = processes[0].end()
        assert (status, "the leader has stopped" in log) == (0, True), log


def _forked_tokens(runner: ModelRunner) -> list[list[int]]:
    first = SequenceState(choices(33))
    first.forks = [SequenceState(fork) for fork in first.spec.forked()]
    outputs, _ = run(runner, [first])
    return [[token.id for token in tokens] for tokens in outputs.values()]


def _move_kv(runner: ModelRunner, moving: MovingKV) -> None:
    """What comes is there, a copy happens before the next step, and cleared blocks are zeros, in all ranks."""
    cache, blocks = runner.kv_cache, [9, 3, 4]
    source = FakeKVStore(cache.layout, seed=3)
    moving.put(source, blocks)
    assert np.array_equal(moving.all()[:, :, blocks], source.data[:, :, blocks])
    cache.copy_block(9, 3)
    Driver(runner).step((Driver(runner).add(make_request("0", [1, 2, 3])), 3))
    assert np.array_equal(moving.all()[:, :, 3], source.data[:, :, 9])
    before = moving.all()
    cache.clear_blocks([9], 5)
    assert np.array_equal(moving.all()[:, :, 9, :5], before[:, :, 9, :5])
    assert before[:, :, 9, 5:].any()
    assert not moving.all()[:, :, 9, 5:].any()
    cache.clear_blocks([9])
    assert not moving.all()[:, :, 9].any()


def test_experts_and_the_least_number_of_blocks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("mixtral")
    layout = kv_layout(resolve(settings(model_dir))[1], settings(model_dir))
    # Half of what is left, for a cache of about 60 blocks; the leader has memory for 500.
    fraction = 2 * 60 * (layout.block_bytes / 2) / psutil.virtual_memory().available
    flags = ("--kv-memory-fraction", f"{fraction:.12f}", "--kv-memory-ledger", str(tmp_path))
    with remote_runner(model_dir, 2, *flags, num_blocks=None, max_blocks=500) as (runner, _, _):
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

    with remote_runner(checkpoint("llama"), 3, on_lost=on_lost) as (runner, processes, connections):
        driver = Driver(runner)
        begun = driver.add(make_request("0", [1, 2, 3], max_new_tokens=20))
        driver.step((begun, 3))
        processes[1].process.kill()
        assert is_lost.wait(LIMIT_S)
        assert lost == ["rank 2 (127.0.0.1) is lost: its connection has ended"]
        with pytest.raises(WorkerLost):
            driver.step((begun, 1))
        with pytest.raises(WorkerLost):
            runner.kv_cache.clear_blocks([1])
        with pytest.raises(WorkerLost):
            connections[0].ask(rank_pb2.KvOrder()).result(LIMIT_S)
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
        killed_s = time.monotonic()
        status, log = rank.end()
        assert time.monotonic() - killed_s < END_S
        assert (status, "the leader is lost, exiting" in log) == (1, True), log


def test_a_rank_that_is_asked_to_stop_lets_the_worker_drain(checkpoint: Checkpoint) -> None:
    with worker_and_rank(checkpoint("llama")) as (worker, rank):
        rank.process.send_signal(signal.SIGTERM)
        assert worker.wait(LOAD_S) == 0
        assert rank.end()[0] == 0


def test_a_rank_that_cannot_follow_its_stdin_does_not_end_in_order(checkpoint: Checkpoint) -> None:
    with rank_processes(1, checkpoint("llama"), 2, "--follow-stdin") as (rank,):
        status, log = rank.end()
        assert (status, "PermissionError" in log) == (1, True), log


async def test_a_joined_rank_whose_wait_for_a_stop_fails_tells_its_leader(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = threading.Event()
    monkeypatch.setattr(remote_rank, "OwnMemoryRank", lambda *_: loading.wait())

    async def fail() -> None:
        raise PermissionError("stdin cannot be followed")

    async with gathering(checkpoint("llama")) as (ranks, gathered):
        rank = rank_settings(ranks.port, checkpoint("llama"))
        joined = remote_rank.JoinedRank(await remote_rank._dial(rank), rank)
        await gathered
        status = await asyncio.wait_for(joined.serve(asyncio.create_task(fail())), LIMIT_S)
        loading.set()
        assert status == 1
        assert "PermissionError: stdin cannot be followed" in str(ranks._lost)


def rank_settings(port: int, model_dir: Path, **changes: Any) -> RankSettings:
    wanted = {"leader": f"127.0.0.1:{port}", "rank": 1, "model": str(model_dir), "mesh_key": KEY}
    return RankSettings(**wanted | {"leader_timeout_s": 0.2} | changes)  # type: ignore[arg-type]


@asynccontextmanager
async def gathering(model_dir: Path, size: int = 2) -> AsyncIterator[tuple[RankListener, asyncio.Task[str]]]:
    """A leader that waits for its ranks."""
    ranks = listener(size)
    wanted = settings(model_dir, tensor_parallel=size)
    layout = kv_layout(resolve(wanted)[1], wanted)
    gathered = asyncio.create_task(asyncio.to_thread(ranks.gather, wanted, layout))
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
        ({"rank": 2}, r"rank 2 is out of range: this worker has 2 ranks \(2x1\), and takes ranks 1 to 1"),
        ({"group_size": 4}, r"rank 1 is one of 4, this worker has 2 ranks \(2x1\)"),
    ],
)
async def test_ranks_that_do_not_fit_are_refused(checkpoint: Checkpoint, changes: dict[str, Any], error: str) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        with pytest.raises(ConfigurationError, match=error):
            await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama"), **changes))
        assert not gathered.done(), "the leader waits for the right one"


async def test_another_model_or_version_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        with pytest.raises(ConfigurationError, match=r"rank 1 has another model: fingerprint .* not the leader's"):
            await remote_rank._dial(rank_settings(ranks.port, checkpoint("qwen3")))
        with monkeypatch.context() as patched:
            patched.setattr(remote_rank, "versions", lambda: "tandem 0.0.1")
            with pytest.raises(ConfigurationError, match=r"rank 1 has tandem 0.0.1; the leader has tandem \d"):
                await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama")))
        member = await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama")))
        assert await gathered == "127.0.0.1"
        await member.channel.close()


async def test_a_rank_that_is_taken_is_free_again_once_it_leaves(checkpoint: Checkpoint) -> None:
    async with gathering(checkpoint("llama"), size=3) as (ranks, gathered):
        wanted = rank_settings(ranks.port, checkpoint("llama"))
        first = await remote_rank._dial(wanted)
        with pytest.raises(WorkerLost, match=r"within leader_timeout_s 0.2: rank 1 is taken, by 127.0.0.1"):
            await remote_rank._dial(wanted)
        await first.channel.close()
        again = await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama"), leader_timeout_s=LIMIT_S))
        assert not gathered.done()
        other = await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama"), rank=2))
        await gathered
        for member in (again, other):
            await member.channel.close()


async def test_missing_ranks_are_named(checkpoint: Checkpoint) -> None:
    ranks = listener(4, timeout_s=0.1)
    wanted = settings(checkpoint("llama"))
    layout = kv_layout(resolve(wanted)[1], wanted)
    with pytest.raises(WorkerLost, match=r"ranks 1, 2, 3 of 4 not joined at 127.0.0.1:\d+ within rank_timeout_s 0.1"):
        await asyncio.to_thread(ranks.gather, wanted, layout)
    await asyncio.to_thread(ranks.close)


async def test_no_leader(checkpoint: Checkpoint) -> None:
    with pytest.raises(WorkerLost, match=r"rank 1 could not join 127.0.0.1:1 within leader_timeout_s 0.2"):
        await remote_rank._dial(rank_settings(1, checkpoint("llama")))


async def test_notes_have_limits(checkpoint: Checkpoint) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        member = await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama")))
        await gathered
        joined = remote_rank.JoinedRank(member, rank_settings(ranks.port, checkpoint("llama")))
        with pytest.raises(InvalidRequest, match="a note of 65537 bytes is over the limit of 65536"):
            await asyncio.to_thread(joined._put_note, "k", bytes(1 << 16))
        for number in range(32):
            ranks._put_note(str(number), b"")
        await asyncio.to_thread(joined._put_note, "31", b"again")
        with pytest.raises(InvalidRequest, match="32 notes are written, and 2 ranks need no more"):
            await asyncio.to_thread(joined._put_note, "32", b"")
        await member.channel.close()


async def test_memory_that_others_have_taken_meanwhile_is_no_wrong_setting(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker then ends with status 1 and is started again."""
    memory = KVMemorySettings(ledger=str(tmp_path))
    wanted = settings(checkpoint("llama"), tensor_parallel=2, num_blocks=None, max_blocks=8, kv_memory=memory)
    own = OwnMemoryRank(wanted, 1, NoteStore(lambda *_: None, lambda _: b""))
    num_blocks = own.fitting_blocks()
    none_left = replace(device_memory(torch.device("cpu")), free_bytes=0)
    monkeypatch.setattr("engine.kv.budget.device_memory", lambda _: none_left)
    with pytest.raises(WorkerBusy, match=r"others have taken memory since it was counted: .* are left") as taken:
        own.allocate(num_blocks)
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        rank = rank_settings(ranks.port, checkpoint("llama"))
        joined = remote_rank.JoinedRank(await remote_rank._dial(rank), rank)
        await gathered
        assert await joined._fail(taken.value, asyncio.create_task(joined._read())) == 1
        assert isinstance(ranks._lost, WorkerLost)
        assert str(ranks._lost).startswith("rank 1 (127.0.0.1): others have taken memory")


async def test_a_rank_that_loads_tells_the_leader_that_it_gets_on(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_watch, "_CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(load_watch, "_CPU_S", 0.01)
    signs: list[None] = []

    def load_slowly(*_: object) -> None:
        while len(signs) < 3:
            pass
        raise ConfigurationError("enough")

    monkeypatch.setattr(remote_rank, "OwnMemoryRank", load_slowly)
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        ranks._on_progress = lambda: signs.append(None)
        rank = rank_settings(ranks.port, checkpoint("llama"))
        joined = remote_rank.JoinedRank(await remote_rank._dial(rank), rank)
        await gathered
        stopped = asyncio.create_task(asyncio.Event().wait())
        assert await asyncio.wait_for(joined.serve(stopped), LIMIT_S) == 2
        stopped.cancel()
        assert str(ranks._lost) == "rank 1 (127.0.0.1): enough"


async def test_a_rank_of_an_earlier_run_disturbs_nothing(checkpoint: Checkpoint) -> None:
    async with gathering(checkpoint("llama")) as (ranks, gathered):
        member = await remote_rank._dial(rank_settings(ranks.port, checkpoint("llama")))
        await gathered
        stale = remote_rank.JoinedRank(member, rank_settings(ranks.port, checkpoint("llama")))
        stale._group.setup.group = "another"
        with pytest.raises(WorkerLost, match="the rank is of an earlier run"):
            await asyncio.to_thread(stale._put_note, "stage-0/0", b"?")
        assert ranks._notes == {}
        await member.channel.close()
        await until(lambda: ranks._lost is not None)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quantize": "int8"}, "ranks that share no memory cannot compute in int8: that needs the compiled decoder"),
        ({"tensor_parallel": 5}, "tensor_parallel 5 does not fit 4 KV heads"),
        ({"pipeline_parallel": 4}, "pipeline_parallel 4 does not fit 3 layers"),
    ],
)
def test_what_they_cannot_compute_is_refused(checkpoint: Checkpoint, changes: dict[str, Any], error: str) -> None:
    wanted = settings(checkpoint("llama"), **{"tensor_parallel": 2} | changes)
    with pytest.raises(ConfigurationError, match=error):
        load_remote_runner(wanted, listener(), on_lost=pytest.fail)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tensor_parallel": "1"}, "rank_listen needs 2 ranks or more: .* as numbers, got 1 and 1"),
        ({"tensor_parallel": "max"}, "rank_listen needs 2 ranks or more: .* as numbers, got max and 1"),
        ({"pipeline_parallel": "max"}, "rank_listen needs 2 ranks or more: .* as numbers, got 2 and max"),
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
    remote._unpack(memory, StepMessage(**step))
    with pytest.raises(ValueError, match=r"command|a step has"):
        remote._unpack(memory, StepMessage(**step | wrong))
