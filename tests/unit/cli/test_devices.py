"""Which GPUs workers get that ask for any, and how many GPUs a process sees."""

from pathlib import Path

import pytest

from tandem_cli.devices import num_gpus, spread


@pytest.mark.parametrize(
    ("workers", "gpus", "chosen"),
    [
        ({"prefill-0": ("cuda", 1), "decode-0": ("cuda", 1)}, 2, {"prefill-0": "cuda:0", "decode-0": "cuda:1"}),
        ({"a": ("cuda", 1), "b": ("cuda", 1), "c": ("cuda", 1)}, 2, {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0"}),
        ({"a": ("cuda", 1), "b": ("cuda", 1)}, 1, {"a": "cuda:0", "b": "cuda:0"}),
        ({"a": ("cuda", 2), "b": ("cuda", 2)}, 4, {"a": "cuda:0", "b": "cuda:2"}),
        ({"a": ("cuda", 1), "b": ("cuda", 2)}, 2, {"a": "cuda:0", "b": "cuda:0"}),  # ranks lie side by side
        ({"a": ("cuda", 4), "b": ("cuda", 1)}, 2, {"b": "cuda:0"}),  # the first is refused by itself
        ({"a": ("cuda:1", 1), "b": ("auto", 1), "c": ("cpu", 2), "d": ("cuda:0,cuda:1", 2)}, 2, {}),
        ({"a": ("cuda", 1)}, 0, {}),
    ],
)
def test_workers_take_gpus_in_turn(workers: dict[str, tuple[str, int]], gpus: int, chosen: dict[str, str]) -> None:
    assert spread(workers, gpus) == chosen


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("0", 1), ("2, 0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-5a,MIG-7b", 2)],
)
def test_gpus_that_cuda_shows(tmp_path: Path, visible: str | None, count: int) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / address).mkdir()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environ, tmp_path) == count
    assert num_gpus({}, tmp_path / "none") == 0
