"""TGI's own client, unmodified. Its environment is made once and kept in the user's cache, or the test is skipped."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.fakes.sdk_router import Refusal
from tests.service.gateway.http import running_gateway

_PACKAGE = "text-generation==0.7.0"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem-tests"
_CLIENT = Path(__file__).with_name("text_generation_client.py")


@pytest.fixture(scope="session")
def python_with_client() -> str:
    """An interpreter that has the package."""
    folder = _CACHE / f"{_PACKAGE}-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if (
        subprocess.run([python, "-c", "import text_generation"], capture_output=True).returncode
        if python.exists()
        else 1
    ):
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
            pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", _PACKAGE]
            subprocess.run(pip, check=True, capture_output=True, timeout=200)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no environment with {_PACKAGE}: {error}")
    return str(python)


@pytest.mark.timeout(300)
async def test_the_text_generation_client(python_with_client: str) -> None:
    async with running_gateway() as gateway:
        ok = Refusal(grpc.StatusCode.OK, after_messages=1000)
        overloaded = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, trailing=(("tandem-error", "Overloaded"),))
        broken = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too many tokens", (("tandem-error", "InvalidRequest"),))
        gateway.script.refusals.extend([ok, ok, broken, overloaded])
        process = await asyncio.create_subprocess_exec(
            python_with_client,
            "-P",  # this folder has an http.py
            str(_CLIENT),
            gateway.url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    assert told["text"] == "".join(told["tokens"]) == "".join(told["streamed"]) == told["last"]
    assert (told["finish_reason"], told["generated_tokens"], len(told["streamed"])) == ("length", 6, 6)
    assert told["prefill"] > 0
    assert told["errors"] == ["ValidationError", "OverloadedError"]
