"""Memory for KV: all workers of a machine together promise no more than there is."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.kv.budget import Budget, KVMemoryShare
from engine.kv.cache import KVCache
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout
from engine.memory import DeviceMemory, anonymous_bytes, device_memory
from engine.memory_ledger import Entry, open_ledger
from engine.models.read_config import load_config
from engine.ranks.launch import load_ranked_runner
from engine.runner_settings import RunnerSettings
from engine.settings import KVMemorySettings
from mesh.domain.errors import ConfigurationError
from tests.component.arms import settings
from tests.defects import Repaired
from worker.settings import WorkerSettings

Checkpoint = Callable[[str], Path]

CPU = torch.device("cpu")
GPU = torch.device("cuda")
MACHINE = DeviceMemory("cpu", total_bytes=64_000, free_bytes=40_000, is_lazy=True)
BLOCK_BYTES = 10
NUM_WORKERS = 6


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger of its own on a machine of 64,000 bytes."""
    monkeypatch.setattr("engine.kv.budget.device_memory", lambda _: MACHINE)
    return str(tmp_path / "ledger")


def reserve(
    wanted: KVMemorySettings, *, num_blocks: int | None = None, weights_bytes: int = 0
) -> tuple[KVMemoryShare, int]:
    share = KVMemoryShare.enter(CPU, wanted, weights_bytes)
    with share.blocks(BLOCK_BYTES, num_blocks=num_blocks, max_blocks=None) as granted_blocks:
        return share, granted_blocks * BLOCK_BYTES


def promised_at_once(wanted: KVMemorySettings) -> list[int]:
    """What six workers promise that reserve at the same time, while all of them live."""
    ready = threading.Barrier(NUM_WORKERS)

    def work(number: int) -> tuple[KVMemoryShare, int]:
        share = KVMemoryShare.enter(CPU, replace(wanted, owner=f"worker-{number}"), 0)
        ready.wait(60)
        with share.blocks(BLOCK_BYTES, num_blocks=None, max_blocks=None) as num_blocks:
            return share, num_blocks * BLOCK_BYTES

    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        found = list(threads.map(work, range(NUM_WORKERS)))
    return [num_bytes for _, num_bytes in found]


