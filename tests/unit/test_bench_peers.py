"""Driving other engines: the protocol, runners that die, and what is made of the figures."""

import io
import json
import math
import queue
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import tandem
from bench.closed_loop import Workload, run_closed_loop
from bench.peers import goodput
from bench.peers.arms import Arm, in_turn, parse_arm, send_through
from bench.peers.burst import gaps_ending_in
from bench.peers.burst import summarise as summarise_burst
from bench.peers.checkpoints import Place, places_of, row_of
from bench.peers.compare import Row, best_ratios, count_agreement
from bench.peers.goodput import Load, run_rate
from bench.peers.install import select_requirements
from bench.peers.process import PeerFailed, PeerProcess, running
from bench.peers.wire import Request, Wire
from tandem_cli.load_test.figures import Slo
from tandem_cli.load_test.jobs import Lengths

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    for i in range(0, request["max_new_tokens"], 2):
        tokens = [request["prompt"][0] + i, request["prompt"][0] + i + 1][: request["max_new_tokens"] - i]
        print(json.dumps({"id": request["id"], "tokens": tokens}), flush=True)
    print(json.dumps({"id": request["id"], "done": True}), flush=True)
"""
DIES = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
request = json.loads(sys.stdin.readline())
print(json.dumps({"id": request["id"], "tokens": [1]}), flush=True)
sys.exit("out of luck")
"""


def runner(tmp_path: Path, source: str) -> AbstractAsyncContextManager[PeerProcess]:
    script = tmp_path / "runner.py"
    script.write_text(source)
    return running("fake", (sys.executable, str(script)))


