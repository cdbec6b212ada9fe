"""Ranks as threads of one process: every result equals that of one rank, to the bit, with any degrees."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.batch import ScheduledBatch
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.runner import FinishBatch
from mesh.domain.kv import Degrees, KVSpan, Span
from tests.component.arms import load_arm, settings
from tests.component.driving import Driver, Run
from tests.component.parity import run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.fakes.requests import make_request

FAMILIES = ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral"]
ARITHMETIC = [{}, {"kv_dtype": "float16"}, {"quantize": "int8"}, {"quantize": "int8", "kv_dtype": "float32"}]


@pytest.mark.parametrize(
    ("family", "changes"),
    [*product(FAMILIES, ARITHMETIC[1:3]), *product(("llama", "qwen2"), (ARITHMETIC[0], ARITHMETIC[3]))],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) or "float32",
)
def test_ranks_equal_one_rank(checkpoint: Callable[[str], Path], family: str, changes: dict[str, str]) -> None:
    model_dir = checkpoint(family)
    alone = load_arm(model_dir, "compiled", **changes)
    expected, kv = run_mixed(alone), whole_kv(alone)
    most = min(3, alone.kv_cache.layout.num_kv_heads)
    for degrees in (Degrees(2), Degrees(1, 2), Degrees(most, 2), Degrees(2, 3)):
        with ranked_runner(model_dir, degrees, **changes) as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == kv


@pytest.mark.parametrize("changes", [{}, {"quantize": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("family", ["gpt2", "falcon-40b", "gemma3", "bloom", "olmo3", "cohere"])
def test_ranks_of_other_layers_equal_one_rank(
    checkpoint: Callable[[str], Path], family: str, changes: dict[str, str]
) -> None:
    """A plain MLP, blocks side by side, norms after attention and a gate of GELU, ALiBi, norms over all heads, norms of
    heads that each have their own weights. The layout is the same but for OLMo 3's, whose 3 layers are one run.
    """
    alone = load_arm(checkpoint(family), "compiled", **changes)
    expected, kv = run_mixed(alone), whole_kv(alone)
    with ranked_runner(checkpoint(family), Degrees(2, 2), **changes) as runner:
        require_equal(run_mixed(runner), expected)
        assert (runner.kv_cache.layout == alone.kv_cache.layout) == (family != "olmo3")
        assert family == "olmo3" or whole_kv(runner) == kv


def require_equal(runs: Sequence[Run], expected: Sequence[Run]) -> None:
    for run, theirs in zip(runs, expected, strict=True):
        assert run.tokens == theirs.tokens
        assert run.prompt_logprobs == theirs.prompt_logprobs


def whole_kv(runner: ModelRunner) -> bytes:
    cache = runner.kv_cache
    kv = bytearray(cache.payload_bytes(cache.num_blocks, cache.layout.whole))
    cache.read_blocks(range(cache.num_blocks), cache.layout.whole, kv)
    return bytes(kv)


def run_in_flight(runner: ModelRunner, max_in_flight: int) -> list[Run]:
    """Four batches of two sequences, in chunks and then token by token, with so many batches in flight."""
    driver = Driver(runner)
    rng = random.Random(1)
    requests = [make_request(f"r{n}", rng.choices(range(200), k=13 + 5 * n), prompt_logprobs=True) for n in range(8)]
    runs, in_flight = [driver.add(request) for request in requests], deque[FinishBatch]()
    for _ in range(12):
        for first in range(0, len(runs), 2):
            if len(in_flight) == max_in_flight:
                in_flight.popleft()()
            work = [(run, min(11, run.sequence.num_uncomputed_tokens)) for run in runs[first : first + 2]]
            in_flight.append(driver.begin(*sorted(work, key=lambda pair: pair[1] > 1)))
    while in_flight:
        in_flight.popleft()()
    return runs


@pytest.mark.parametrize("changes", [{}, {"quantize": "int8"}, {"enforce_eager": True}], ids=str)
def test_several_batches_in_flight_equal_one(checkpoint: Callable[[str], Path], changes: dict[str, Any]) -> None:
    model_dir = checkpoint("llama")
    expected = run_in_flight(load_model_runner(settings(model_dir, **changes)), 1)
    assert all(len(run.tokens) > 5 for run in expected)
    for degrees in (Degrees(1, 2), Degrees(1, 3)):
        with ranked_runner(model_dir, degrees, **changes) as runner:
            require_equal(run_in_flight(runner, degrees.pipeline), expected)


class LayersDriver(Driver):
    """Keeps a copy of the KV of the layers that are announced, as it is then."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.copies: list[tuple[list[int], KVSpan, bytes]] = []

    def note_layers(self, batch: ScheduledBatch, layers: Span) -> None:
        super().note_layers(batch, layers)
        span = replace(self.runner.kv_cache.layout.whole, layers=layers)
        blocks = list(batch.items[0].sequence.block_table)
        self.copies.append((blocks, span, self.read(blocks, span)))

    def read(self, blocks: list[int], span: KVSpan) -> bytes:
        kv = bytearray(self.runner.kv_cache.payload_bytes(len(blocks), span))
        self.runner.kv_cache.read_blocks(blocks, span, kv)
        return bytes(kv)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("degrees", "size", "groups"),
    [(Degrees(2, 2), 1, [(0, 1), (1, 1), (2, 1)]), (Degrees(1, 2), 4, [(0, 1), (1, 2)])],
    ids=str,
)
def test_layers_are_announced_when_their_kv_is_written(
    checkpoint: Callable[[str], Path], degrees: Degrees, size: int, groups: list[tuple[int, int]], eager: bool
) -> None:
    changes = {"layers_per_group": size, "enforce_eager": eager}
    with ranked_runner(checkpoint("llama"), degrees, **changes) as runner:
        driver = LayersDriver(runner)
        driver.step((driver.add(make_request("a", range(40))), 40))
        assert driver.announced == groups
        assert [kv for *_, kv in driver.copies] == [driver.read(blocks, span) for blocks, span, _ in driver.copies]
        assert all(any(kv) for *_, kv in driver.copies)