@pytest.mark.parametrize(
    ("wanted", "limit"),
    [
        (KVMemorySettings(fraction=0.6, shares=NUM_WORKERS), 24_000),
        (KVMemorySettings(fraction=0.6), 24_000),
        (KVMemorySettings(utilization=0.9, shares=NUM_WORKERS), 33_600),  # 0.9 x 64,000 without the 24,000 in use
        (KVMemorySettings(utilization=0.9), 33_600),
    ],
)
def test_workers_started_at_once_promise_no_more_than_the_budget(
    ledger: str, wanted: KVMemorySettings, limit: int
) -> None:
    promised = promised_at_once(replace(wanted, ledger=ledger))
    assert sum(promised) <= limit
    assert min(promised) > 0
    if wanted.shares:
        assert promised == [limit // NUM_WORKERS // BLOCK_BYTES * BLOCK_BYTES] * NUM_WORKERS


def test_six_real_workers(checkpoint: Checkpoint, ledger: str, repaired: Repaired) -> None:
    wanted = RunnerSettings(
        checkpoint("llama"), load_format="dummy", kv_memory=KVMemorySettings(ledger=ledger, shares=6)
    )
    block_bytes = kv_layout(load_config(wanted.model_dir), wanted).block_bytes
    free_bytes = 600 * block_bytes
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        memory = DeviceMemory("cpu", 2 * free_bytes, free_bytes, is_lazy=True)
        patch.setattr("engine.kv.budget.device_memory", lambda _: memory)
        # Their weights, which are not in this made-up memory.
        patch.setattr("engine.loading.memory_needs.weights_bytes", lambda *_, **__: 0)
        with ThreadPoolExecutor(NUM_WORKERS) as threads:
            runners = list(threads.map(lambda _: load_model_runner(wanted), range(NUM_WORKERS)))
    blocks = [runner.kv_cache.num_blocks for runner in runners]
    assert blocks == [60] * NUM_WORKERS
    repaired("M3", f"6 workers started at once promise {sum(blocks) / 600:.0%} of the free memory in all (0.6 asked)")


def test_workers_by_hand_each_take_half_of_what_is_left(ledger: str) -> None:
    held = [reserve(KVMemorySettings(ledger=ledger)) for _ in range(3)]
    assert [num_bytes for _, num_bytes in held] == [12_000, 6_000, 3_000]


def test_a_worker_that_comes_too_late_is_told_who_has_the_memory(ledger: str) -> None:
    first = reserve(KVMemorySettings(ledger=ledger, shares=1, owner="decode-7"))
    with pytest.raises(ConfigurationError, match=rf"no memory for the KV cache.*decode-7 \(pid {os.getpid()}\) has"):
        reserve(KVMemorySettings(ledger=ledger, shares=1))
    del first
    assert reserve(KVMemorySettings(ledger=ledger, shares=1))[1] == 24_000


def test_a_number_of_tokens_that_is_not_there_is_refused(ledger: str) -> None:
    first, _ = reserve(KVMemorySettings(ledger=ledger), num_blocks=3000)
    with pytest.raises(ConfigurationError, match=r"are requested for KV, but .* of memory are left"):
        reserve(KVMemorySettings(ledger=ledger), num_blocks=1001)
    assert reserve(KVMemorySettings(ledger=ledger), num_blocks=1000)[1] == 10_000
    del first


def test_weights_that_are_still_to_come_are_left_free(ledger: str) -> None:
    loading = KVMemoryShare.enter(CPU, KVMemorySettings(ledger=ledger), weights_bytes=10**12)
    with pytest.raises(ConfigurationError, match="no memory"):
        reserve(KVMemorySettings(ledger=ledger))
    del loading
    # Two more of the three have not even begun; they will have weights as large as this one's.
    assert reserve(KVMemorySettings(ledger=ledger, shares=3), weights_bytes=5000)[1] == 0.6 * (40_000 - 2 * 5000) / 3


def test_what_kv_has_filled_counts_as_its_own() -> None:
    """A worker that comes back gets what it had, although the others have filled theirs meanwhile."""
    gpu = DeviceMemory("cuda", total_bytes=100, free_bytes=60, is_lazy=False)
    other = Entry("cuda", "other", os.getpid(), weights_bytes=10, anonymous_bytes_before=0, kv_bytes=20)
    assert Budget(gpu, KVMemorySettings(fraction=0.6, shares=2), 0, [other]).share_bytes == 0.6 * (60 + 20) // 2
    later = Budget(gpu, KVMemorySettings(fraction=0.6, shares=2), 10, [other], own_later_bytes=10)
    assert later.usable_bytes == 60 + 20 - 10, "memory that the worker takes after its KV is not KV"
    own_bytes = anonymous_bytes(os.getpid())
    filled = Entry("cpu", "other", os.getpid(), 0, own_bytes // 2, kv_bytes=30, usable_bytes=200)
    cpu, wanted = replace(gpu, key="cpu", is_lazy=True), KVMemorySettings(fraction=0.6, shares=2)
    assert Budget(cpu, wanted, 0, [filled]).usable_bytes == 90
    assert Budget(cpu, wanted, 0, [replace(filled, anonymous_bytes_before=10 * own_bytes)]).usable_bytes == 60
    # Its process has grown by something else: KV cannot have filled what was not free.
    assert Budget(cpu, wanted, 0, [replace(filled, usable_bytes=70)]).usable_bytes == 70
    assert Budget(cpu, wanted, 0, [filled], {"files": 30}).usable_bytes == 60


def test_files_that_several_workers_map_count_once() -> None:
    """The system counts their pages as free."""
    memory = DeviceMemory("cpu", total_bytes=100, free_bytes=90, is_lazy=True)
    filled = anonymous_bytes(os.getpid()) // 2
    first = Entry("cpu", "a", os.getpid(), 20, filled, kv_bytes=10, usable_bytes=200, mapped_bytes={"files": 20})

    def usable(own: dict[str, int], *others: Entry) -> int:
        own_bytes = sum(own.values())
        return Budget(memory, KVMemorySettings(shares=len(others) + 2), own_bytes, others, own).usable_bytes

    assert usable({"files": 20}, first) == 90 - 20 + 10
    assert usable({"files": 20}, first, replace(first, kv_bytes=0)) == 90 - 20 + 10, "one that loads maps them, too"
    assert usable({"others": 30}, first) == 90 - 20 - 30 + 10
    assert usable({}, first) == 90 - 20 + 10


def test_kv_in_shared_memory_is_what_the_file_takes() -> None:
    gpu = DeviceMemory("cuda", total_bytes=100 << 20, free_bytes=60 << 20, is_lazy=False)
    cpu = replace(gpu, is_lazy=True)
    fd = os.memfd_create("kv")
    try:
        os.ftruncate(fd, 8 << 20)
        entry = Entry("cpu", "other", os.getpid(), 0, 1 << 60, kv_bytes=8 << 20, usable_bytes=80 << 20, kv_fd=fd)
        assert entry.touched_kv_bytes(cpu) == 0
        os.pwrite(fd, b"1" * (3 << 20), 1 << 20)
        assert entry.touched_kv_bytes(cpu) == 3 << 20
        assert entry.touched_kv_bytes(gpu) == 8 << 20
        assert Budget(cpu, KVMemorySettings(), 0, [entry]).usable_bytes == 63 << 20
        # A draft model's KV, 2 MiB beside it, is memory of the process.
        drafted = replace(entry, kv_bytes=10 << 20, anonymous_bytes_before=anonymous_bytes(os.getpid()) - (16 << 20))
        assert drafted.touched_kv_bytes(cpu) == 5 << 20
    finally:
        os.close(fd)


def test_weights_of_other_ranks_are_loaded_weights() -> None:
    cpu = DeviceMemory("cpu", total_bytes=100, free_bytes=60, is_lazy=True)
    own_bytes = anonymous_bytes(os.getpid())
    alone = Entry("cpu", "other", os.getpid(), 10 * own_bytes, own_bytes // 2)
    loaded = alone.weights_bytes - alone.missing_weights_bytes(cpu)
    assert loaded >= own_bytes // 4
    ranked = replace(alone, rank_pids=[os.getpid()] * 2)
    assert alone.weights_bytes - ranked.missing_weights_bytes(cpu) == pytest.approx(3 * loaded, rel=0.2)


def test_a_worker_beside_one_of_several_ranks_gets_what_it_had(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """KV of ranks is shared memory, which is not the process's own."""
    folder = str(tmp_path / "ledger")
    wanted = settings(
        checkpoint("llama"),
        tensor_parallel=2,
        enforce_eager=True,
        kv_memory=KVMemorySettings(ledger=folder),
        num_blocks=512,
    )
    with closing(load_ranked_runner(wanted, on_lost=pytest.fail)) as runner:
        ledger, memory = open_ledger(folder), device_memory(CPU)
        held = ledger.enter(memory, "another", 0)
        with ledger.locked():
            [entry] = ledger.other_entries(held)
        assert len(entry.rank_pids) == 1
        assert anonymous_bytes(entry.rank_pids[0]) > 0
        assert entry.touched_kv_bytes(memory) < entry.kv_bytes // 2
        runner.kv_cache.clear_blocks(range(512))  # every page is written
        assert entry.touched_kv_bytes(memory) == entry.kv_bytes == 512 * runner.kv_cache.layout.block_bytes
        held.release()


def test_other_devices_have_other_memory(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = reserve(KVMemorySettings(ledger=ledger, shares=1))
    monkeypatch.setattr("engine.kv.budget.device_memory", lambda _: replace(MACHINE, key="cuda 1", is_lazy=False))
    assert reserve(KVMemorySettings(ledger=ledger, shares=1))[1] == first[1] == 24_000


_HOLDER = """
import sys, time
from engine.memory import DeviceMemory
from engine.memory_ledger import open_ledger
ledger = open_ledger(sys.argv[1])
held = ledger.enter(DeviceMemory("cpu", 1, 1, True), "other", 0)
with ledger.locked():
    held.promise(24_000, 40_000)
print("promised", flush=True)
time.sleep(600)
"""


def test_a_killed_worker_promises_nothing(ledger: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER, ledger], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "promised\n"
        with pytest.raises(ConfigurationError, match="no memory"):
            reserve(KVMemorySettings(ledger=ledger, shares=1))
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        assert reserve(KVMemorySettings(ledger=ledger, shares=1))[1] == 24_000


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    share = KVMemoryShare.enter(CPU, KVMemorySettings(ledger=str(file)), 0)
    with share.blocks(BLOCK_BYTES, num_blocks=None, max_blocks=5) as num_blocks:
        assert num_blocks == 5
    assert "KV memory is not shared" in capsys.readouterr().out


def test_the_users_own_ledger_is_private() -> None:
    open_ledger("")
    folder = next(path for path in Path("/dev/shm").glob("tandem-memory-*") if path.stat().st_uid == os.getuid())
    assert folder.stat().st_mode & 0o077 == 0


def test_this_machine_has_memory() -> None:
    memory = device_memory(CPU)
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.is_lazy


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/box", {"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 1000\n"}),
        (
            "4:memory:/box",
            {
                "memory.limit_in_bytes": "5000",
                "memory.usage_in_bytes": "3000",
                "memory.stat": "total_inactive_file 1000\n",
            },
        ),
    ],
)
def test_a_containers_limit_counts_as_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str]
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{group}\n7:cpu:/else\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    root = tmp_path / "cgroup" / ("" if group.startswith("0") else "memory")
    (root / "box").mkdir(parents=True)
    for name, content in files.items():
        (root / "box" / name).write_text(content)
    monkeypatch.setattr("engine.memory._PROC", tmp_path / "proc")
    limits = ("engine.memory._VERSIONS", [(root, *version[1:]) for version in _versions(group)])
    monkeypatch.setattr(*limits)
    memory = device_memory(CPU)
    assert (memory.total_bytes, memory.free_bytes) == (5000, 3000)
    assert memory.key != "cpu"


def _versions(group: str) -> list[tuple[object, ...]]:
    from engine.memory import _VERSIONS

    return [version for version in _VERSIONS if version[1] == ("0" if group.startswith("0") else "memory")]


def test_cache_keeps_the_reservation(ledger: str, checkpoint: Checkpoint) -> None:
    plain = RunnerSettings(checkpoint("llama"))
    share, _ = reserve(KVMemorySettings(ledger=ledger, shares=1))
    cache = KVCache(kv_layout(load_config(plain.model_dir), plain), 4, CPU, memory_share=share)
    del share
    with pytest.raises(ConfigurationError):
        reserve(KVMemorySettings(ledger=ledger, shares=1))
    del cache
    assert reserve(KVMemorySettings(ledger=ledger, shares=1))[1] == 24_000


@pytest.mark.parametrize("wrong", [{"kv_memory_fraction": 1.5}, {"memory_utilization": 1.1}, {"kv_memory_shares": -1}])
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        WorkerSettings(model="m", registry_address="h:1", **wrong)  # type: ignore[arg-type]


def test_an_unknown_device_does_not_count_as_the_machine() -> None:
    with pytest.raises(ConfigurationError, match="'xpu' is not known: use cpu or cuda"):
        device_memory(torch.device("xpu"))


def test_a_gpu_is_known_by_its_own_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may call the same GPU cuda:0 and cuda:1."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (60, 100))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="GPU-7"))
    for name in ("cuda:0", "cuda:1"):
        assert device_memory(torch.device(name)) == DeviceMemory("cuda GPU-7", 100, 60, is_lazy=False)
