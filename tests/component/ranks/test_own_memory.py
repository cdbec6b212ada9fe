"""Ranks of one machine without shared memory, as on GPUs: here on CPU, over gloo, started as a worker starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.models.read_config import load_decoder_config
from engine.models.share import rank_share
from engine.ranks.remote import load_remote_runner
from engine.sequence import SequenceState
from engine.settings import KVMemorySettings
from engine.speculation.drafters import NgramDrafter
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tests.component.arms import ARMS, embedding, settings
from tests.component.driving import Driver
from tests.component.kv.test_forks import choices, run
from tests.component.parity import check_parity
from tests.component.ranks.own_memory import own_memory_runner
from tests.component.ranks.test_rank_processes import has_ended, ranks_of, require_gone
from tests.component.sampling.test_speculation import answer, ids, requests
from tests.component.test_not_finite import BAD_TOKEN, good_prompts
from tests.evidence import Evidence
from tests.fakes.drafters import FakeDrafter
from tests.fakes.requests import make_request
from tests.waiting import LIMIT_S, until
from worker.load_engine import LoadedEngine, download_and_load_engine, load_runner_with_ranks
from worker.ranks.listener import RankListener
from worker.ranks.local import LocalRanks, share_memory
from worker.runner_settings import EngineLimits

LOAD_S = 6 * LIMIT_S  # several processes that import torch, on a busy machine
END_S = 1.0

Checkpoint = Callable[[str], Path]


def worker_settings(model_dir: Path, degrees: Degrees, **changes: Any) -> DecodeSettings:
    wanted = {
        "model": str(model_dir),
        "registry_address": "none",
        "device": "cpu",
        "rank_memory": "own",
        "enforce_eager": True,
        "tensor_parallel": str(degrees.tensor),
        "pipeline_parallel": str(degrees.pipeline),
        "kv_cache_bytes": 2_000_000,
        "layers_per_group": 1,
    }
    return DecodeSettings(**wanted | changes)


def engine_of(model_dir: Path, degrees: Degrees, **changes: Any) -> LoadedEngine:
    limits = EngineLimits(max_batch_tokens=256, max_num_seqs=8)
    return download_and_load_engine(worker_settings(model_dir, degrees, **changes), limits, load_runner_with_ranks)


def token_ids(runner: ModelRunner) -> list[object]:
    """Of forks that sample, and of requests of all kinds with guesses."""
    first = SequenceState(choices(33))
    first.forks = [SequenceState(fork) for fork in first.spec.forked()]
    forked, _ = run(runner, [first])
    guessed, _ = answer(runner, NgramDrafter(), requests())
    return [{name: [token.id for token in tokens] for name, tokens in forked.items()}, ids(guessed)]


_DEGREES = [Degrees(2), Degrees(2, 2), Degrees(4)]
_DIVIDED = [
    *product(["llama"], _DEGREES),
    *product(["qwen2", "mistral", "qwen2-moe", "bloom-6-heads"], _DEGREES[1:]),  # 2x2 ranks divide as 2 do
    ("gemma3", Degrees(2, 2)),
    ("olmo2", Degrees(4)),
]


@pytest.mark.parametrize(("family", "degrees"), _DIVIDED, ids=str)
def test_any_degrees_say_what_transformers_says(checkpoint: Checkpoint, family: str, degrees: Degrees) -> None:
    """With fewer than 4 KV heads 4 ranks have copies of them."""
    with own_memory_runner(checkpoint(family), degrees) as (runner, _):
        check_parity(checkpoint(family), runner)


@pytest.mark.parametrize("family", ["llama-multi-query", "gpt-bigcode", "falcon-7b", "deepseek-v2", "deepseek-v3"])
def test_copies_of_the_only_kv_head(checkpoint: Checkpoint, family: str) -> None:
    with own_memory_runner(checkpoint(family), Degrees(2, 2)) as (runner, ranks):
        check_parity(checkpoint(family), runner)
        copied = ranks.caches[1].tensor
        assert torch.equal(runner.kv_cache.tensor, copied)
        assert copied.any()


def test_copies_that_cannot_divide_the_query_heads_are_refused(checkpoint: Checkpoint) -> None:
    error = (
        "tensor_parallel 8 does not fit 2 query heads of each of 2 KV heads: use 2 or fewer, or a multiple of it that"
    )
    with pytest.raises(ConfigurationError, match=error):
        rank_share(load_decoder_config(checkpoint("qwen2")), 0, Degrees(8))


def test_as_many_steps_as_stages_are_in_flight(checkpoint: Checkpoint) -> None:
    """Each announces all layers, those of later stages once they have written them."""
    prompts = ([1, 2, 3], [9, 8, 7, 6])

    def generate(driver: Driver, *, in_flight: bool) -> list[list[int]]:
        runs = [driver.add(make_request(str(i), prompt, max_new_tokens=6)) for i, prompt in enumerate(prompts)]
        for counts in [map(len, prompts), *[(1, 1)] * 5]:
            begun = (driver.begin((run, count)) for run, count in zip(runs, counts, strict=True))
            for end in list(begun) if in_flight else begun:
                end()
        return [run.token_ids for run in runs]

    with own_memory_runner(checkpoint("llama"), Degrees(1, 3), layers_per_group=1) as (runner, _):
        driver = Driver(runner)
        tokens = generate(driver, in_flight=True)
        assert driver.announced == [(0, 1), (0, 1), (1, 2), (1, 2)] * 6, "those of both steps"
    alone = load_model_runner(settings(checkpoint("llama"), enforce_eager=True))
    assert tokens == generate(Driver(alone), in_flight=False)


@pytest.mark.parametrize("arm", ["cpu", "torch"])
def test_a_wrong_draft_that_breaks_changes_nothing_in_any_rank(checkpoint: Checkpoint, arm: str) -> None:
    """Later stages compute NaN, too, and must not keep it: attention would multiply it by 0."""
    asked = [make_request(f"r{i}", prompt, max_new_tokens=12) for i, prompt in enumerate(good_prompts())]
    with own_memory_runner(checkpoint("llama"), Degrees(1, 3), **ARMS[arm] | {"block_size": 16}) as (runner, ranks):
        with torch.no_grad():
            embedding(runner)[BAD_TOKEN] = float("nan")
        plain, _ = answer(runner, None, asked)
        drafted, scheduler = answer(runner, FakeDrafter(lambda _, most: [BAD_TOKEN] * most), asked)
        assert ids(drafted) == ids(plain)
        assert scheduler.load().drafted_tokens > 0
        for cache in (runner.kv_cache, *ranks.caches.values()):
            assert bool(torch.isfinite(cache.tensor).all())


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("llama", Degrees(2)),
        pytest.param("qwen2", Degrees(4), marks=pytest.mark.soak),
        ("mistral", Degrees(2, 2)),
    ],
    ids=str,
)
def test_processes_say_what_one_rank_says(checkpoint: Checkpoint, family: str, degrees: Degrees) -> None:
    """Tokens; and log-probs, which sums in another order may change in the last bits. They are transformers', too."""
    model_dir = checkpoint(family)
    cores, num_threads = os.sched_getaffinity(0), degrees.num_ranks + 1  # one for each rank, and one that is left
    loaded = engine_of(model_dir, degrees, num_threads=num_threads)
    assert isinstance(loaded.runner, ModelRunner)
    with closing(loaded.runner) as runner:
        ranks = ranks_of(os.getpid())
        assert runner.rank_pids == tuple(rank.pid for rank in ranks)
        assert len(ranks) == len(loaded.rank_connections) == degrees.num_ranks - 1
        check_parity(model_dir, runner)
        said = token_ids(runner)
    require_gone(ranks)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, num_threads)
    alone = engine_of(model_dir, Degrees(), num_threads=1).runner
    assert isinstance(alone, ModelRunner)
    assert said == token_ids(alone)


