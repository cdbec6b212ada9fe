"""The documented uses of generation details, with real boto3: each in a process of its own, so that a client that
spins on a line without an end fails by the clock.
"""

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.defects import Repaired
from tests.fakes.sdk_router import STORY, Script
from tests.processes import running_process
from tests.service.gateway.http import RunningGateway, running_gateway

RECIPES = Path(__file__).with_name("lmi_recipes.py")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "http"
PROMPT = "One fine day"
REST = STORY.removeprefix(PROMPT)
LIMIT_S = 60.0

# Settings of the gateway: its own defaults, each of LMI's formats, and the formatter that LMI 0.26 streamed by.
SETTINGS: list[dict[str, Any]] = [
    {},
    *({"lmi_schema": name} for name in ("0.26", "async")),
    {"lmi_schema": "0.26", "output_formatter": "jsonlines"},
]


def names(settings: dict[str, Any]) -> str:
    return " ".join(settings.values()) or "default"


async def run(gateway: RunningGateway, *command: str) -> str:
    """What a program prints that talks to SageMaker, if SageMaker is the gateway."""
    async with running_process(
        sys.executable,
        "-P",  # the folder of a test is no place to import from
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ
        | {
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": gateway.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "TANDEM_NAME": "fake",
        },
    ) as process:
        try:
            async with asyncio.timeout(LIMIT_S):
                out, err = await process.communicate()
        except TimeoutError:
            pytest.fail(f"{command[0]} was not done within {LIMIT_S:g} s")
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("settings", SETTINGS, ids=names)
@pytest.mark.parametrize("logprob", [-0.5, 0.0])
async def test_confidence(settings: dict[str, Any], logprob: float, repaired: Repaired) -> None:
    async with running_gateway(Script(logprob=logprob), **settings) as gateway:
        whole, cut = json.loads(await run(gateway, str(RECIPES), "confidence", PROMPT, "100", "2"))
    assert whole == [REST, pytest.approx(math.exp(logprob)), len(REST.encode()) + 1]
    assert cut == [REST[:2], pytest.approx(math.exp(logprob)), 2], "ended by its length"
    repaired("F1", "confidence: text bound at length and at EOS in rolling, 0.26 and async, log-prob 0.0 too")


@pytest.mark.parametrize("settings", SETTINGS, ids=names)
async def test_chained(settings: dict[str, Any], repaired: Repaired) -> None:
    async with running_gateway(**settings) as gateway:
        [(text, reason, num_requests)] = json.loads(await run(gateway, str(RECIPES), "chained", PROMPT, "7"))
    assert text == STORY
    assert reason == ("stop" if settings.get("lmi_schema") == "async" else "eos_token")
    assert num_requests == 4
    repaired("F1", "chained: 4 requests of 7 tokens make the whole text in every format")


async def test_the_examples(repaired: Repaired) -> None:
    async with running_gateway() as gateway:
        text, confidence = (await run(gateway, str(EXAMPLES / "sagemaker_confidence.py"))).splitlines()
        assert (text, confidence) == (STORY, "confidence 0.61")
        text, ending = (await run(gateway, str(EXAMPLES / "sagemaker_chained.py"))).splitlines()
        assert text == "Once upon a time" + STORY
        assert ending == "2 requests, the last one ended with eos_token"
    repaired("M2", "unchanged client, no `stream` in the body: JSON lines, every one with its end; no spin")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/endpoints/fake/invocations", {"inputs": PROMPT}),
        ("/invocations", {"inputs": PROMPT}),
        ("/invocations", {"inputs": [PROMPT, PROMPT]}),
        ("/invocations", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/invocations", {"prompt": PROMPT}),
        ("/invocations", {"inputs": PROMPT, "stream": True}),
    ],
)
async def test_every_body_ends_its_last_line(route: str, body: dict[str, Any]) -> None:
    async with running_gateway() as gateway:
        response = await gateway.post(route, body)
    assert response.status_code == 200
    assert response.content.endswith(b"\n")
    assert response.headers.get("content-length") in (None, str(len(response.content)))
