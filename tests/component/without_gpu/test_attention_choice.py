"""The choice of the attention backend, on GPUs that this machine does not have."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from engine.attention import flash, triton_paged
from engine.attention.backend import AttentionShape
from engine.attention.select import AttentionTarget, available_backends, select_backend
from engine.loading.load_runner import load_model_runner
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout
from mesh.settings import load_settings
from prefill_worker.settings import PrefillSettings
from worker.runner_settings import base_runner_settings

SHAPE = AttentionShape(8, 2, 64)


class FlashAttn2:
    """The functions of flash-attn 2.8 that are called, as far as their arguments are looked at."""

    __version__ = "2.8"

    @staticmethod
    def flash_attn_with_kvcache(q, k, v, block_table=None, window_size=(-1, -1), softcap=0.0, alibi_slopes=None): ...  # type: ignore[no-untyped-def]

    @staticmethod
    def flash_attn_varlen_func(q, k, v, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, block_table=None): ...  # type: ignore[no-untyped-def]


Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Packages, and the compute capability of the GPU."""

    def install(*packages: str, capability: tuple[int, int] = (9, 0)) -> None:
        for module in (flash, triton_paged):
            monkeypatch.setattr(module, "find_spec", lambda name: True if name in packages else None)
        monkeypatch.setattr(flash, "import_module", lambda name: FlashAttn2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return install


def target(block_size: int = 16, dtype: str = "bfloat16", kv_dtype: str = "", device: str = "cuda") -> AttentionTarget:
    layout = KVLayout("m", 1, SHAPE.num_kv_heads, SHAPE.head_dim, block_size, kv_dtype or dtype)
    return AttentionTarget(torch.device(device), getattr(torch, dtype), layout)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (target(256), ["flash", "triton", "torch"]),
        (target(512), ["flash", "triton", "torch"]),
        (target(16), ["triton", "torch"]),
        (target(128), ["triton", "torch"]),
        (target(256, "float32"), ["triton", "torch"]),
        (target(256, kv_dtype="float16"), ["triton", "torch"]),
        (target(256, kv_dtype="fp8"), ["triton", "torch"]),
        (target(16, "float32", "fp8", device="cpu"), ["torch"]),
        (target(16, "bfloat16", device="cpu"), ["torch"]),
    ],
    ids=str,
)
def test_the_fastest_that_can_run(installed: Installed, wanted: AttentionTarget, names: list[str]) -> None:
    installed("flash_attn", "triton")
    assert available_backends(SHAPE, wanted) == names


def test_packages_and_gpus_without_them(installed: Installed) -> None:
    installed()
    assert available_backends(SHAPE, target(256)) == ["torch"]
    installed("flash_attn", "triton", capability=(7, 5))
    assert available_backends(SHAPE, target(256)) == ["torch"]
    installed("triton")
    assert available_backends(AttentionShape(8, 2, 320), target()) == ["torch"]


@pytest.mark.parametrize(
    ("name", "wanted", "words"),
    [
        (
            "flash",
            target(16),
            r"'flash' cannot run on cuda .*; available: triton, torch \(flash: blocks of 16 ",
        ),
        ("flash", target(256, "float32"), "flash: it computes in float16 and bfloat16, not torch.float32"),
        ("flash", target(256, kv_dtype="float16"), "flash: KV in float16 differs from queries in torch.bfloat16"),
        ("flash", target(256, kv_dtype="fp8"), "flash: KV in fp8 differs from queries in torch.bfloat16"),
        ("cpu", target(16, "float32", "fp8", device="cpu"), "cpu: KV in fp8, not float32, float16, int8"),
        ("triton", target(device="cpu"), r"available: torch \(triton: it is for CUDA, not cpu"),
        ("cpu", target(), "cpu: it computes torch.float32 on cpu, not torch.bfloat16 on cuda"),
    ],
)
def test_a_forced_one_that_cannot_run_is_refused(
    installed: Installed, name: str, wanted: AttentionTarget, words: str
) -> None:
    installed("flash_attn", "triton")
    with pytest.raises(ConfigurationError, match=words):
        select_backend(SHAPE, wanted, name)


def test_missing_packages_are_named(installed: Installed) -> None:
    installed()
    for name, words in (("flash", "flash: flash-attn is not installed"), ("triton", "triton: Triton is not installed")):
        with pytest.raises(ConfigurationError, match=words):
            select_backend(SHAPE, target(256), name)


def test_a_library_that_cannot_be_used_is_none(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(FlashAttn2):
        __version__ = "2.5.5"
        flash_attn_varlen_func = staticmethod(lambda q, k, v, window_size: None)

    def broken(name: str) -> object:
        raise ImportError("undefined symbol: _ZN3c104cuda")

    installed("flash_attn", "triton")
    for library, words in ((lambda name: Older, "2.5.5 is too old: .* block_table, softcap"), (broken, "_ZN3c104cuda")):
        monkeypatch.setattr(flash, "import_module", library)
        assert available_backends(SHAPE, target(256)) == ["triton", "torch"]
        with pytest.raises(ConfigurationError, match=words):
            select_backend(SHAPE, target(256), "flash")


def test_the_choice_is_logged_with_its_reasons(installed: Installed) -> None:
    installed("triton")
    with capture_logs() as logs:
        select_backend(SHAPE, target(256), "torch")
    [entry] = [entry for entry in logs if entry["event"] == "attention backend chosen"]
    assert (entry["name"], entry["asked"], entry["available"]) == ("torch", "torch", "triton,torch")
    assert "flash: flash-attn is not installed" in entry["cannot_run"]


def test_it_is_a_setting_of_workers(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*argv: str, **environ: str) -> RunnerSettings:
        needed = ["--model", str(checkpoint("llama")), "--registry-address", "r:1"]
        resolved = load_settings(PrefillSettings, [*needed, *argv], prog="worker", environ=environ)
        return base_runner_settings(resolved.values)

    assert load().attention == "auto"
    assert load("--attention", "triton").attention == "triton"
    assert load(TANDEM_ATTENTION="torch").attention == "torch"
    with pytest.raises(ConfigurationError, match=r"attention must be one of auto, flash, .*, got 'sdpa'"):
        load("--attention", "sdpa")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigurationError, match=r"'flash' cannot run on cpu .*available: cpu, torch \(flash: "):
        load_model_runner(RunnerSettings(checkpoint("llama"), num_blocks=4, attention="flash"))
