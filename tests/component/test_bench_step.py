"""bench.step beside checkpoints: what is measured, by which name, and the weights that a step is said to read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shapes import write_shape, write_weights
from bench.step import Variant, _subject
from engine.models.read_config import load_decoder_config
from tandem_cli.capacity.model_size import model_size
from tandem_cli.main import main


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A checkpoint in int4, in groups of 64."""
    data, out = tmp_path / "prompts.jsonl", tmp_path / "narrow-w4a16"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    model_dir = write_shape("narrow", tmp_path)
    write_weights(model_dir)
    flags = ["--scheme=w4a16", "--group-size=64", f"--data={data}", "--json"]
    assert main(["quantize", str(model_dir), str(out), *flags]) == 0
    return out


def test_checkpoints_are_measured_beside_the_shape(quantized: Path, tmp_path: Path) -> None:
    """In the file's own groups, each of which has a scale of two bytes and a zero of one; the output matrix in int8."""
    size = model_size(load_decoder_config(quantized))
    num_bytes = size.linear_params * (0.5 + 3 / 64) + size.vocabulary_params
    assert _subject(tmp_path, Variant(quantized, "auto", 1)).step_bytes == num_bytes
    figures = tmp_path / "figures.json"
    flags = ["--shape=narrow", "--quantize=int8", f"--checkpoints={quantized}", "--batch=1", "--context=32"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.step", *flags, "--repeats=1", f"--json={figures}"],
        capture_output=True,
        text=True,
        check=True,
    )
    columns = ("prompt of 32, ms", "step of 1, ms")
    names = [f"{weights}, {column}" for weights in ("int8", "narrow-w4a16") for column in columns]
    assert sorted(json.loads(figures.read_text())) == sorted(names)
    assert re.search(rf"narrow-w4a16: a step of 1 reads {num_bytes / 1e6:.0f} MB", done.stdout)


@pytest.mark.parametrize(
    ("names", "words"),
    [(("nowhere",), "nowhere: it is no model folder"), (("a/x", "b/x"), "two folders have one name")],
)
def test_checkpoints_must_be_told_apart(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
        if folder.name == "x":
            (folder / "config.json").write_text("{}")
    line = [sys.executable, "-m", "bench.step", "--checkpoints", *map(str, folders)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
