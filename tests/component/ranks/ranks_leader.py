"""A worker with ranks, in a process of its own, for tests that end ranks or the leader at a certain point.

    python -m tests.component.ranks.ranks_leader MODEL_DIR steps 2x2       # 2 stages of 2 ranks
    python -m tests.component.ranks.ranks_leader MODEL_DIR first-step      # 2 ranks; rank 1 is killed before it
    python -m tests.component.ranks.ranks_leader MODEL_DIR refused PATH    # 2 ranks; rank 1 loads from PATH instead

    python -m tests.component.ranks.ranks_leader MODEL_DIR timeout         # 2 ranks; the leader waits for ever

With `steps` it announces "loaded", and computes one step for each line on its standard input.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from decode_worker.__main__ import serve
from decode_worker.settings import DecodeSettings
from engine.ranks.launch import RankProcesses, RankSetup
from engine.ranks.rank import Rank
from engine.runner_settings import RunnerSettings
from mesh.logs import configure_logging
from mesh.process import ServiceProgram, tell_parent
from tests.component.driving import Driver
from tests.fakes.requests import make_request
from worker.load_engine import load_runner_with_ranks

PROMPT = [1, 2, 3, 4, 5]


def main() -> int:
    model_dir, action = sys.argv[1:3]
    if action in ("refused", "timeout"):
        flags = ["--model", model_dir, "--registry-address", "127.0.0.1:1", "--tensor-parallel", "2"]
        if action == "refused":
            _let_ranks_load(Path(sys.argv[3]))
        else:
            _wait_for_ever()
            flags += ["--model-loading-timeout", "1"]
        return ServiceProgram("decode_worker", DecodeSettings, serve).main([*flags, "--kv-cache-bytes", "1000000"])
    configure_logging("leader")
    if action == "first-step":
        _kill_rank_before_first_step()
    _run_steps(model_dir, *map(int, sys.argv[3].split("x") if action == "steps" else (2, 1)))
    return 0


def _run_steps(model_dir: str, tensor: int, pipeline: int) -> None:
    settings = RunnerSettings(Path(model_dir), num_blocks=8, max_batch_tokens=64)
    driver = Driver(load_runner_with_ranks(replace(settings, tensor_parallel=tensor, pipeline_parallel=pipeline)))
    run = driver.add(make_request("0", PROMPT, max_new_tokens=100))
    driver.step((run, len(PROMPT)))
    tell_parent("loaded")
    for _ in sys.stdin:
        driver.step((run, 1))


def _let_ranks_load(model_dir: Path) -> None:
    send: Any = RankSetup.send

    def send_other(self: RankSetup, *arguments: Any) -> None:
        send(replace(self, settings=replace(self.settings, model_dir=model_dir)), *arguments)

    RankSetup.send = send_other  # type: ignore[method-assign]


def _wait_for_ever() -> None:
    RankProcesses.wait = lambda *_: time.sleep(3600)  # type: ignore[method-assign]


def _kill_rank_before_first_step() -> None:
    lead: Any = Rank.lead

    def kill_and_lead(self: Rank, *arguments: Any) -> Any:
        children = psutil.Process().children()  # the fork server of the tests is one, too
        next(child for child in children if "rank_worker" in " ".join(child.cmdline())).kill()
        return lead(self, *arguments)

    Rank.lead = kill_and_lead  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
