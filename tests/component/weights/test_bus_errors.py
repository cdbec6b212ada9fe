"""A file that is cut off while a process has it mapped ends the process with a sentence."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.bus_error_report import culprit
from tandem_cli.main import main
from tests.component.weights.test_convert import write_pickled

_CUT_WHEN_OPENED = """
import os, sys
import engine.loading.mapped_files, engine.loading.weights
from tandem_cli.main import main

opened = engine.loading.weights.open_mapped

def open_and_cut(path):
    file = opened(path)
    os.truncate(path, 5000)
    return file

engine.loading.weights.open_mapped = open_and_cut
sys.exit(main(sys.argv[1:]))
"""

_CUT_WHILE_SERVED = """
import os, sys
from pathlib import Path
from engine.models.packed_weights import read_packed

path = Path(sys.argv[1])
packed = read_packed(path)
path.chmod(0o644)
os.truncate(path, 5000)
print(packed.weights.packed.view("u1").sum())
"""

_CUT_WHEN_CONVERTED = """
import os, sys
from engine.quantizer.shards import ShardWriter
from tandem_cli.main import main

finish = ShardWriter.finish

def cut_and_finish(writer):
    os.truncate(os.path.join(sys.argv[2], "pytorch_model.bin"), 5000)
    finish(writer)

ShardWriter.finish = cut_and_finish
sys.exit(main(sys.argv[1:]))
"""

_CUT_ANOTHER_FILE = """
import mmap, os, sys
from pathlib import Path
from engine.bus_errors import name_if_cut_off

watched, other = map(Path, sys.argv[1:])
name_if_cut_off([watched])
pages = mmap.mmap(os.open(other, os.O_RDONLY), 0, prot=mmap.PROT_READ)
os.truncate(other, 0)
print(pages[0])
"""


def _run(program: str, *words: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )


def _sentence(path: Path, num_bytes: int) -> str:
    what = f"{path} was cut off, from {num_bytes} to 5000 bytes, while it was in use"
    return f"tandem: {what}: start again once it is whole and stays as it is\n"


def test_a_command_names_the_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source, model, out = checkpoint("llama"), tmp_path / "a model", tmp_path / "out" / "partition"
    model.mkdir()
    for path in source.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    num_bytes = weights.stat().st_size
    ended = _run(_CUT_WHEN_OPENED, "partition", model, out)
    assert (ended.returncode, ended.stderr) == (2, _sentence(weights, num_bytes))
    assert not out.exists()
    weights.write_bytes((source / weights.name).read_bytes())
    assert main(["partition", str(model), str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["partition"], "the ended run has left its folder"


def test_a_partition_that_is_served_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    assert main(["partition", str(checkpoint("llama")), str(tmp_path / "out")]) == 0
    [path] = (tmp_path / "out").glob("*.safetensors")
    num_bytes = path.stat().st_size
    ended = _run(_CUT_WHILE_SERVED, path)
    assert (ended.returncode, ended.stderr) == (2, _sentence(path, num_bytes))


def test_a_pickled_checkpoint_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The numbers are read when the last shard is written."""
    model = tmp_path / "pickled"
    write_pickled(checkpoint("llama"), model)
    [path] = model.glob("*.bin")
    num_bytes = path.stat().st_size
    ended = _run(_CUT_WHEN_CONVERTED, "convert", model, tmp_path / "out")
    assert (ended.returncode, ended.stderr) == (2, _sentence(path, num_bytes))
    assert not (tmp_path / "out").exists()


def test_another_bus_error_stays_one(tmp_path: Path) -> None:
    watched, other = tmp_path / "watched", tmp_path / "other"
    watched.write_bytes(b"whole")
    other.write_bytes(bytes(10_000))
    ended = _run(_CUT_ANOTHER_FILE, watched, other)
    assert ended.returncode == -signal.SIGBUS
    assert "no file of the model was cut off" in ended.stderr


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda path: os.truncate(path, 1), "{path} was cut off, from 4 to 1 bytes,"),
        (lambda path: os.utime(path, (1, 1)), "{path} has changed"),
        (lambda path: path.unlink(), "{path} has gone"),
        (lambda path: path.rename(path.with_name("before")) and path.write_bytes(b""), None),
        (lambda path: None, None),
    ],
)
def test_the_file_that_was_cut_off_is_told_from_others(
    tmp_path: Path, change: Callable[[Path], object], what: str | None
) -> None:
    """A file that another one has replaced still has its pages."""
    path, whole = tmp_path / "file", tmp_path / "whole"
    files = []
    for file in (whole, path):
        file.write_bytes(b"four")
        status = file.stat()
        files.append((str(file), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    change(path)
    assert culprit(files) == (what and what.format(path=path))
