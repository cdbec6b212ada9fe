"""Models partitioned ahead of time: bits equal to the checkpoint's, and what is refused."""

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoint.new_folder import _locked
from checkpoint.partition_manifest import MANIFEST, read_partition
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.models.packed_weights import PackedDecoder, write_packed
from engine.models.share import ALONE
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.as_a_process import exit_status_of
from tests.component.arms import load_arm, settings
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.parity import run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.test_load import edit_weights
from tests.defects import Repaired


def partitioned(model_dir: Path, out: Path, degrees: Degrees = ALONE, quantize: str = "none") -> Path:
    flags = [f"--tensor-parallel={degrees.tensor}", f"--pipeline-parallel={degrees.pipeline}", f"--quantize={quantize}"]
    assert main(["partition", str(model_dir), str(out), *flags]) == 0
    return out


@contextmanager
def runner_of(model_dir: Path, degrees: Degrees, quantize: str) -> Iterator[ModelRunner]:
    if degrees == ALONE:
        yield load_model_runner(settings(model_dir, quantize=quantize))
        return
    with ranked_runner(model_dir, degrees, quantize=quantize) as runner:
        yield runner


@pytest.mark.parametrize(
    ("family", "quantize", "degrees"),
    [
        ("llama-tied", "none", ALONE),
        ("llama-biases", "int8", ALONE),
        ("llama-tied", "int8", Degrees(2, 2)),
        ("qwen3", "none", Degrees(2)),
        ("gemma4", "none", ALONE),
    ],
)
def test_equals_the_checkpoint(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str, quantize: str, degrees: Degrees
) -> None:
    model_dir = checkpoint(family)
    alone = load_arm(model_dir, "compiled", quantize=quantize)
    out = partitioned(model_dir, tmp_path / "out", degrees, quantize)
    assert not list(out.glob("model*.safetensors"))
    with runner_of(out, degrees, quantize) as runner:
        assert runner.attention_backend == "compiled"
        assert runner.kv_cache.layout == alone.kv_cache.layout, "workers of both could not exchange KV"
        for run, expected in zip(run_mixed(runner), run_mixed(alone), strict=True):
            assert (run.tokens, run.prompt_logprobs) == (expected.tokens, expected.prompt_logprobs)


