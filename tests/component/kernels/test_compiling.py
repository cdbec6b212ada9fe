"""What is compiled, what is not and why, and the folder of compiled code."""

import errno
import fcntl
import inspect
import json
import os
import platform
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from engine.compiled_code import CodeCounts, code_counts, code_key, noticing_compilation, why_not_kept
from engine.kernels.cpu import activations
from engine.kernels.cpu.arguments import Range
from engine.kernels.cpu.compilation import code_cache, compiler
from engine.kernels.cpu.compilation.code_cache import open_folder
from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.layer_kernels import LAYER_KERNELS
from engine.kernels.cpu.machine import PANEL
from engine.kernels.cpu.step_arguments import ALL_INPUTS, EXPERTS, LATENT_ATTENTION, LAYER_INPUT, RECURRENCE
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout, resolve
from engine.models.activations import ACTIVATIONS, CLAMPED_SWIGLU, xielu
from engine.models.cpu_support import KERNEL_ACTIVATIONS, why_not_compiled
from engine.models.read_config import load_config
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import OTHER_FAMILIES
from tests.component.parity import check_parity, run_mixed

Checkpoint = Callable[[str], Path]


def double(x: int) -> int:
    return x + x


@pytest.mark.parametrize(
    ("changes", "layout_changes", "reason"),
    [
        ({"block": "post"}, {}, "block post"),
        ({"activation": "quick_gelu"}, {}, "activation quick_gelu"),
        ({"embed_size": 32}, {}, "embed_size 32"),
        ({"hidden_size": 72}, {}, "hidden_size 72, not a multiple of 16"),
        ({"intermediate_size": 100}, {}, "intermediate_size 100, not a multiple of 16"),
        ({}, {"head_dim": 24}, "heads of 24, not a multiple of 16"),
        ({}, {"block_size": 8}, "blocks of 8 tokens, not a multiple of 16"),
        ({}, {"dtype": "bfloat16"}, "KV in bfloat16, not float32, float16, int8"),
    ],
)
def test_what_is_not_compiled(
    checkpoint: Checkpoint,
    changes: dict[str, object],
    layout_changes: dict[str, object],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx2", "f16c", "fma"})
    config = load_config(checkpoint("llama"))
    layout = kv_layout(config, settings(checkpoint("llama")))
    assert why_not_compiled(config, layout) is None
    changed = replace(config, **changes), replace(layout, **layout_changes)  # type: ignore[arg-type]
    assert why_not_compiled(*changed) == reason


def test_what_is_left_to_the_eager_decoder(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx2", "f16c", "fma"})
    reasons = {}
    for family in OTHER_FAMILIES:
        config = load_config(checkpoint(family))
        reasons[family] = why_not_compiled(config, kv_layout(config, settings(checkpoint(family))))
    eager = {family: reason for family, reason in reasons.items() if reason is not None}
    assert set(eager) == {"opt-350m", "opt-no-final-norm", "flex-olmo"}
    assert (eager["opt-350m"], eager["flex-olmo"]) == ("embed_size 48", "experts in a block behind")
    mixtral = load_config(checkpoint("mixtral"))
    layout = kv_layout(mixtral, settings(checkpoint("mixtral")))
    assert why_not_compiled(mixtral, layout, num_ranks=2) == "experts over several ranks"


def test_kernels_compute_the_same_activations() -> None:
    assert set(KERNEL_ACTIVATIONS) <= set(ACTIVATIONS)
    x = torch.cat((torch.linspace(-60, 60, 100_000), torch.tensor([-1e30, -0.0, 1e-30, 1e30])))
    x = x[None, : len(x) // PANEL * PANEL]
    initial = inspect.signature(xielu).parameters
    parameters = np.array([initial[name].default for name in ("alpha_p", "alpha_n", "beta", "eps")], np.float32)
    for name in KERNEL_ACTIVATIONS.keys() - {CLAMPED_SWIGLU}:
        ours = x.clone()
        entry(activations.activate_rows)(ours.numpy(), KERNEL_ACTIVATIONS[name], parameters, Range(0, 1))
        torch.testing.assert_close(ours, ACTIVATIONS[name](x), atol=2e-6, rtol=2e-6, msg=name)
    ups = x.flip(-1) / 3
    panels, clamped = torch.stack((x.view(-1, PANEL), ups.view(-1, PANEL)), 1).view(1, -1), torch.empty_like(x)
    number = KERNEL_ACTIVATIONS[CLAMPED_SWIGLU]
    one = np.float32(1.0)
    entry(activations.gate_rows)(panels.numpy(), clamped.numpy(), number, one, one, Range(0, 1))
    expected = ACTIVATIONS[CLAMPED_SWIGLU](torch.cat((x, ups), 1))
    torch.testing.assert_close(clamped, expected, atol=2e-6, rtol=2e-6)


def test_parts_of_compiled_functions_are_not_called_from_python() -> None:
    with pytest.raises(TypeError, match="only compiled code calls activate_rows"):
        activations.activate_rows(torch.zeros(1, 16).numpy(), 0, np.zeros(4, np.float32), Range(0, 1))


def test_other_cpus_run_the_eager_decoder(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = checkpoint("llama")
    config, layout = load_config(model_dir), kv_layout(load_config(model_dir), settings(model_dir))
    monkeypatch.setattr("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx", "f16c"})
    assert why_not_compiled(config, layout) == "the CPU has no avx2, fma"
    runner = load_model_runner(settings(model_dir))
    assert runner.attention_backend == "torch"
    check_parity(model_dir, runner)


def test_int8_without_amx_says_the_same(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with_amx = run_mixed(load_arm(checkpoint("qwen2"), "compiled", quantize="int8"))
    monkeypatch.setattr("engine.kernels.cpu.machine.has_amx", lambda: False)
    without = run_mixed(load_arm(checkpoint("qwen2"), "compiled", quantize="int8"))
    assert [run.tokens for run in without] == [run.tokens for run in with_amx]


@pytest.fixture
def cache_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that numba is told to keep its code in."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "base"))
    num_known = len(compiler.dispatchers)
    yield from _without_known_folder(tmp_path / "base")
    del compiler.dispatchers[num_known:]


def _without_known_folder(base: Path) -> Iterator[Path]:
    for known in (compiler.code_folder, compiler.code_version):
        known.cache_clear()
    yield base
    for known in (compiler.code_folder, compiler.code_version):
        known.cache_clear()


def test_code_is_kept_in_a_folder_of_this_version(cache_base: Path) -> None:
    assert entry(double)(21) == 42
    assert list(cache_base.glob("compiled-*/double-*.code"))


def test_a_folder_that_cannot_be_written_is_done_without(cache_base: Path) -> None:
    cache_base.touch()
    assert entry(double)(21) == 42
    assert not list(Path(__file__).parent.glob("__pycache__/*.nbi")), "code that no version tells apart"


def test_folders_of_versions_that_nobody_uses_are_deleted(tmp_path: Path) -> None:
    used, unused, new = (tmp_path / f"compiled-{name}" for name in ("used", "unused", "new"))
    for folder in (used, unused):
        folder.mkdir()
        (folder / "double.nbi").touch()
        os.utime(folder, times=(0, 0))
    assert open_folder(str(tmp_path), "used") == str(used)
    assert unused.exists(), "only a new version deletes"
    assert open_folder(str(tmp_path), "new") == str(new)
    assert sorted(tmp_path.iterdir()) == [new, used]


def test_code_is_compiled_once(cache_base: Path) -> None:
    before = code_counts()
    assert entry(double)(21) == 42
    assert code_counts().since(before) == CodeCounts(num_loaded=0, num_compiled=1)
    assert entry(double)(21) == 42  # as another process would
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=1)


def test_code_is_found_wherever_the_same_sources_lie(cache_base: Path, tmp_path: Path) -> None:
    before = code_counts()
    for name in ("here", "there"):
        file = tmp_path / name / "doubling.py"
        file.parent.mkdir()
        file.write_text("def double(x):\n    return x + x\n")
        assert entry(runpy.run_path(str(file))["double"])(21) == 42
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=1)
    file.write_text("def double(x):\n    return 2 * x\n")
    assert entry(runpy.run_path(str(file))["double"])(21) == 42
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=2)


@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
def test_damaged_code_is_compiled_again(cache_base: Path, damage: str) -> None:
    before = code_counts()
    assert entry(double)(21) == 42
    (file,) = cache_base.glob("compiled-*/*.code")
    code = bytearray(file.read_bytes())
    code[len(code) // 2] ^= 1
    file.write_bytes({"empty": b"", "cut": code[: len(code) // 2], "changed": code}[damage])
    assert [entry(double)(21), entry(double)(21)] == [42, 42]
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=2)


def test_a_folder_that_was_removed_is_made_again(cache_base: Path) -> None:
    compiled = entry(double)
    shutil.rmtree(cache_base)
    assert compiled(21) == 42
    assert list(cache_base.glob("compiled-*/*.code"))


def test_a_full_disk_is_named_and_done_without(cache_base: Path) -> None:
    compiled, before = entry(double), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with capture_logs() as logs:
            assert compiled(21) == 42
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [entry["event"] for entry in logs] == ["compiled code cannot be kept"]
    assert {file.suffix for file in cache_base.glob("compiled-*/*")} <= {".lock"}
    assert why_not_kept() == f"machine code cannot be kept in {compiler.code_folder()}: {os.strerror(errno.EFBIG)}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_cannot_be_seen_is_done_without(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        assert open_folder(str(tmp_path / "base"), "version") is None
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else_is_read(cache_base: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    file, before = tmp_path / "doubling.py", code_counts()
    file.write_text("def double(x):\n    return x + x\n")
    function = runpy.run_path(str(file))["double"]
    assert entry(function)(21) == 42
    compiler.code_folder.cache_clear()
    os.seteuid(65534)
    try:
        compiled = entry(function)
        assert (compiled(21), compiled(21.0)) == (42, 42.0)
    finally:
        os.seteuid(0)
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=2)
    assert why_not_kept() == f"machine code cannot be kept in {compiler.code_folder()}: {os.strerror(errno.EACCES)}"


def test_a_user_without_a_home_has_no_folder(cache_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert entry(double)(21) == 42
    assert not list(tmp_path.iterdir())
    assert (
        why_not_kept()
        == "there is no folder for machine code, and none can be made: set NUMBA_CACHE_DIR to one that can be written"
    )


def test_processes_may_keep_code_for_different_types_at_once(cache_base: Path) -> None:
    first, second, before = entry(double), entry(double), code_counts()
    assert (first(21), second(2.5)) == (42, 5.0)
    later = entry(double)
    assert (later(21), later(2.5)) == (42, 5.0)
    assert code_counts().since(before) == CodeCounts(num_loaded=2, num_compiled=2)


@contextmanager
def held_by_another(compiled: Any) -> Iterator[None]:
    """Another process compiles the function for an int."""
    with open(lock_of(compiled), "w") as lock:
        lock.write("process 1 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)


def lock_of(compiled: Any) -> Path:
    path: Path = compiled._cache.path((numba.int64,))
    return path.with_suffix(".lock")


def test_code_that_another_process_compiles_is_awaited(cache_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_TOLD_AFTER_S", 0.1)
    told: list[str] = []
    with noticing_compilation(lambda: told.append("compiles")):
        assert (entry(double)(21), entry(double)(2.5)) == (42, 5.0)
    assert told == ["compiles"], "once"
    files = {file: file.read_bytes() for file in cache_base.glob("compiled-*/*.code")}
    for file in files:
        file.unlink()
    compiled: Any = entry(double)
    before = code_counts()
    with (
        ThreadPoolExecutor() as other,
        noticing_compilation(lambda: told.append("again")),
        capture_logs() as logs,
    ):
        with held_by_another(compiled):
            answer = other.submit(compiled, 21)
            with pytest.raises(TimeoutError):
                answer.result(timeout=0.5)
            for file, data in files.items():
                file.write_bytes(data)
        assert answer.result(timeout=60) == 42
    assert (code_counts().since(before), told) == (CodeCounts(num_loaded=1, num_compiled=0), ["compiles"])
    assert [(entry["event"], entry["holder"]) for entry in logs] == [
        ("waiting for another process", "process 1 on elsewhere")
    ]
    assert lock_of(compiled).read_text() == f"process {os.getpid()} on {platform.node()}"


def test_a_process_that_is_stopped_keeps_nobody_waiting(cache_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "PATIENCE_S", 0.1)
    compiled, before = entry(double), code_counts()
    with held_by_another(compiled), capture_logs() as logs:
        assert (compiled(21), entry(double)(21)) == (42, 42)
    assert (logs[0]["event"], logs[0]["holder"]) == ("a lock is passed over", "process 1 on elsewhere")
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=1)


def test_files_that_cannot_be_locked_keep_code(cache_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = code_counts()
    assert (entry(double)(21), entry(double)(21)) == (42, 42)
    assert code_counts().since(before) == CodeCounts(num_loaded=1, num_compiled=1)


def test_a_failed_compilation_lets_others_compile(cache_base: Path) -> None:
    with pytest.raises(numba.TypingError):
        entry(double)(None)  # type: ignore[arg-type]
    with open(next(cache_base.glob("compiled-*/*.lock")), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("numba.core.config.CPU_NAME", "haswell"),
        ("numba.core.config.CPU_FEATURES", "+avx2"),
        ("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx2", "f16c", "fma", "avx_vnni"}),
        ("numba.__version__", "0.0"),
        ("llvmlite.__version__", "0.0"),
        ("platform.python_version", lambda: "3.0"),
    ],
)
def test_code_for_another_key_is_not_loaded(
    cache_base: Path, monkeypatch: pytest.MonkeyPatch, target: str, value: object
) -> None:
    assert entry(double)(21) == 42
    before, folder = code_counts(), compiler.code_folder()
    monkeypatch.setattr(target, value)
    for known in (compiler.code_folder, compiler.code_version):
        known.cache_clear()
    assert compiler.code_folder() != folder
    entry(double)  # is not run: it would be compiled for that CPU
    assert len(list(cache_base.glob("compiled-*"))) == 2
    assert code_counts().since(before) == CodeCounts(0, 0)


def test_the_key_is_that_of_the_arithmetic(checkpoint: Checkpoint) -> None:
    def key(family: str = "llama", **changes: object) -> str:
        resolved, config = resolve(settings(checkpoint(family), **changes))
        return code_key(resolved, config, kv_layout(config, resolved))

    different = [key(), key(quantize="int8"), key(quantize="int4"), key(dtype="bfloat16"), key(kv_dtype="float16")]
    different += [key(enforce_eager=True), key(quantize="int8", kv_dtype="float16")]
    assert len(set(different)) == len(different)
    assert key("qwen2") == key("llama"), "sizes do not matter"
    assert key(block_size=32) == key()


def test_a_start_says_what_it_compiled(checkpoint: Checkpoint) -> None:
    load_model_runner(settings(checkpoint("llama")))
    with capture_logs() as logs:
        load_model_runner(settings(checkpoint("llama")))
    (entry,) = (entry for entry in logs if entry["event"] == "compiled code")
    assert (entry["cache"], entry["compiled"]) == ("hit", 0)
    assert len(entry["key"]) == 16


@pytest.mark.parametrize(
    ("family", "compile_all", "expected"),
    [
        ("llama", False, set()),
        ("mixtral", False, {EXPERTS}),
        ("deepseek-v2", False, {EXPERTS, LATENT_ATTENTION}),
        ("lfm2", False, {RECURRENCE}),
        ("gemma4", False, {ALL_INPUTS, LAYER_INPUT}),
        ("llama", True, set(LAYER_KERNELS)),
    ],
)
def test_models_compile_the_kernels_of_their_layers(
    checkpoint: Checkpoint, family: str, compile_all: bool, expected: set[int]
) -> None:
    runner = load_model_runner(replace(settings(checkpoint(family)), compile_all=compile_all))
    try:
        code = runner.model._model.layer_code  # type: ignore[attr-defined]
        assert set(np.flatnonzero(code)) == expected
    finally:
        runner.close()


def test_a_second_start_compiles_nothing(checkpoint: Checkpoint) -> None:
    """In processes of their own, as workers are; also with several ranks, for which the code is the same. What a start
    has compiled is all that prompts and generated tokens need."""

    def compiled(environ: Mapping[str, str], *flags: str) -> dict[str, object]:
        words = ("-m", "tandem_cli", "compile", str(checkpoint("llama")), "--json", *flags)
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280, env=environ)
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    compiled(os.environ)
    # The fork server of tests has read the code before it forks; a variable that it lacks lets the program be executed.
    second, ranks = compiled(os.environ | {"EXECUTED": "1"}), compiled(os.environ, "--tensor-parallel", "2")
    assert (second["num_compiled"], ranks["num_compiled"]) == (0, 0)
    assert int(str(second["num_loaded"])) > 0
    assert second["key"] == ranks["key"]
    before = code_counts()
    run_mixed(load_arm(checkpoint("llama"), "compiled"))
    assert code_counts().since(before).num_compiled == 0


STEPS_WITH_A_LENT_CORE = """
import os, sys
from pathlib import Path

import torch

from engine.compiled_code import _run, code_counts
from engine.loading.load_runner import load_model_runner
from engine.runner_settings import RunnerSettings

torch.set_num_threads(1)
runner = load_model_runner(RunnerSettings(Path(sys.argv[1]), num_blocks=4))
before = code_counts()
runner.use_cores((min(os.sched_getaffinity(0)),))
_run(runner, 4)
since = code_counts().since(before)
print(since.num_loaded, since.num_compiled)
"""


def test_a_worker_that_gets_its_first_lent_core_has_its_code(checkpoint: Checkpoint) -> None:
    """Else its first request would wait for a compilation, as if the engine hung."""
    words = (sys.executable, "-c", STEPS_WITH_A_LENT_CORE, str(checkpoint("llama")))
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, env=os.environ | {"EXECUTED": "1"})
    assert done.stdout.splitlines()[-1:] == ["0 0"], done.stderr


def test_bad_words_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # the command's process is this one

    def said(*words: str) -> str:
        assert main(["compile", *words]) == 2
        return capsys.readouterr().err

    assert "there is no model folder" in said(str(tmp_path / "none"))
    assert "--all takes all the usual types: leave --dtype out" in said("--all", "--dtype", "float16")
    assert "quantize must be one of none, int8, int4, fp8, got 'int3'" in said("--quantize", "int3")