@contextmanager
def worker(model_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], Path]]:
    """A decode worker of three ranks that is ready, its ranks, and its log."""
    wanted = {"model": model_dir, "registry_address": "127.0.0.1:1", "tensor_parallel": 3, "rank_memory": "own"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (wanted | {"kv_cache_bytes": 1000000}).items()]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "decode_worker", *flags],
            env=os.environ | {"TANDEM_MESH_KEY": "a key of these tests"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            events = (json.loads(line)["event"] for line in process.stdout)
            assert "ready" in events, log.read_text()
            yield process, ranks_of(process.pid), log
        finally:
            process.kill()


async def test_a_killed_rank_ends_all(checkpoint: Checkpoint, tmp_path: Path, evidence: Evidence) -> None:
    with worker(checkpoint("llama"), tmp_path) as (process, ranks, log):
        ranks[0].kill()
        killed_s = time.monotonic()
        await until(lambda: process.poll() is not None and all(map(has_ended, ranks)))
        took_s = time.monotonic() - killed_s
        assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in log.read_text()
    name, measured = "all ended after a rank without shared memory was killed", f"after {took_s:.2f} s"
    evidence("R6", name, measured, target="<= 1 s", ok=took_s <= END_S, is_reported_only=True)


def test_a_killed_leader_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with worker(checkpoint("llama"), tmp_path) as (process, ranks, _):
        process.kill()
        require_gone(ranks)


def test_signals_to_the_group_are_for_the_worker(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with worker(checkpoint("llama"), tmp_path) as (process, ranks, log):
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
            rank.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LOAD_S) == 0, log.read_text()
        require_gone(ranks)
    assert "a rank is lost" not in log.read_text()


def test_a_rank_that_cannot_start_ends_the_start(checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    """Here for want of its device."""
    model_dir, degrees = checkpoint("llama"), Degrees(2)
    local = LocalRanks(worker_settings(model_dir, degrees), model_dir, KVMemorySettings(), ("cpu", "cuda:7"))
    ranks = RankListener(local.listen, degrees, timeout_s=LOAD_S, on_leaving=lambda: None, local=local)
    with pytest.raises(ConfigurationError, match="rank 1 cannot start; its last line in this log says why"):
        load_remote_runner(settings(model_dir, tensor_parallel=2), ranks, on_lost=pytest.fail)
    assert "device 'cuda:7' is not available" in capfd.readouterr().err
    assert ranks_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank_memory": "mine"}, "rank_memory must be auto, shared, own, got 'mine'"),
        ({"kv_disk": "/tmp/kv"}, "kv_disk does not work with rank_memory own"),
        ({"rank_listen": "127.0.0.1:5", "rank_memory": "shared"}, "rank_listen does not fit rank_memory shared"),
        ({"rank_listen": "127.0.0.1:5", "device": "cpu,cpu"}, "rank_listen does not fit .* a list of devices"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        worker_settings(tmp_path, Degrees(2), **changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quantize": "int8"}, "ranks that share no memory cannot compute in int8"),
        ({"tensor_parallel": "5"}, "tensor_parallel 5 does not fit 4 KV heads: use 4 or fewer"),
        ({"device": "cpu,cpu,cpu"}, "device cpu,cpu,cpu does not name one GPU for each of 2 ranks"),
    ],
)
def test_what_they_cannot_compute_is_refused(checkpoint: Checkpoint, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        engine_of(checkpoint("llama"), Degrees(2), **changes)
    assert ranks_of(os.getpid()) == []


def test_gpus_that_are_not_there_are_refused_before_a_rank_starts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs without being asked."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"tensor_parallel 2 needs 2 GPUs, .* there is one, so use 1"):
        engine_of(checkpoint("llama"), Degrees(2), device="cuda", rank_memory="auto")


def test_ranks_on_one_device_divide_the_workers_share() -> None:
    memory = KVMemorySettings(shares=3)
    assert share_memory(memory, ("cpu", "cpu")).shares == 6
    assert share_memory(KVMemorySettings(), ("cpu",) * 3).shares == 6
    assert share_memory(memory, ("cuda:0", "cuda:1")) is memory
