"""What SageMaker's platform does with a container, done with the program that the image starts (deploy/sagemaker)."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import boto3
import httpx2
import psutil
import pytest

from tests.e2e.mesh_process import START_S, STOP_S, is_alive

SERVE = Path(__file__).resolve().parents[2] / "deploy" / "sagemaker" / "serve"
PROPERTIES = """option.max_rolling_batch_size=3
option.max_model_len=256
"""
PAYLOAD = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 6, "details": True}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(model: Path, log_dir: Path, variables: Mapping[str, str]) -> AsyncIterator[str]:
    """Start `serve`; yields the URL once it answers pings. At the end SIGTERM must end all of it."""
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    environ |= {"SM_MODEL_DIR": str(model), "SAGEMAKER_BIND_TO_PORT": str(port), "TANDEM_HTTP_HOST": "127.0.0.1"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    flags = ("--port=0", f"--log-dir={log_dir}")
    with (log_dir.parent / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(SERVE, *flags, env=environ | variables, stdout=log, stderr=log)
    try:
        await answers_pings(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), STOP_S)
        assert [child for child in children if is_alive(child)] == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answers_pings(url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_S), httpx2.AsyncClient(base_url=url, trust_env=False) as http:
        while True:
            assert process.returncode is None
            try:
                if (await http.get("/ping")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.2)


def invoke(url: str) -> tuple[str, str]:
    """The answer of invoke_endpoint, and the text of the streamed one."""
    runtime = boto3.client(
        "sagemaker-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )
    name = json.loads(httpx2.get(f"{url}/v1/models", trust_env=False).read())["data"][0]["id"]
    call = {"EndpointName": name, "ContentType": "application/json"}
    whole = json.loads(runtime.invoke_endpoint(**call, Body=json.dumps(PAYLOAD))["Body"].read())
    streamed = runtime.invoke_endpoint_with_response_stream(**call, Body=json.dumps(PAYLOAD | {"stream": True}))
    body = b"".join(event["PayloadPart"]["Bytes"] for event in streamed["Body"])
    texts = [json.loads(line)["token"]["text"] for line in body.splitlines()]
    return str(whole["generated_text"]), "".join(texts)


@pytest.mark.timeout(400)
async def test_serve_answers_as_a_container_of_sagemaker(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama-tied"), model)
    (model / "serving.properties").write_text(PROPERTIES)
    async with serving(
        model, tmp_path / "logs", {"OPTION_MAX_ROLLING_BATCH_SIZE": "9", "HF_MODEL_ID": str(model)}
    ) as url:
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
            plain = (await http.post("/invocations", json=PAYLOAD)).json()
        whole, streamed = await asyncio.to_thread(invoke, url)
        assert whole == streamed == plain["generated_text"]
    said = (tmp_path / "serve.log").read_text()
    assert "option.max_rolling_batch_size=3 (serving.properties)" in said, "the file wins over variables"
