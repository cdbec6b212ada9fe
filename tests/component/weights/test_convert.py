"""`tandem convert`: checkpoints in PyTorch's format become safetensors with the same values, and no code runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from checkpoint.adapters import read_adapter
from checkpoint.tensors import open_checkpoint
from engine.loading.load_runner import load_model_runner
from engine.quantizer.shards import ShardWriter
from mesh.domain.errors import ConfigurationError
from tandem_cli.main import main
from tandem_cli.model_files.convert_folder import convert_folder
from tests.component.arms import settings
from tests.component.parity import check_parity

Checkpoint = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]


def write_pickled(model_dir: Path, folder: Path, *, num_files: int = 1, **options: Any) -> Tensors:
    """A copy of a checkpoint with its weights in `.bin`, as old ones are; returns the weights."""
    folder.mkdir()
    tensors = load_file(model_dir / "model.safetensors")
    for path in model_dir.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return tensors
    weight_map = {name: f"pytorch_model-{i % num_files}.bin" for i, name in enumerate(tensors)}
    for file_name in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file_name}, folder / file_name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def save(content: object, folder: Path) -> Path:
    """A model with these weights; returns the file of them."""
    (folder / "config.json").write_text("{}")
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in {stored.path for stored in open_checkpoint(folder).values()}:
        tensors |= load_file(path)
    return tensors


def require_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("num_files", "options"),
    [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})],
    ids=["one file", "several files", "before PyTorch 1.6"],
)
def test_weights_and_other_files_are_those_of_the_original(
    checkpoint: Checkpoint, tmp_path: Path, num_files: int, options: dict[str, Any]
) -> None:
    wanted = write_pickled(checkpoint("llama"), tmp_path / "old", num_files=num_files, **options)
    assert convert_folder(tmp_path / "old", tmp_path / "new") == 0
    require_equal(read(tmp_path / "new"), wanted)
    others = {path.name for path in tmp_path.glob("old/*") if not path.name.startswith("pytorch_model")}
    assert {path.name for path in tmp_path.glob("new/*")} == others | {"model.safetensors"}


def test_a_converted_model_computes_what_transformers_does(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = checkpoint("qwen2")
    write_pickled(model_dir, tmp_path / "old")
    with pytest.raises(ConfigurationError, match=r"run tandem convert .*old OUT"):
        open_checkpoint(tmp_path / "old")
    out = tmp_path / "new model"  # the shell needs quotes around it
    assert main(["convert", str(tmp_path / "old"), str(out)]) == 0
    assert f"serve it with: tandem up '{out}'\n" in capsys.readouterr().out
    check_parity(model_dir, load_model_runner(settings(out)))


def test_tied_and_sliced_tensors_are_written_whole(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(4, 6).to(torch.bfloat16)
    wanted = {"embed": weight, "head": weight, "rows": weight[1:3], "turned": weight.T}
    save(wanted, tmp_path)
    convert_folder(tmp_path, tmp_path / "new")
    require_equal(read(tmp_path / "new"), wanted)


def test_an_adapter_is_converted(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    wanted = {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)}
    torch.save(wanted, tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigurationError, match="run tandem convert"):
        read_adapter("a", tmp_path, 8)
    convert_folder(tmp_path, tmp_path / "new")
    assert read_adapter("a", tmp_path / "new", 8).rank == 2
    require_equal(load_file(tmp_path / "new" / "adapter_model.safetensors"), wanted)


def write_adapter(folder: Path) -> Tensors:
    tensors = {
        "base_model.model.a.lora_A.weight": torch.ones(2, 8),
        "base_model.model.a.lora_B.weight": torch.ones(8, 2),
    }
    torch.save(tensors, folder / "adapter_model.bin")
    return tensors


def test_an_adapter_beside_its_base_model_is_told_by_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, base = write_adapter(tmp_path), {"weight": torch.ones(3)}
    save(base, tmp_path)
    convert_folder(tmp_path, tmp_path / "model")
    require_equal(load_file(tmp_path / "model" / "model.safetensors"), base)
    (tmp_path / "adapter_config.json").write_text("{}")
    convert_folder(tmp_path, tmp_path / "adapter")
    require_equal(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), adapter)
    (tmp_path / "adapter_model.bin").unlink()
    convert_folder(tmp_path, tmp_path / "again")
    require_equal(load_file(tmp_path / "again" / "model.safetensors"), base)
    served = capsys.readouterr().out.splitlines()
    assert ["--adapter" in line for line in served] == [False, True, False]


def test_an_adapter_without_settings_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"has adapter_model\.bin without adapter_config\.json: copy that file"
    ):
        convert_folder(tmp_path, tmp_path / "new")


def test_negated_views_keep_their_signs(tmp_path: Path) -> None:
    wanted = {"whole": torch._neg_view(torch.arange(4.0)), "half": torch.ones(3, dtype=torch.complex64).conj().imag}
    save(wanted, tmp_path)
    convert_folder(tmp_path, tmp_path / "new")
    require_equal(read(tmp_path / "new"), wanted)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), r"sparse \(sparse_coo\)"),
        (lambda: torch.eye(4).to_sparse_csr(), r"sparse \(sparse_csr\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), r"quantised by PyTorch \(qint8\)"),
        (
            lambda: torch.quantize_per_channel(torch.eye(4), torch.ones(4), torch.zeros(4), 0, torch.quint8),
            r"quantised by PyTorch \(quint8\)",
        ),
        (lambda: torch.ones(3, dtype=torch.complex64), r"complex \(complex64\)"),
        (lambda: torch.ones(3, dtype=torch.complex128), r"complex \(complex128\)"),
        (lambda: torch.empty(3, device="meta"), r"without values \(meta\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and quantised tensors
def test_tensors_that_are_not_plain_are_named(tmp_path: Path, make: Callable[[], torch.Tensor], kind: str) -> None:
    path = save({"plain": torch.ones(2), "odd": make()}, tmp_path)
    with pytest.raises(ConfigurationError, match=f"{path}: tensor odd is {kind}, which cannot be converted: save the"):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def test_code_does_not_run(tmp_path: Path) -> None:
    save({"weight": torch.ones(2), "other": Evil(tmp_path / "ran")}, tmp_path)
    with pytest.raises(ConfigurationError, match=r"has more than weights, which could run code$"):
        convert_folder(tmp_path, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]


def test_a_file_of_another_kind_is_named_without_advice_to_run_it(tmp_path: Path) -> None:
    save({}, tmp_path).write_bytes(b"garbage")
    with pytest.raises(
        ConfigurationError, match=r"pytorch_model\.bin is no checkpoint of PyTorch, or has more"
    ) as raised:
        convert_folder(tmp_path, tmp_path / "new")
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({"epoch": 3}, "has 'epoch', which is no tensor: only plain weights can be converted"),
        ({}, "has no tensors"),
    ],
)
def test_other_contents_are_named(tmp_path: Path, content: object, reason: str) -> None:
    save(content, tmp_path)
    with pytest.raises(ConfigurationError, match=rf"pytorch_model\.bin {reason}"):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x05.", b"\x80\x02h\x00.", b"PK\x03\x04" + bytes(100)])
def test_damaged_pickles_are_named(tmp_path: Path, content: bytes) -> None:
    save({}, tmp_path).write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=r"pytorch_model\.bin is (truncated or )?no checkpoint of PyTorch\S* \w"
    ):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["\ud800", "__metadata__"])
def test_names_that_cannot_be_written_are_named(tmp_path: Path, name: str) -> None:
    save({"x": torch.ones(3), name: torch.ones(3)}, tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"pytorch_model\.bin: a tensor is named '.*', which safetensors cannot hold"
    ):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_broken_files_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    old = tmp_path / "old"
    write_pickled(checkpoint("llama"), old, num_files=2)
    with pytest.raises(ConfigurationError, match=r"old exists already"):
        convert_folder(old, old)
    (old / "pytorch_model-1.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"pytorch_model-1\.bin is missing"):
        convert_folder(old, tmp_path / "new")
    (old / "pytorch_model-1.bin").write_bytes((old / "pytorch_model-0.bin").read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match=r"pytorch_model-1\.bin is truncated or no checkpoint of PyTorch"):
        convert_folder(old, tmp_path / "new")
    with pytest.raises(ConfigurationError, match="there is nothing to convert"):
        convert_folder(checkpoint("llama"), tmp_path / "new")
    with pytest.raises(ConfigurationError, match=f"is a file: name the folder that it is in, {old}$"):
        convert_folder(old / "pytorch_model-0.bin", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (["pytorch_model-0.bin"], r"must be an object of file names by tensor, got \['pytorch_model-0\.bin'\]"),
        ({"x": 1}, r"must be an object of file names by tensor, got \{'x': 1\}"),
        (None, "must be an object of file names by tensor, got None"),
        ({}, "names no tensor: there is nothing to convert"),
        ({"x": "../pytorch_model.bin"}, r"names a file outside its folder: '\.\./pytorch_model\.bin'"),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, weight_map: object, reason: str) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigurationError, match=rf"pytorch_model\.bin\.index\.json.* {reason}"):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=rf"^{tmp_path}/generation_config.json is not valid JSON"):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "has weights without config.json: copy the model's own file there"),
        ("[", "config.json is not valid JSON"),
    ],
)
def test_weights_without_a_config_are_refused(tmp_path: Path, content: str | None, reason: str) -> None:
    save({"x": torch.ones(3)}, tmp_path)
    if content is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=reason):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_that_change_meanwhile_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, add = save({"x": torch.ones(3), "y": torch.ones(3)}, tmp_path), ShardWriter.add

    def add_and_change(writer: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        add(writer, name, tensor)
        if name == "x":
            path.rename(tmp_path / "before")
            torch.save({"x": torch.zeros(3), "y": torch.zeros(3)}, path)

    monkeypatch.setattr(ShardWriter, "add", add_and_change)
    with pytest.raises(
        ConfigurationError, match=rf"^{path} has changed since the run began, so nothing is written: run"
    ):
        convert_folder(tmp_path, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "config.json", "pytorch_model.bin"]


def test_a_file_that_is_cut_off_meanwhile_is_named_and_not_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save({"x": torch.ones(100_000)}, tmp_path)

    def cut_and_save(*_: object) -> None:
        os.truncate(path, 1000)
        raise SafetensorError("I/O error: Bad address (os error 14)")  # of the pages that are gone

    monkeypatch.setattr("engine.quantizer.shards.save_file", cut_and_save)
    with pytest.raises(
        ConfigurationError, match=rf"^{path} has changed since the run began, so nothing is written: run"
    ):
        convert_folder(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
