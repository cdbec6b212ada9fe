"""Headers of safetensors files: what is read, and which damage is refused with which words."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoint.tensors import StoredTensor, are_equal, read_header
from mesh.domain.errors import ConfigurationError

HUGE = 10**30


def write(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 2), data_offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def test_a_whole_header_is_read(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [3], [16, 22]),
        "a": entry(),
        "scalar": entry("F64", [], [22, 30]),
        "empty": entry("U8", [0, 7], [22, 22]),
        "packed": entry("F4", [6], [30, 33]),
    }
    path = write(tmp_path / "model.safetensors", header, bytes(33))
    start = path.stat().st_size - 33
    assert read_header(path) == {
        "b": StoredTensor(path, "BF16", (3,), start + 16, 6),
        "a": StoredTensor(path, "F32", (2, 2), start, 16),
        "scalar": StoredTensor(path, "F64", (), start + 22, 8),
        "empty": StoredTensor(path, "U8", (0, 7), start + 22, 0),
        "packed": StoredTensor(path, "F4", (6,), start + 30, 3),
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "it must be an object, got []"),
        ({"dtype": "F32", "shape": [2, 2]}, "data_offsets must be two ascending integers from 0 on, got None"),
        (entry(data_offsets=[-16, 0]), "data_offsets must be two ascending integers from 0 on, got [-16, 0]"),
        (entry(data_offsets=[16, 0]), "data_offsets must be"),
        (entry(data_offsets=[0.0, 16.0]), "data_offsets must be"),
        (entry("U8", [1], [False, True]), "data_offsets must be"),
        (entry(data_offsets=[0, 8, 16]), "data_offsets must be"),
        (entry(data_offsets="ab"), "data_offsets must be"),
        (entry(data_offsets=[0, 12]), "12 bytes are not the size of shape [2, 2] in F32"),
        (entry(shape=[2, 3]), "16 bytes are not the size of shape [2, 3] in F32"),
        (entry("F4", [3], [0, 1]), "1 bytes are not the size of shape [3] in F4"),
        (entry("F9"), "dtype must be one of F64, "),
        (entry(16), "dtype must be one of F64, "),
        (entry(["F32"]), "dtype must be one of F64, "),
        (entry(shape=4), "shape must be a list of integers from 0 on, got 4"),
        (entry(shape="22"), "shape must be"),
        (entry(shape=[-2, -2]), "shape must be"),
        (entry(shape=[2.0, 2.0]), "shape must be"),
        (entry("U8", [True], [0, 1]), "shape must be"),
        (entry(shape=[[2], 2]), "shape must be"),
        (entry(shape=[0, HUGE], data_offsets=[0, 0]), "shape must be"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, wrong: object, words: str) -> None:
    path = write(tmp_path / "model.safetensors", {"x.weight": wrong}, bytes(16))
    stated = re.escape(f"{path}: the header describes tensor x.weight wrongly: {words}")
    with pytest.raises(ConfigurationError, match=f"{stated}.*: download or write it again"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(), "b": entry("F32", [2], [8, 16])}, "is damaged: tensor b overlaps another"),
        ({"a": entry(), "b": entry()}, "is damaged: tensor b overlaps another"),
        ({"a": entry("F32", [2], [8, 16])}, "is damaged: tensor a has bytes of no tensor before it"),
        ({"a": entry("F32", [2], [0, 8])}, "is damaged: 8 bytes after its last tensor"),
        ({"a": entry("F32", [5], [0, 20])}, r"is truncated: \d+ bytes, tensor a ends beyond them"),
        ({"a": entry("F32", [1], [HUGE, HUGE + 4])}, "tensor a ends beyond them"),
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused(tmp_path: Path, header: object, words: str) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(ConfigurationError, match=f"{path} .*{words}: download or write it again"):
        read_header(path)


@pytest.mark.parametrize("place", [0, (1 << 20) - 1, 1 << 20, (1 << 20) + 6])
def test_equal_tensors_are_equal_in_every_byte(tmp_path: Path, place: int) -> None:
    size = (1 << 20) + 7  # more than is read at once
    header = {"a": entry("U8", [size], [0, size]), "b": entry("U8", [size], [size, 2 * size])}
    data = bytearray(2 * size)
    path = tmp_path / "model.safetensors"
    tensors = read_header(write(path, header, bytes(data)))
    assert are_equal(tensors["a"], tensors["b"])
    data[place] = 1
    write(path, header, bytes(data))
    assert not are_equal(tensors["a"], tensors["b"])
    write(path, header, b"")
    with pytest.raises(ConfigurationError, match=f"{path} is truncated"):
        are_equal(tensors["a"], tensors["b"])


@pytest.mark.parametrize("length", [0, 1, 1 << 20, (1 << 64) - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigurationError, match=f"{path} is truncated or not a safetensors file"):
        read_header(path)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is no file"):
        read_header(path)


def test_a_header_too_long_for_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    length = 1 << 36
    path.write_bytes(length.to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(length + 8)  # a sparse file
    with pytest.raises(ConfigurationError, match=f"{path} is truncated or not a safetensors file"):
        read_header(path)
