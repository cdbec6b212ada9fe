"""`tandem bench` and `tandem breakdown` with meshes of their own: real processes, a real model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_cli.load_test.benchmark import Arm
from tandem_cli.load_test.endpoints import own_endpoint
from tandem_cli.load_test.figures import Outcome, RunFailed
from tandem_cli.load_test.jobs import Lengths, random_jobs
from tandem_cli.load_test.load_generator import LoadGenerator
from tandem_cli.main import main
from tests.warm import forks

__all__ = ["forks"]

MOVED = ("queue", "dispatch", "prefill", "decode")


def test_it_starts_a_mesh_measures_and_stops_it(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    load = (
        "--concurrency",
        "2",
        "--num-requests",
        "4",
        "--repeats",
        "1",
        "--input-tokens",
        "20",
        "--output-tokens",
        "5",
    )
    command = (sys.executable, "-m", "tandem_cli", "bench", "--up=--decode 1", *load, f"--json={file}")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stderr
    assert "4 / 0 / 0" in ended.stdout
    content = json.loads(file.read_text())
    served = content["settings"]["endpoints"]["mesh"]
    assert (served["model"], served["up"]) == ("tandem-small", ["--decode", "1"])
    assert sorted(worker["role"] for worker in served["workers"]) == ["decode", "prefill"]
    (run,) = content["points"][0]["runs"]
    assert [len(record["token_s"]) for record in run["records"]] == [5] * 4


async def test_workers_that_keep_a_pace_serve_as_a_mesh() -> None:
    async with own_endpoint(Arm("paced", ("--decode=2",), pace="1,0")) as endpoint:
        run = await LoadGenerator(endpoint.target).closed_loop(random_jobs(Lengths(20, 5, 200), 6, 0), 3)
    assert len(run.of(Outcome.OK)) == 6, run.errors()
    assert len(endpoint.about["workers"]) == 3


async def test_a_mesh_that_does_not_start_says_why() -> None:
    with pytest.raises(RunFailed, match="there is no model folder /nowhere"):
        async with own_endpoint(Arm("none", ("--model=/nowhere",))):
            pass


def test_phases_of_a_real_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    # Prompts longer than what a decode worker prefills by itself.
    flags = ("--requests", "3", "--concurrency", "1", "--input-tokens", "200", "--output-tokens", "4")
    assert main(["breakdown", "--up=--prefill-threshold=16", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(found["phases"][name]["p50_ms"] > 0 for name in MOVED)
    for request in found["requests"]:
        steps = dict(request["steps"])
        assert sum(steps.values()) == pytest.approx(request["total_ms"], rel=1e-3)
        # The decode worker may be heard before the prefill worker is: then no step of the request is the transfer.
        assert request["kv_transfer_ms"] > 0
        assert 0 < request["first_token_ms"] < request["total_ms"]


def test_a_mesh_that_cannot_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["breakdown", "--up=--model=/nowhere"]) == 2
    captured = capsys.readouterr()
    assert "the mesh did not start: tandem: there is no model folder /nowhere" in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
