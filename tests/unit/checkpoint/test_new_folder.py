"""Folders of models that are written: copies of files, and what else happens to the folder meanwhile."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoint.files import checkpoint_files, copy_other_files, require_other_files
from checkpoint.new_folder import new_folder
from mesh.domain.errors import ConfigurationError
from tests.e2e.mesh_process import START_S

_WRITER = """
import sys
from pathlib import Path
from checkpoint.new_folder import new_folder

with new_folder(Path(sys.argv[1])) as partial:
    (partial / "config.json").write_text("{}")
    print("writes", flush=True)
    sys.stdin.read()
"""


def test_a_copy_has_all_chat_templates_and_no_weights(tmp_path: Path) -> None:
    model, copy = tmp_path / "model", tmp_path / "copy"
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    copy.mkdir()
    copy_other_files(model, copy)
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert names == {"config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}


@contextmanager
def another_writer(out: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that is about to write `out`, and completes it when its stdin is closed."""
    line = [sys.executable, "-c", _WRITER, str(out)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writes\n"
            yield process
        finally:
            process.kill()


def test_a_folder_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    with another_writer(tmp_path / "out") as process:
        with pytest.raises(
            ConfigurationError, match=rf"^another run is writing {tmp_path}/out, into .*: wait for its end"
        ):
            new_folder(tmp_path / "out").__enter__()
        with new_folder(tmp_path / "out2"):
            pass
        process.communicate(timeout=START_S)
        assert process.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out2"]
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_the_folder_of_a_run_that_was_killed_is_not_taken_for_whole(tmp_path: Path) -> None:
    with another_writer(tmp_path / "out") as process:
        process.kill()
        process.wait(START_S)
    (left,) = tmp_path.iterdir()
    assert left.name == f".out.{process.pid}.partial"
    with new_folder(tmp_path / "out"):
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_parent_is_no_folder_to_write(tmp_path: Path) -> None:
    """It is there as soon as the folder below it is made, so that the work would be lost."""
    with (
        pytest.raises(ConfigurationError, match=r"nowhere/\.\. exists already"),
        new_folder(tmp_path / "nowhere" / ".."),
    ):
        pass
    assert not list(tmp_path.iterdir())


def make_meanwhile(out: Path, make: Callable[[Path], None]) -> None:
    with new_folder(out) as partial:
        (partial / "config.json").touch()
        make(out)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_folder_that_appears_meanwhile_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigurationError, match=f"^{out} has appeared since the run began, so nothing is written: "):
        make_meanwhile(out, make)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert out.is_symlink() or out.is_file() or not list(out.iterdir())


def fail_in(out: Path, error: Exception) -> None:
    """Fail after something else has put a file beside `out`."""
    with new_folder(out):
        (out.parent / "other").touch()
        raise error


def test_parents_that_were_made_go_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyError), new_folder(tmp_path / "a" / "b" / "c" / "out"):
        raise KeyError
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_parents_that_somebody_else_uses_stay(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No space left on device: make room there, or write elsewhere$"):
        fail_in(tmp_path / "a" / "out", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "other"]


@pytest.mark.parametrize("hidden", [".", "additional_chat_templates"])
def test_a_folder_whose_files_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Its files can be opened by name, so a copy would lack what nobody has asked for."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "config.json").touch()
    assert checkpoint_files(tmp_path) == [tmp_path / "config.json"]
    listdir = os.listdir

    def refuse(path: Path) -> list[str]:  # as the system does; root may list any folder
        if path == tmp_path / hidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    for read in (checkpoint_files, require_other_files, lambda folder: copy_other_files(folder, tmp_path / "copy")):
        with pytest.raises(
            ConfigurationError, match=f"^cannot list the files in {tmp_path / hidden}: Permission denied"
        ):
            read(tmp_path)


def test_a_file_that_cannot_be_read_is_named_and_not_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.symlink_to("nowhere")
    for read in (require_other_files, lambda folder: copy_other_files(folder, tmp_path)):
        with pytest.raises(
            ConfigurationError, match=f"^{path} is no file, or a link that leads nowhere: remove it, or"
        ):
            read(tmp_path)
    path.unlink()
    path.touch()

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for read in (require_other_files, lambda folder: copy_other_files(folder, tmp_path)):
        with pytest.raises(ConfigurationError, match=f"^cannot read {path}: Permission denied$"):
            read(tmp_path)
