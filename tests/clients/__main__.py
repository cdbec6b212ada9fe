"""Other people's clients against a gateway, as a table: what each was asked and answered.

    python -m tests.clients                     all: each is installed once, which takes minutes
    python -m tests.clients openai anthropic    these

The model is the fake one of the SDK's tests: it tells a story, or calls a function. The status is 1 if a client failed
where it should not.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog
from rich.console import Console
from rich.table import Table

from tests.client_environment import output_of, python_with
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import running_gateway

CLIENTS = {
    "openai": "openai",
    "anthropic": "anthropic==2.12.0",
    "litellm": "litellm",
    "langchain-openai": "langchain-openai",
    "langchain-anthropic": "langchain-anthropic",
    "huggingface_hub": "huggingface_hub",
    "text-generation": "text-generation==0.7.0",
    "boto3": "boto3",
}
"""Packages, with what pip is asked for: the versions of the tests, else the newest."""

_REFUSED = {("openai", "embeddings")}
_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
_ASKS = Path(__file__).with_name("asks.py")


async def fill(table: Table, names: Sequence[str]) -> bool:
    """Add the rows of the clients. True if each answered, or was refused, as it should."""
    is_right = True
    async with running_gateway() as story, running_gateway(Script(story=_CALL, tool_call_format="hermes")) as calls:
        for name in names:
            try:
                python = await asyncio.to_thread(python_with, CLIENTS[name], name.replace("-", "_"))
            except (pytest.skip.Exception, pytest.fail.Exception) as error:
                table.add_row(name, "", "not installed", str(error))
                continue
            told = json.loads(await output_of(python, _ASKS, name, story.url, calls.url))
            for what, is_answered, answer in told["answers"]:
                is_expected = is_answered != ((name, what) in _REFUSED)
                is_right = is_right and is_expected
                mark = "" if is_expected else "WRONG: "
                table.add_row(name, told["version"], what, mark + answer)
    return is_right


def main(names: Sequence[str]) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    table = Table("client", "version", "asked", "answered")
    is_right = asyncio.run(fill(table, names or tuple(CLIENTS)))
    Console(width=150).print(table)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
