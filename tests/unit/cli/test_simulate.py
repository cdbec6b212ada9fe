"""`tandem simulate`: its arguments, what it prints, and the trace that it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem_cli.main import main
from tandem_cli.simulate import best_split
from tandem_cli.simulation import measure, trace
from tests.unit.simulation.profiles import profile


@pytest.fixture
def measured(tmp_path: Path) -> str:
    profile().save(tmp_path / "profile.json")
    return f"--profile={tmp_path / 'profile.json'}"


def simulate(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["simulate", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_drawn_load_and_its_trace(capsys: pytest.CaptureFixture[str], measured: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    load = ("--rate=2", "--duration=10", "--input-tokens=100", "--output-tokens=8")
    drawn = simulate(capsys, measured, *load, f"--write-trace={file}", "--price-per-hour=1")
    assert drawn["figures"]["num_ok"] == drawn["num_requests"] == len(trace.read(file)) > 5
    assert drawn["figures"]["cost"] == pytest.approx(2 * drawn["figures"]["duration_s"] / 3600)
    replayed = simulate(capsys, measured, str(file), "--price-per-hour=1")
    assert replayed["figures"]["ttft_p50_ms"] == pytest.approx(drawn["figures"]["ttft_p50_ms"], rel=0.05)


@pytest.mark.parametrize(("load", "seconds"), [(("--day=0.0001",), 86400), (("--rate=0.05", "--duration=100"), 100)])
def test_workers_are_paid_until_the_end_of_the_load(
    load: tuple[str, ...], seconds: float, capsys: pytest.CaptureFixture[str], measured: str
) -> None:
    found = simulate(capsys, measured, *load)["figures"]
    assert found["duration_s"] == pytest.approx(seconds)
    assert found["decode_worker_hours"] == pytest.approx(seconds / 3600)


def test_requests_that_no_worker_can_hold_fail_with_the_reason(
    capsys: pytest.CaptureFixture[str], measured: str, tmp_path: Path
) -> None:
    """However long they are: their tokens are not counted out."""
    file = tmp_path / "trace.jsonl"
    trace.write(file, [trace.Arrival(0.0, 100, 3), trace.Arrival(1.0, 10**12, 3), trace.Arrival(2.0, 10**13, 3)])
    found = simulate(capsys, measured, str(file))
    assert (found["figures"]["num_ok"], found["figures"]["num_errors"]) == (1, 2)
    assert [*found["errors"].values()] == [1, 1]
    assert main(["simulate", measured, str(file)]) == 0
    assert f"1 x TooLarge: the prompt has {10**13} tokens" in capsys.readouterr().out


def test_a_sweep_names_the_best_split(capsys: pytest.CaptureFixture[str], measured: str) -> None:
    # A prompt takes 0.3 s: on decode workers it disturbs answers, and one prefill worker is not enough.
    load = ("--rate=4", "--duration=8", "--input-tokens=300", "--output-tokens=40")
    flags = (measured, *load, "--slo-ttft-ms=1000", "--slo-tpot-ms=20", "--prefill-overflow=0")
    found = simulate(capsys, *flags, "--sweep=3")
    assert [(split["prefill"], split["decode"]) for split in found["splits"]] == [(0, 3), (1, 2), (2, 1)]
    assert found["best"] == {"prefill": 2, "decode": 1}
    assert main(["simulate", *flags, "--sweep=3"]) == 0
    assert "best: 2 : 1, with" in capsys.readouterr().out


def test_a_split_that_answers_nothing_is_not_the_best() -> None:
    """No split has a good request; one without answers has no time to first token either."""
    none, slow = ({"slo_share": 0.0, "num_ok": num_ok, "ttft_p99_ms": p99_ms} for num_ok, p99_ms in ((0, 0), (4, 900)))
    good = {"slo_share": 0.5, "num_ok": 2, "ttft_p99_ms": 2000.0}
    assert best_split([none, slow]) is slow
    assert best_split([slow, none, good]) is good
    assert best_split([none]) is none


@pytest.mark.parametrize("rule", ["--scale-rule", "--scale-by-advice"])
def test_a_role_without_workers_is_scaled(rule: str, capsys: pytest.CaptureFixture[str], measured: str) -> None:
    load = ("--rate=1", "--duration=300", "--input-tokens=100", "--output-tokens=8")
    found = simulate(capsys, measured, *load, rule, "--prefill=0", "--price-per-hour=1")
    assert found["hours"][-1]["prefill_workers"] > 1
    assert found["figures"]["cost"] > 0


@pytest.mark.parametrize("rule", ["--scale-rule", "--scale-by-advice"])
def test_a_model_on_a_device_is_simulated_at_its_best(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--device=l4", "--dtype=bfloat16", "--rate=1", "--duration=10", rule]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("best case: tandem-small on L4\n")
    assert "hour" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "say which requests come: a TRACE, --rate or --day"),
        (("none.jsonl",), "cannot read none.jsonl"),
        (("none.jsonl", "--rate=1"), "a trace has its own arrivals"),
        (("--rate=1", "--sweep=2", "--scale-rule"), "use either --sweep or a rule that scales"),
        (("--rate=1", "--sweep=2", "--scale-by-advice"), "use either --sweep or a rule that scales"),
        (("--rate=1", "--profile=none.json"), "cannot read none.json"),
        (("--rate=1", "--max-queued-requests=0"), "max_queued_requests must be >= 1"),
        (("--rate=1", "--scale-rule", "--min-workers=9"), "--min-workers 9 is more than --max-workers 8"),
        (("--rate=1", "--sweep=2", "--prefill=0"), "--sweep divides its workers between the roles"),
        (("--rate=1", "--input-tokens=100000"), "--input-tokens 100000 and --output-tokens 64 do not fit: the model"),
    ],
)
def test_wrong_words(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], measured: str) -> None:
    assert main(["simulate", measured, *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_fewest_workers_are_no_more_than_the_most(capsys: pytest.CaptureFixture[str], measured: str) -> None:
    assert main(["simulate", measured, "--rate=1", "--duration=5", "--scale-rule", "--max-workers=1"]) == 0


def test_a_spread_may_be_0_and_not_less(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--rate=1", "--spread=-1"])
    assert "argument --spread: must be >= 0, got -1" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "file"), [("--measure", "."), ("--measure", "none/file"), ("--write-trace", ".")])
def test_a_file_that_cannot_be_written_is_refused_first(
    flag: str, file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--rate=1", "--address=127.0.0.1:1", flag, str(tmp_path / file)])
    assert f"argument {flag}: cannot write {tmp_path / file}" in capsys.readouterr().err


def test_a_busy_mesh_is_a_failure_and_no_wrong_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured_while_busy(_: object) -> None:
        measure.ratio({"alone": [], "beside": []})

    monkeypatch.setattr("tandem_cli.simulate._measure", measured_while_busy)
    assert main(["simulate", "--measure", str(tmp_path / "profile.json")]) == 1
    assert "the mesh is not idle" in capsys.readouterr().err


def test_times_have_one_source(capsys: pytest.CaptureFixture[str], measured: str) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", measured, "--rate=1", "--model=tandem-small"])
    assert "argument --model: not allowed with argument --profile" in capsys.readouterr().err
