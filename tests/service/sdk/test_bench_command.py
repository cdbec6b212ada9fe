"""`tandem bench` against a fake router: table, file, plots, wrong options."""

import asyncio
import errno
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tandem_cli.load_test.endpoints import own_mesh
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.main import main
from tests.fakes.sdk_router import FakeRouter, Refusal

Run = Callable[..., tuple[int, str, str]]
QUICK = ("--input-tokens", "8", "--output-tokens", "4", "--repeats", "2", "--warmup", "1")


@pytest.fixture
def bench(threaded_router: FakeRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command against the fake router; returns status, stdout, stderr."""
    monkeypatch.setenv("TANDEM_ADDRESS", threaded_router.address)

    def command(*argv: str) -> tuple[int, str, str]:
        try:
            status = main(["bench", *argv])
        except SystemExit as ended:
            status = int(str(ended.code))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_a_closed_loop_as_table_file_and_plot(bench: Run, threaded_router: FakeRouter, tmp_path: Path) -> None:
    threaded_router.script.story = "x" * 100
    file, plots = tmp_path / "result.json", tmp_path / "plots"
    given = ("--concurrency", "1", "2", "4", "--price-per-hour", "2", "--json", str(file), "--plots", str(plots))
    status, out, err = bench(*QUICK, *given)
    assert status == 0, err
    assert "8 tokens in, 4 out; medians of 2 runs" in out
    assert all(text in out for text in ("concurrency 4", "TTFT", "4 / 0 / 0", "/ blended 3:1"))
    assert (plots / "latency-throughput.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads(file.read_text())
    assert [point["case"]["value"] for point in content["points"]] == [1, 2, 4]
    assert content["points"][1]["figures"]["num_ok"] == {"median": 4, "low": 4, "high": 4}
    assert content["settings"]["endpoints"]["mesh"]["model"] == "fake"
    assert content["machine"]["cores_allowed"] >= 1
    assert len(threaded_router.script.requests) == 1 + 2 * (2 + 4 + 8)
    status, again, err = bench("--plot-from", str(file), "--plots", str(tmp_path / "again"))
    assert (status, again.count("\n"), "medians of 2 runs" in again) == (0, out.count("\n"), True)
    assert (tmp_path / "again" / "latency-throughput.png").exists()


@pytest.mark.parametrize(
    ("load", "plot"),
    [
        (("--rate", "200", "400"), "goodput.png"),
        (("--burst", "3", "--burst-tokens", "16", "--burst-lead", "0", "--streams", "2"), "burst.png"),
        (("--threads", "2"), "throughput.png"),
    ],
)
def test_other_loads(bench: Run, threaded_router: FakeRouter, tmp_path: Path, load: tuple[str, ...], plot: str) -> None:
    threaded_router.script.story = "x" * 100
    status, out, err = bench(*QUICK, "--num-requests", "4", *load, "--plots", str(tmp_path))
    assert status == 0, err
    assert load[0].removeprefix("--") in out
    assert (tmp_path / plot).exists()


def test_your_own_requests_and_trace(bench: Run, threaded_router: FakeRouter, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "abc", "arrival_s": 0.01}\n{"token_ids": [5], "max_tokens": 2, "arrival_s": 0.0}\n')
    assert bench(*QUICK, "--data", str(data), "--concurrency", "2", "--num-requests", "3")[0] == 0
    _, *sent = threaded_router.script.requests
    assert sorted(request.prompt for request in sent) == ["", "", "abc", "abc", "abc", "abc"]
    assert not sent[0].sampling.ignore_eos
    status, out, _ = bench(*QUICK, "--trace", str(data))
    assert status == 0
    assert "trace 100" in out


def test_errors_are_shown_and_nothing_but_errors_is_a_failure(bench: Run, threaded_router: FakeRouter) -> None:
    threaded_router.script.refusals = deque([Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")] * 100)
    status, out, _ = bench(*QUICK, "--warmup", "0", "--concurrency", "2")
    assert status == 1
    assert "0 / 8 / 0" in out
    assert "8 x Overloaded: full" in out
    status, _, err = bench(*QUICK, "--concurrency", "2")
    assert (status, err.splitlines()[-1]) == (
        1,
        "tandem: no request of the warm-up succeeded: Overloaded: full",
    )


async def test_a_mesh_that_ends_by_itself_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending one would take its exit status, and asyncio would complain of an unknown child."""
    signals: list[int] = []
    monkeypatch.setattr(asyncio.subprocess.Process, "send_signal", lambda _, number: signals.append(number))
    with pytest.raises(RunFailed, match="the mesh did not start: tandem up: there is no option --prefil; did you mean"):
        async with own_mesh(["--prefil", "1"]):
            pass
    assert signals == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--rate", "1", "--concurrency", "1"), "not allowed with argument"),
        (("--rate", "0"), "rate must be > 0, got 0"),
        (("--openai", "http://127.0.0.1:1"), "--openai needs --model"),
        (("--openai", "127.0.0.1", "--model", "m"), "--openai must be a URL"),
        (("--openai", "http://127.0.0.1:1", "--model", "m", "--vocab-size", "3"), "--vocab-size must be > 3, got 3"),
        (("--up", "", "--address", "127.0.0.1:1"), "use only one of --address, --up"),
        (("--trace", "/nowhere"), "cannot read /nowhere"),
        (("--plot-from", "/nowhere"), "holds no results of tandem bench"),
        (("--preset", "bogus"), "invalid choice"),
        (("--json", "/nowhere/file"), "cannot write /nowhere/file"),
        (("--json", "/tmp"), "cannot write /tmp: it is a folder"),
    ],
)
def test_wrong_options_are_one_line(bench: Run, argv: tuple[str, ...], said: str) -> None:
    status, out, err = bench(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert said in err


def test_results_that_cannot_be_saved_are_shown(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "write_text", full)
    status, out, err = bench(*QUICK, "--concurrency", "1", "--json", str(file))
    assert status == 1
    assert "medians of 2 runs" in out
    assert f"tandem: {file}: Disk quota exceeded" in err


def test_presets_are_listed(bench: Run) -> None:
    status, out, _ = bench("--list-presets")
    assert status == 0
    assert all(name in out for name in ("goodput", "replicas", "min-cost"))
