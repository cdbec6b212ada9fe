"""`tandem breakdown` with a mesh of its own: real processes, a real model."""

import json

import pytest

from tandem_cli.main import main

MOVED = ("queue", "dispatch", "prefill", "decode")


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
