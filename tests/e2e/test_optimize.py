"""`tandem optimize` with meshes of its own: interrupted, continued, and what it wrote is served."""

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import tandem
from examples.optimize.questions import lines
from tests.e2e.mesh_process import is_alive

JUDGE = Path(__file__).resolve().parents[2] / "examples" / "optimize" / "judge.py"
_LIMIT_S = 500.0
_RECIPE = """
precisions = ["int8"]
speculation = ["none"]
workers = [{ decode = 1 }]
concurrency = 4
max_prompts = 12
max_quality_loss = 0.5
"""


async def start(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "tandem_cli", *words, stdout=pipe, stderr=pipe)


async def until(stream: asyncio.StreamReader, pattern: str) -> list[str]:
    """The lines up to the first one that matches, which is waited for."""
    found: list[str] = []
    async with asyncio.timeout(_LIMIT_S):
        while line := (await stream.readline()).decode():
            found.append(line)
            if re.search(pattern, line):
                return found
    raise AssertionError(f"no line matches {pattern}: {found}")


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_two_candidates_are_served_for_real(tmp_path: Path) -> None:
    data, recipe, out = tmp_path / "data.jsonl", tmp_path / "recipe.toml", tmp_path / "out"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines(40)))
    recipe.write_text(_RECIPE)
    words = ["optimize", "tandem-small", f"--data={data}", f"--recipe={recipe}", f"--judge={JUDGE}", f"--out={out}"]

    first = await start(*words)
    assert first.stderr is not None
    await until(first.stderr, "^round 1: base, 1 colocated: .* tokens/s")
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(first.communicate(), _LIMIT_S)
    assert first.returncode == 130
    assert "interrupted: the same command goes on where it was" in said.decode()
    assert "Traceback" not in said.decode()
    assert not [child for child in children if is_alive(child)]
    assert "serving.properties" not in [path.name for path in out.iterdir()]

    second = await start(*words, "--json")
    printed, said = await asyncio.wait_for(second.communicate(), _LIMIT_S)
    assert second.returncode == 0, said.decode()
    assert "round 1: base" not in said.decode(), "it was measured before"
    assert "round 1: int8, 1 colocated" in said.decode()
    report = json.loads(printed)
    check_report(report, out)
    await check_served(out, report["chosen"])


def check_report(report: dict[str, Any], out: Path) -> None:
    assert report == json.loads((out / "report.json").read_text())
    by_name = {candidate["name"]: candidate for candidate in report["candidates"]}
    assert set(by_name) == {"base, 1 colocated", "int8, 1 colocated"}
    assert report["chosen"] in by_name
    base, int8 = by_name["base, 1 colocated"], by_name["int8, 1 colocated"]
    assert (base["quality"]["top1_agreement"], base["quality"]["mean_kl"]) == (1.0, 0.0)
    assert 0.8 < int8["quality"]["top1_agreement"] <= 1.0
    assert 0.0 < int8["quality"]["mean_kl"] < 0.1
    assert base["quality"]["score"] > 0.4, "the bundled model answers most questions rightly"
    assert abs(int8["quality"]["score"] - base["quality"]["score"]) < 0.3
    for candidate in by_name.values():
        assert candidate["figures"]["output_tokens_per_s"] > 0
        assert candidate["figures"]["memory_bytes"] > 5e6
        assert candidate["rounds"] >= 3
    assert (out / "plot.svg").read_text().startswith("<svg")
    assert "int8, 1 colocated" in (out / "report.md").read_text()
    assert not (out / "work").exists()


async def check_served(out: Path, chosen: str) -> None:
    mesh = await start("up", str(out), "--port=0", "--no-http", "--set", "decode.kv_cache_bytes=20000000")
    assert mesh.stdout is not None
    try:
        ready = await until(mesh.stdout, "^ready ")
        async with tandem.AsyncClient(ready[-1].split()[1]) as client:
            (worker,) = await client.workers()
            assert worker.role == "decode"
            answer = await client.generate(messages=[{"role": "user", "content": "18 + 97"}], max_new_tokens=40)
            assert answer.text == "18 + 97 = 100 + 15 = 115."
    finally:
        mesh.terminate()
        _, said = await asyncio.wait_for(mesh.communicate(), _LIMIT_S)
    assert ("option.quantize=int8" in said.decode()) is chosen.startswith("int8")


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_auto_finds_something_faster_than_the_base(tmp_path: Path) -> None:
    """With the bundled model: 1.3 times as fast, at most 1 % fewer right answers; ten minutes on a quiet machine."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines(600)))
    process = await start("optimize", "tandem-small", f"--data={data}", f"--judge={JUDGE}", f"--out={out}", "--json")
    printed, said = await asyncio.wait_for(process.communicate(), 1700)
    assert process.returncode == 0, said.decode()
    report = json.loads(printed)
    (chosen,) = (candidate for candidate in report["candidates"] if candidate["chosen"])
    assert report["speedup"] >= 1.3
    assert chosen["quality"]["score"] >= 0.99 * chosen["quality"]["base_score"]