def test_files_are_read_only_and_nothing_else_is_left(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    load_arm(checkpoint("llama"), "compiled")
    out = partitioned(checkpoint("llama"), tmp_path / "out", Degrees(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = {path.name for path in checkpoint("llama").iterdir() if ".safetensors" not in path.name}
    ranks = {f"rank-{rank}-of-2.safetensors" for rank in range(2)}
    assert {path.name for path in out.iterdir()} == names | ranks | {MANIFEST}
    assert {(out / name).stat().st_mode & 0o777 for name in ranks} == {0o444}


def refusal(out: Path, **changes: object) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load_model_runner(settings(out, **changes))
    return str(refused.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("quantize", ["none", "int4"])  # of int4 the header tells which kind it is
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_files_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, damage: Callable[[Path], None], quantize: str
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    out = partitioned(checkpoint("llama"), tmp_path / "out", quantize=quantize)
    (file,) = out.glob("rank-*")
    file.chmod(0o600)
    damage(file)
    assert "missing, truncated or changed" in refusal(out, quantize=quantize)
    assert file.name in refusal(out, quantize=quantize)


def test_other_settings_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    load_arm(checkpoint("llama"), "compiled")
    out = partitioned(checkpoint("llama"), tmp_path / "out", Degrees(2))
    expected = "partitioned for tensor_parallel 2, pipeline_parallel 1, dtype float32 and quantize none, not for"
    alone = f"{expected} tensor_parallel 1, pipeline_parallel 1, dtype"
    assert f"{alone} float32 and quantize none" in refusal(out)
    assert f"{alone} float32 and quantize int8" in refusal(out, quantize="int8")
    assert f"{alone} bfloat16 and quantize none" in refusal(out, dtype="bfloat16")
    with pytest.raises(ConfigurationError, match=f"{expected} tensor_parallel 1, pipeline_parallel 2, dtype"):
        runner_of(out, Degrees(1, 2), "none").__enter__()
    assert "cannot run here (enforce_eager is set): serve the original checkpoint" in refusal(out, enforce_eager=True)


def test_gpus_load_the_checkpoint_itself(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    out = partitioned(checkpoint("llama"), tmp_path / "out")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("engine.loading.load_runner.enter_ledger", lambda *_: None)  # which asks the GPU
    said = refusal(out, device="cuda", dtype="float16")
    assert "which cannot run here (float16 on cuda): serve the original checkpoint" in said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 99}, "partitioned in version 99"),
        ({"pipeline_parallel": 2}, "names 1 files for 2 ranks"),
        ({"files": [{"name": "../a", "num_bytes": 1, "xxh3": ""}]}, "outside its folder"),
        ({"files": 7}, "not the manifest"),
        (None, "cannot read"),
    ],
)
def test_manifests_of_others_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, change: dict[str, object] | None, expected: str
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    path = partitioned(checkpoint("llama"), tmp_path / "out") / MANIFEST
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    assert expected in refusal(path.parent)


def test_what_cannot_be_partitioned(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    out = partitioned(checkpoint("llama"), tmp_path / "out")
    for model_dir, target, flags, expected in (
        (out, tmp_path / "again", (), "is partitioned already"),
        (checkpoint("llama"), out, (), "exists already"),
        (checkpoint("opt-350m"), tmp_path / "other", (), "only models of the compiled decoder"),
        (build_encoder_decoder("t5", tmp_path_factory.mktemp("t5")), tmp_path / "other", (), "encoder-decoder"),
        (checkpoint("llama"), tmp_path / "other", ("--tensor-parallel=9",), "KV heads"),
        (checkpoint("llama"), tmp_path / "other", ("--tensor-parallel=0",), "at least 1"),
        (checkpoint("llama"), tmp_path / "other", ("--pipeline-parallel=9",), "layers: use"),
    ):
        capsys.readouterr()
        assert main(["partition", str(model_dir), str(target), *flags]) == 2
        assert expected in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read_partition(checkpoint("llama")) is None


def test_a_partition_that_is_there_is_used_again(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    out = partitioned(checkpoint("llama"), tmp_path / "out", Degrees(2))
    written = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}

    def again(family: str, *flags: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["partition", "--reuse", *flags, str(checkpoint(family)), str(out)])
        return status, "".join(capsys.readouterr())

    monkeypatch.setattr("tandem_cli.model_files.partition_model.num_numa_nodes", lambda: 2)
    for degree in ("2", "max"):
        assert again("llama", f"--tensor-parallel={degree}") == (0, f"{out}: holds this partition\n")
    status, said = again("llama", "--tensor-parallel=1")
    assert (status, "not for tensor_parallel 1" in said) == (2, True)
    status, said = again("qwen3", "--tensor-parallel=2")
    assert (status, "is a partition of another checkpoint" in said) == (2, True)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == written
    partition = read_partition(out)
    assert partition is not None
    (out / partition.files[1].name).unlink()
    status, said = again("llama", "--tensor-parallel=2")
    assert (status, "is missing, truncated or changed" in said) == (2, True)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
)
def test_a_partition_of_what_the_checkpoint_was_is_not_used_again(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    out = partitioned(model_dir, tmp_path / "out")
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 0
    path = model_dir / name
    if path.suffix == ".json":
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": 7}))
    else:  # one row, which is not where the digest of the weights looks
        edit_weights(model_dir, lambda stored: stored["model.embed_tokens.weight"][3].add_(1.0))
    capsys.readouterr()
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 2
    assert f"another checkpoint than {model_dir}, where {name} differs: remove the folder" in capsys.readouterr().err
    shutil.move(out, tmp_path / "moved")
    load_model_runner(settings(tmp_path / "moved"))


def test_a_named_chat_template_is_part_of_the_checkpoint(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], repaired: Repaired
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    template = model_dir / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ messages }}")
    out = partitioned(model_dir, tmp_path / "out")
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 0
    template.write_text("{{ tools }}")
    capsys.readouterr()
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 2
    assert "where additional_chat_templates/tool_use.jinja differs" in capsys.readouterr().err
    repaired("D44", "refused, and the file is named")


