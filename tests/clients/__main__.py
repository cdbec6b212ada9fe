"""Other people's clients against a gateway, as a table: what each was asked and answered.

    python -m tests.clients                     all: each is installed once, which takes minutes
    python -m tests.clients openai anthropic    these

The model is the fake one of the SDK's tests: it tells a story, or calls a function. The status is 1 if a client failed
where it should not.
"""

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import structlog
from rich.console import Console
from rich.table import Table

from mesh.interrupts import run_async, run_program
from tests.client_environment import output_of, python_with
from tests.clients.npm import AGENTS, LIBRARIES, Answers, ask_agent, ask_library
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import running_gateway

CLIENTS = {
    "openai": "openai",
    "anthropic": "anthropic==2.12.0",
    "litellm": "litellm",
    "langchain-openai": "langchain-openai",
    "langchain-anthropic": "langchain-anthropic",
    "llama-index": "llama-index-llms-openai-like",
    "huggingface_hub": "huggingface_hub",
    "text-generation": "text-generation==0.7.0",
    "boto3": "boto3",
    # The last one without torch, whose CUDA libraries take gigabytes.
    "guidellm": "guidellm==0.3.1",
    "openai-agents": "openai-agents",
    "pydantic-ai": "pydantic-ai-slim[openai]",
    "instructor": "instructor",
    "smolagents": "smolagents[openai]",
    "aider": "aider-chat",
}
"""Packages, with what pip is asked for: the versions of the tests, else the newest."""

FRAMEWORKS = {
    "lm-eval": "lm-eval[api]",
    "inspect-ai": "inspect-ai",
    "dspy": "dspy",
    "haystack": "haystack-ai",
    "langgraph": "langgraph",
    "autogen": "autogen-ext[openai]",
    "agent-framework": "agent-framework-openai",
    "semantic-kernel": "semantic-kernel",
}
"""The same of those that `framework_asks.py` asks."""

MORE = {
    "strands": "strands-agents[openai]",
    "crewai": "crewai",
    "agno": "agno",
    "google-adk": "google-adk",
    "outlines": "outlines",
    "guardrails": "guardrails-ai",
    "magentic": "magentic",
    "deepeval": "deepeval",
}
"""The same of those that `agent_asks.py` asks."""

_MODULES = {"openai-agents": "agents", "autogen": "autogen_agentchat", "google-adk": "google.adk"}
"""Where the module is not called as its package."""

_OTHERS: Mapping[str, tuple[str, ...]] = {
    "lm-eval": ("transformers",),
    "inspect-ai": ("openai",),
    "langgraph": ("langchain", "langchain-openai"),
    "autogen": ("autogen-agentchat",),
    "agno": ("openai",),
    "google-adk": ("litellm",),
    "outlines": ("openai",),
}
"""Packages that come along."""

_REFUSED = {("openai", "embeddings")}
_CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
_FOLDER = Path(__file__).parent
_PROGRAMS = (("asks.py", CLIENTS), ("framework_asks.py", FRAMEWORKS), ("agent_asks.py", MORE))


async def fill(table: Table, names: Sequence[str]) -> bool:
    """Add the rows of the clients. True if each answered, or was refused, as it should."""
    is_right = True
    calling = Script(call=_CALL, tool_call_format="hermes")
    with TemporaryDirectory(prefix="tandem-clients-") as folder:
        async with running_gateway(batch_folder=folder) as story, running_gateway(calling) as calls:
            for name in names:
                is_right = await _ask(table, name, story.url, calls.url) and is_right
    return is_right


async def _ask(table: Table, name: str, url: str, calls_url: str) -> bool:
    try:
        version, answers = await _answers(name, url, calls_url)
    except (pytest.skip.Exception, pytest.fail.Exception, OSError, subprocess.SubprocessError) as error:
        table.add_row(name, "", "not installed", str(error))
        return True
    is_right = True
    for what, is_answered, answer in answers:
        is_expected = is_answered != ((name, what) in _REFUSED)
        is_right = is_right and is_expected
        table.add_row(name, version, what, ("" if is_expected else "WRONG: ") + answer)
    return is_right


async def _answers(name: str, url: str, calls_url: str) -> tuple[str, Answers]:
    """The client's version, and what it was asked and answered. Raises what its installation raises."""
    if name in LIBRARIES:
        return await ask_library(name, url, calls_url)
    if name in AGENTS:
        return await ask_agent(name)
    module = _MODULES.get(name, name.replace("-", "_"))
    ((program, requirement),) = ((file, clients[name]) for file, clients in _PROGRAMS if name in clients)
    python = await asyncio.to_thread(python_with, requirement, module, *_OTHERS.get(name, ()))
    distribution = re.split(r"[\[=]", requirement)[0]
    told = json.loads(await output_of(python, _FOLDER / program, name, distribution, url, calls_url))
    return told["version"], told["answers"]


def main(names: Sequence[str]) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    table = Table("client", "version", "asked", "answered")
    is_right = run_async(fill(table, names or (*CLIENTS, *FRAMEWORKS, *MORE, *LIBRARIES, *AGENTS)))
    Console(width=150).print(table)
    return 0 if is_right else 1


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
