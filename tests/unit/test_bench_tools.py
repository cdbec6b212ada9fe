"""Benchmarks of bench/: what limits, neighbours, context and guard derive from what they measure."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from bench.arithmetic import ARITHMETICS, Loop, operations_per_s
from bench.context import Point, main, medians_of, request
from bench.guard import compare
from bench.limits import read_comparison, roofline, tokens_per_s
from bench.peers.arms import Arm
from bench.peers.neighbours import Case, busy, cell
from bench.shapes import write_shape
from engine.models.read_config import load_decoder_config
from tandem_cli.capacity.roofline import Device

MACHINE = Device("two cores", 1e12, 50e9, {"float32": 500e9, "bfloat16": 1e12, "int8": 2e12, "int4": 2e12}, "a test")
STEADY = [10.0, 10.2, 9.9]


def test_a_roofline_is_the_prompts_and_then_the_steps(tmp_path: Path) -> None:
    capacity = roofline(MACHINE, write_shape("narrow", tmp_path), "none")
    in_all_s = 3 * capacity.prefill_s(100) + 9 * capacity.decode_step_s(3, 105)
    assert tokens_per_s(capacity, 3, 100, 10) == pytest.approx(3 * 10 / in_all_s)


@pytest.mark.parametrize(("quantize", "weights"), [("none", "float32"), ("bf16", "bfloat16"), ("int8", "int8")])
def test_weights_are_of_the_type_that_was_asked_for(tmp_path: Path, quantize: str, weights: str) -> None:
    capacity = roofline(MACHINE, write_shape("narrow", tmp_path), quantize)
    assert capacity.precision.weights == weights
    assert capacity.device.flops_per_s == MACHINE.flops_per_s[weights]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), ("{", "is not what bench.peers.compare"), ('{"rows": []}', "lacks 'shape'")],
)
def test_a_file_without_a_comparison_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "compared.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=said):
        read_comparison(file)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_cores_compute(arithmetic: str) -> None:
    assert operations_per_s(arithmetic, 1) > 1e9


def test_cores_are_busy_as_long_as_asked_for() -> None:
    core = min(os.sched_getaffinity(0))
    before = set(psutil.Process().children())
    with busy([core], 2):
        loops = [child for child in psutil.Process().children() if child not in before]
        assert [loop.cpu_affinity() for loop in loops] == [[core], [core]]
    assert not any(loop.is_running() for loop in loops)


def test_a_cell_says_the_share_of_the_quiet_machine_and_the_ratio_to_the_best_peer() -> None:
    rates = {
        Case("tandem", 8, 0): 200.0,
        Case("tandem", 8, 1): 96.0,
        Case("vllm", 8, 1): 60.0,
        Case("vllm", 8, 0): 150.0,
    }
    peers = frozenset({"vllm", "openvino"})
    assert cell(Case("tandem", 8, 1), rates, peers) == "96, 48%, 1.60 x"
    assert cell(Case("vllm", 8, 1), rates, peers) == "60, 40%"
    assert cell(Case("tandem", 8, 3), rates, peers) == ""


TANDEM, PEER = Arm("tandem"), Arm("vllm")


def test_medians_are_those_of_an_arm_by_length() -> None:
    points = {
        (TANDEM, 8192): [Point(8192, 4.0, 9.0, 5.0)],
        (TANDEM, 2048): [Point(2048, ttft_s, 7.0, 2.0) for ttft_s in (1.0, 3.0, 2.0)],
        (PEER, 2048): [Point(2048, 9.0, 9.0, 9.0)],
    }
    assert medians_of(points, TANDEM) == [Point(2048, 2.0, 7.0, 2.0), Point(8192, 4.0, 9.0, 5.0)]
    assert medians_of(points, PEER) == [Point(2048, 9.0, 9.0, 9.0)]


def test_a_request_counts_from_its_first_token_on() -> None:
    asked: list[tuple[int, int]] = []

    async def stream(prompt: Sequence[int], num_output: int) -> AsyncIterator[Sequence[int]]:
        asked.append((len(prompt), num_output))
        await asyncio.sleep(0.05)
        yield (1,)
        await asyncio.sleep(0.2)  # the handoff, which is not counted
        for token in range(num_output - 1):
            yield (token,)

    ttft_s, token_ms = asyncio.run(request(stream, 300, 8, 0))
    assert asked == [(300, 8)]
    assert ttft_s >= 0.05
    assert token_ms < 100


def test_prompts_of_different_rounds_share_no_prefix() -> None:
    prompts: list[list[int]] = []

    async def stream(prompt: Sequence[int], _: int) -> AsyncIterator[Sequence[int]]:
        prompts.append(list(prompt))
        yield (1,)
        yield (2,)

    async def run() -> None:
        for num_tokens, repeat in ((64, 0), (64, 1), (128, 0)):
            await request(stream, num_tokens, 2, repeat)

    asyncio.run(run())
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 3


@pytest.mark.parametrize("name", ["135m", "0.5b"])
def test_long_shapes_have_room(name: str, tmp_path: Path) -> None:
    short, long = (load_decoder_config(write_shape(shape, tmp_path)) for shape in (name, f"{name}-long"))
    assert (short.max_position_embeddings, long.max_position_embeddings) == (2048, 2**18)
    assert (short.num_layers, short.num_heads) == (long.num_layers, long.num_heads)


def test_slower_beyond_noise_is_counted() -> None:
    before = {"equal": STEADY, "slower": STEADY, "noisy": STEADY, "faster": STEADY, "gone": STEADY}
    after = {"equal": [10.1, 9.9, 10.0], "slower": [11.0, 10.9, 11.2], "noisy": [13.0, 9.0, 14.0], "faster": [8.0] * 3}
    table, num_slower = compare(before, after, 1.03)
    assert num_slower == 1
    verdicts = dict(zip(table.columns[0].cells, table.columns[4].cells, strict=True))
    assert verdicts == {"equal": "", "slower": "slower", "noisy": "", "faster": "faster"}


def test_a_small_difference_without_noise_is_no_verdict() -> None:
    _, num_slower = compare({"step": [10.0, 10.0]}, {"step": [10.2, 10.2]}, 1.03)
    assert num_slower == 0


def test_prompts_that_a_shape_has_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["context", "--shape", "135m", "--tokens", "1024", "2048"])
    with pytest.raises(SystemExit):
        main()
    assert "135m has room for prompts of 2032 tokens" in capsys.readouterr().err


class InterruptedPool(ThreadPoolExecutor):
    """A signal comes when the first thread has begun and the others have not."""

    def map(self, task: Callable[[int], object], numbers: Iterable[int], **_: object) -> NoReturn:
        self.submit(task, next(iter(numbers)))
        raise KeyboardInterrupt


def test_a_signal_between_the_starts_of_threads_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one would wait for the others for ever."""
    loop = Loop(lambda passes: None, 1)
    monkeypatch.setattr("bench.arithmetic._loops", lambda: {"int8": loop})
    monkeypatch.setattr("bench.arithmetic._passes_of", lambda loop: 1)
    monkeypatch.setattr("bench.arithmetic.ThreadPoolExecutor", InterruptedPool)
    with pytest.raises(KeyboardInterrupt):
        operations_per_s("int8", 2)