def test_a_partition_of_a_checkpoint_that_was_downloaded_anew_is_used_again(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    out = partitioned(model_dir, tmp_path / "out")
    for path in model_dir.iterdir():
        os.utime(path, ns=(0, 0))
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 0
    weights = model_dir / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 2
    assert "where model.safetensors differs: remove the folder" in capsys.readouterr().err


def test_partitions_are_for_cpus(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", "--device=cuda", str(checkpoint("llama")), str(tmp_path / "out")]) == 2
    assert "partitions for cuda are not built" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_signal_in_the_middle_leaves_nothing(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what a process that was killed has left; the folder of one that writes another model stays."""
    load_arm(checkpoint("llama"), "compiled")
    for name in ("out.1", "other.2"):
        (tmp_path / f".{name}.partial").mkdir()
    (tmp_path / ".out.old").mkdir()
    monkeypatch.setattr("sys.argv", ["tandem", "partition", str(checkpoint("llama")), str(tmp_path / "out")])
    monkeypatch.setattr("engine.loading.partition.write_packed", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with _locked(tmp_path / ".other.2.partial"):
        assert exit_status_of(main) == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.2.partial", ".out.old"]


@pytest.mark.parametrize("change", ["other weights", "other settings", "broken"])
def test_a_checkpoint_that_changes_meanwhile_is_named(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    path = model_dir / ("tokenizer_config.json" if change == "other settings" else "model.safetensors")

    def write_and_change(packed_path: Path, packed: PackedDecoder) -> None:
        write_packed(packed_path, packed)
        if change != "other settings":
            edit_weights(model_dir, lambda stored: stored["model.embed_tokens.weight"][3].add_(1.0))
        else:
            path.write_text('{"model_max_length": 7}')
        if change == "broken":  # as numbers are that are read while they are written
            raise ConfigurationError("5 of 7 numbers are NaN")

    monkeypatch.setattr("engine.loading.partition.write_packed", write_and_change)
    assert main(["partition", str(model_dir), str(tmp_path / "to" / "out")]) == 2
    assert f"{path} has changed since the run began, so nothing is written: run it again" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("flags", [(), ("--reuse",)])
@pytest.mark.parametrize("name", [".", "config.json"])
def test_an_out_that_is_no_partition_stays(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    name: str,
) -> None:
    """Such as the model itself, by a link, or a file. It is found before the weights are read."""
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    out = tmp_path / "out"
    out.symlink_to(model_dir / name)
    (model_dir / "model.safetensors").unlink()
    before = sorted(model_dir.iterdir())
    assert main(["partition", *flags, str(model_dir), str(out)]) == 2
    assert f"{out} exists already: remove it, or choose another folder" in capsys.readouterr().err
    assert sorted(model_dir.iterdir()) == before


def test_a_partition_may_lie_in_its_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    load_arm(checkpoint("llama"), "compiled")
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    before = sorted(model_dir.iterdir())
    out = partitioned(model_dir, model_dir / "parts")
    assert sorted(model_dir.iterdir()) == sorted([*before, out])
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 0


def test_a_full_disk_is_named_and_nothing_is_left(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        assert main(["partition", str(checkpoint("llama")), str(tmp_path / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"cannot write {tmp_path / 'out'}: [Errno {errno.EFBIG}]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