LEAVES_A_FILE = """
import json, os, signal, sys, tempfile
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
file, path = tempfile.mkstemp()
print(json.dumps({"id": 1, "tokens": [path, os.environ["TORCHINDUCTOR_CACHE_DIR"]]}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_runner_that_is_killed_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the one that vLLM's processes meet in. What has been compiled is kept for the next runner."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    async with runner(tmp_path, LEAVES_A_FILE) as peer:
        stream = peer.stream([1], 1)
        path, compiled = map(str, await anext(stream))
        with pytest.raises(PeerFailed, match="ended with exit status -9"):
            await anext(stream)
    assert Path(path).parent.parent == temporary
    assert compiled.startswith(f"{temporary}/torchinductor_")
    assert list(temporary.iterdir()) == []


async def test_streams_of_a_runner_run_at_the_same_time_and_bring_all_tokens(tmp_path: Path) -> None:
    load = Workload(num_clients=3, requests_per_client=2, input_tokens=4, output_tokens=5)
    async with runner(tmp_path, ECHO) as peer:
        assert [tokens async for tokens in peer.stream([40], 3)] == [[40, 41], [42]]
        measured = await run_closed_loop(load, send_through(peer.stream))
    assert measured.num_tokens == 3 * 2 * 5
    assert (len(measured.ttft_s), len(measured.gaps_s)) == (6, 6 * 4)


async def test_a_runner_that_dies_fails_all_its_streams_with_its_last_words(tmp_path: Path) -> None:
    async with runner(tmp_path, DIES) as peer:
        send = send_through(peer.stream)
        with pytest.raises(PeerFailed, match=r"fake ended with exit status 1\nout of luck"):
            await send([1], 8, lambda: None)
        with pytest.raises(PeerFailed, match="out of luck"):
            await send([1], 8, lambda: None)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sys; sys.exit('no such model')", "no such model"),
        ("print('hello')", "no JSON"),
        ("print('{}')", "before it was ready"),
    ],
)
async def test_a_runner_that_never_gets_ready_is_told_from_one_that_does(
    tmp_path: Path, source: str, says: str
) -> None:
    with pytest.raises(PeerFailed, match=says):
        async with runner(tmp_path, source):
            pass


async def test_fewer_tokens_than_asked_for_are_an_error() -> None:
    async def one_token(prompt: object, max_new_tokens: int) -> AsyncIterator[list[int]]:
        yield [7]

    with pytest.raises(PeerFailed, match="received 1 tokens instead of 2"):
        await send_through(one_token)([1], 2, lambda: None)


def test_a_runner_reads_requests_and_ends_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"id": i, "prompt": [5, i], "max_new_tokens": 2}) + "\n" for i in (1, 2)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(lines)))
    wire = Wire.__new__(Wire)
    wire._requests = queue.SimpleQueue()
    wire._read()
    with pytest.raises(SystemExit):
        wire.arrived()
    wire._requests.put(Request(3, [5, 3], 2))
    assert wire.arrived() == [Request(3, [5, 3], 2)]
    assert wire.arrived() == []


def row(arm: str, clients: int, tokens_per_s: float) -> Row:
    return Row(arm, clients, tokens_per_s, 0, 0, 0, 0, 0, 0, 0)


def test_ratios_are_to_the_best_peer_at_each_number_of_clients() -> None:
    rows = [
        row("tandem", 1, 30),
        row("a", 1, 20),
        row("b", 1, 40),
        row("tandem", 8, 90),
        row("a", 8, 60),
        row("b", 8, 50),
    ]
    assert best_ratios(rows, frozenset({"tandem"})) == {("tandem", 1): (0.75, "b"), ("tandem", 8): (1.5, "a")}
    assert best_ratios(rows[:1], frozenset({"tandem"})) == {}


def test_gaps_of_a_burst_are_those_between_its_arrival_and_the_last_first_token() -> None:
    steady = [[0.0, 1.0, 2.0, 6.0, 11.0, 20.0]]
    assert gaps_ending_in(steady, 0.0, 2.0) == [(1.0, 1.0), (1.0, 2.0)]
    burst = summarise_burst(steady, [[8.0, 9.0], [12.0]], arrival=2.0)
    assert (burst.before_p50_ms, burst.during_p50_ms) == (1000, 4500)
    assert (burst.longest_ms, burst.longest_at_ms) == (5000, 9000)
    assert burst.long_ttft_s == 8.0


def test_arms_are_read_with_their_budgets() -> None:
    assert [parse_arm("tandem"), parse_arm("openvino:64")] == [Arm("tandem"), Arm("openvino", 64)]
    assert parse_arm("openvino:64").label == "openvino:64"
    for wrong in ("lambda", "transformers:64", "openvino:many"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_arm(wrong)


def test_agreement_counts_tokens_up_to_the_first_that_differs() -> None:
    assert count_agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == (1, 4)


def test_requirements_of_extras_and_unwanted_ones_are_left_out() -> None:
    listed = ["numpy", "torchvision; platform_machine != 'riscv64'", 'scipy; extra == "bench"', "torch==2.13.0+cpu"]
    assert select_requirements(listed, ("torchvision",)) == ["numpy", "torch==2.13.0+cpu"]


@pytest.mark.parametrize("error", [None, PeerFailed("out of luck"), tandem.Overloaded("full")])
async def test_only_whole_answers_in_time_are_good(error: Exception | None) -> None:
    async def stream(prompt: Sequence[int], max_new_tokens: int) -> AsyncIterator[Sequence[int]]:
        assert len(prompt) == 512
        yield [1] * (max_new_tokens // 2)
        if error is not None:
            raise error
        yield [1] * (max_new_tokens // 2)

    found = await run_rate(stream, 200, Load(Lengths(512, 64), 0.02, Slo()), seed="0")
    assert (found["num_ok"], found["slo_share"]) == ((4, 1.0) if error is None else (0, 0.0))


async def test_an_arm_that_fails_is_left_out_from_there(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    async def once(arm: Arm, repeat: int) -> None:
        asked.append((arm.name, repeat))
        if (arm.name, repeat) == ("vllm", 1):
            raise PeerFailed("out of luck")

    after_rounds = [len(asked) async for _ in in_turn([Arm("tandem"), Arm("vllm")], 3, once)]
    assert after_rounds == [2, 4, 5]
    assert asked == [("tandem", 0), ("vllm", 0), ("vllm", 1), ("tandem", 1), ("tandem", 2)], "there, back, there"
    assert "left out from here: out of luck" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--rates", "0"], ["--rates", "2", "-1"], ["--seconds", "0"]])
def test_rates_at_which_nothing_would_ever_come(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["goodput", *flags])
    with pytest.raises(SystemExit):
        goodput.main()
    assert "must be more than 0" in capsys.readouterr().err


async def test_each_place_of_a_peers_answer_is_compared_after_the_same_tokens() -> None:
    """Tandem would say the length of what it has got, and finds other tokens the less probable the larger they are."""
    asked: list[tuple[int, int]] = []

    async def ask(prompt: Sequence[int], max_new_tokens: int) -> list[tandem.Token]:
        asked.append((len(prompt), max_new_tokens))
        lengths = range(len(prompt), len(prompt) + max_new_tokens)
        top = [[tandem.TopToken(n + i, "", -1.0 - i / 8) for i in range(3)] for n in lengths]
        return [tandem.Token(n, "", -1.0, top=tuple(at)) for n, at in zip(lengths, top, strict=True)]

    places = await places_of([7, 7], [2, 3, 6, 5, 99], ask)
    assert [place.to_peers for place in places] == [0.0, 0.0, 0.25, 0.0, math.inf]
    assert {place.to_second for place in places} == {0.125}
    assert asked == [(2, 5), (5, 2)], "asked again behind each other token only"


def test_a_row_says_how_far_other_tokens_are_from_tandems() -> None:
    places = [Place(0.5, 0.0), Place(0.3, 0.0), Place(0.02, 0.01), Place(0.4, 0.0)]
    assert row_of("awq", places) == ("awq", "4", "75.00%", "0.0100", "0.3500")
    assert row_of("awq", places[:2])[2:4] == ("100.00%", "")
