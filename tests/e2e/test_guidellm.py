"""A benchmark that others wrote, unmodified, against the OpenAI API of a real mesh."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from router.text.tokenizer import Tokenizer
from tests.client_environment import python_with
from tests.e2e.mesh_process import mesh
from tests.processes import running_process

# The last one without torch, whose CUDA libraries take gigabytes.
PACKAGE = "guidellm==0.3.1"
MODEL = Path(__file__).parents[2] / "demo_model" / "tandem-small"
NUM_REQUESTS = 20
OUTPUT_TOKENS = 32

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def python_with_guidellm() -> str:
    return python_with(PACKAGE, "guidellm")


async def benchmark(python: str, url: str, report: Path) -> None:
    """Four streams of requests with made-up prompts; AssertionError if it fails."""
    what = f"--rate-type concurrent --rate 4 --max-requests {NUM_REQUESTS}"
    data = f"--data prompt_tokens=64,output_tokens={OUTPUT_TOKENS} --disable-progress --disable-console-outputs"
    files = ["--processor", str(MODEL), "--output-path", str(report)]
    command = ["-P", "-m", "guidellm", "benchmark", "run", "--target", url, *what.split(), *data.split(), *files]
    async with running_process(
        python,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Its worker processes and the mesh share the machine's cores.
        env=os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
    ) as process:
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()


def check_figures(report: Path) -> None:
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert found["request_totals"] == totals
    tokenizer = Tokenizer.load(MODEL, frozenset())
    for request in found["requests"]["successful"]:  # its counts are those of the answers' `usage`
        assert request["prompt_tokens"] == len(tokenizer.encode(request["prompt"], add_special_tokens=True))
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["output"]


async def test_guidellm_finishes_and_counts_as_the_mesh_does(python_with_guidellm: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    async with mesh("tandem-small", tmp_path, "--http-port=0") as running:
        await benchmark(python_with_guidellm, running.http, report)
    check_figures(report)
