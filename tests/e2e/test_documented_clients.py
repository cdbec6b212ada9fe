"""LMI's documented clients against a mesh that LMI's documented configuration has started."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

import tandem
from tests.defects import Repaired
from tests.e2e.mesh_process import mesh, pools_are_whole
from tests.e2e.test_http import as_sagemaker

RECIPES = Path(__file__).resolve().parents[1] / "service" / "gateway" / "lmi_recipes.py"
# Nothing about formats, and one request at a time: minimum latency as it is documented.
PROPERTIES = """engine=MPI
option.model_id=tandem-small
option.rolling_batch=lmi-dist
option.max_rolling_batch_size=32
"""
PROMPT = "Explain how Tandem works."
LIMIT_S = 120.0


async def recipe(url: str, name: str, prompt: str, max_new_tokens: int) -> Any:
    """The result of a recipe. AssertionError if it fails or spins."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(RECIPES), name, prompt, str(max_new_tokens)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | as_sagemaker(url) | {"TANDEM_NAME": "tandem-small"},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        pytest.fail(f"{name} was not done within {LIMIT_S:g} s")
    assert process.returncode == 0, err.decode()
    [found] = json.loads(out)
    return found


@pytest.mark.soak
@pytest.mark.timeout(500)
async def test_recipes_and_lists_under_the_documented_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    file = tmp_path / "serving.properties"
    file.write_text(PROPERTIES)
    monkeypatch.setenv("MAX_CONCURRENT_REQUESTS", "1")
    flags = (f"--serving-properties={file}", "--http-port=0")
    async with mesh("tandem-small", tmp_path, *flags) as running, tandem.AsyncClient(running.address) as client:
        whole = await client.generate(prompt=PROMPT, max_new_tokens=48)
        text, score, count = await recipe(running.http, "confidence", PROMPT, 48)
        assert text == whole.text
        assert count == len(whole.tokens)
        assert score == pytest.approx(whole.confidence, abs=1e-3)
        cut, _, count = await recipe(running.http, "confidence", PROMPT, 5)
        assert (cut, count) == ("".join(token.text for token in whole.tokens[:5]), 5)
        chained, reason, num_requests = await recipe(running.http, "chained", PROMPT, 3)
        assert chained.startswith(PROMPT)
        assert (reason, num_requests > 1) == ("eos_token", True)
        await lists(running.http)
        await forced_calls(running.http)
        await pools_are_whole(client)
    repaired("M2", f"serving.properties as documented: both recipes end, {num_requests} chained requests")
    repaired("M4", "MAX_CONCURRENT_REQUESTS=1: a list of two, and one of six, answered")
    repaired("F11", "the bundled model: a forced call is complete within 60 tokens")


async def lists(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        for count in (2, 6):
            inputs = [f"{number} + 1 =" for number in range(count)]
            response = await http.post("/invocations", json={"inputs": inputs, "parameters": {"max_new_tokens": 4}})
            assert response.status_code == 200, response.text
            assert len(response.json()) == count


async def forced_calls(url: str) -> None:
    """Force calls from a weak model, within as few tokens as an application allows."""
    number = {"type": "integer", "minimum": 0, "maximum": 999}
    parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "What is 27 + 45?"}], "tools": tools, "max_tokens": 60}
    body["parallel_tool_calls"] = False
    async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            answer = (
                await http.post("/v1/chat/completions", json=body | {"tool_choice": choice, "temperature": 0})
            ).json()
            [made] = answer["choices"]
            assert made["finish_reason"] == "tool_calls", answer
            for call in made["message"]["tool_calls"]:
                assert json.loads(call["function"]["arguments"]).keys() == {"a", "b"}
        cut = (await http.post("/v1/chat/completions", json=body | {"tool_choice": "required", "max_tokens": 4})).json()
        assert not cut["choices"][0]["message"]["content"]
