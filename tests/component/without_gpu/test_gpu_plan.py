"""The plan of `make test-gpu`, with the CPU as the device: a mistake in it must not cost time on a GPU."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu import plan
from tests.gpu.stages import STAGES
from tests.gpu.table import BEGIN, END, NOTHING, render, write_table

PAGE = f"# GPUs\n{BEGIN}\nold\n{END}\nmore\n"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_stage_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "results.json", tmp_path / "gpu.md"
    page.write_text(PAGE)
    arguments = ["--device", "cpu", "--cap", "0", "--results", str(results), "--docs", str(page)]
    status = plan.main(arguments)
    said = capfd.readouterr().out
    assert status == 0, said
    found = json.loads(results.read_text())
    assert list(found["stages"]) == [stage.name for stage in plan.PLAN] == list(STAGES)
    assert all(outcome["figures"] for outcome in found["stages"].values())
    text = page.read_text()
    assert text.startswith(f"# GPUs\n{BEGIN}\nOn cpu ")
    assert text.endswith(f"{END}\nmore\n")
    assert all(f"| {name} | passed | " in text for name in STAGES)
    assert plan.main(arguments) == 0
    assert capfd.readouterr().out == "", "stages that have passed ran again"


def test_a_stage_that_fails_or_hangs_is_noted_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = (plan.Stage("nonsense", 0, 60), plan.Stage("attention", 0, 0.01), plan.Stage("copies", 0, 60))
    monkeypatch.setattr(plan, "PLAN", stages)
    results = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--results", str(results)]
    assert plan.main(arguments) == 1
    found = json.loads(results.read_text())["stages"]
    assert [outcome["status"] for outcome in found.values()] == ["failed", "killed after 0.01 s", "passed"]
    assert "KeyError: 'nonsense'" in found["nonsense"]["error"]
    # The next run does what is missing.
    monkeypatch.setattr(plan, "PLAN", (plan.Stage("attention", 0, 60), stages[2]))
    capfd.readouterr()
    plan.main(arguments)
    assert [line.split(":")[0] for line in capfd.readouterr().out.splitlines()] == ["attention"]


def test_results_of_other_code_or_machines_are_not_kept(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    found = plan._start(results, "cpu") | {"stages": {"facts": {"status": "passed"}}}
    results.write_text(json.dumps(found))
    assert plan._start(results, "cpu") == found
    results.write_text(json.dumps(found | {"code": "other"}))
    assert plan._start(results, "cpu")["stages"] == {}


def test_it_takes_less_than_ten_minutes() -> None:
    assert sum(stage.limit_s for stage in plan.PLAN) < 600
    assert all(stage.work_s < stage.limit_s for stage in plan.PLAN)


def test_arguments_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--device", "cuda"], "torch finds no CUDA device"), (["facs"], "no such stage: facs")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            plan.main(arguments)
        assert words in capsys.readouterr().err


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    """Neither was changed by hand."""
    found = json.loads(plan.RESULTS.read_text()) if plan.RESULTS.exists() else None
    assert f"{BEGIN}\n{render(found)}\n{END}" in (plan.ROOT / "docs/gpu.md").read_text()
    page = tmp_path / "gpu.md"
    page.write_text(PAGE)
    write_table(page, None)
    assert page.read_text() == f"# GPUs\n{BEGIN}\n{NOTHING}\n{END}\nmore\n"
