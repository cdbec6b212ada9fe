"""The examples for HTTP clients against the bundled model, as they are; the gateway's answers against the SDK's."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
from pathlib import Path

import httpx2
import pytest

import tandem
from tests.e2e.mesh_process import MeshProcess, mesh, pools_are_whole
from tests.exposition import documented, fetch, names_of
from tests.fakes.otlp_collector import Collector, running_collector
from tests.processes import running_process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "http"
NUM_PAYLOADS = 400
MESSAGES = [{"role": "user", "content": "What is 27 + 45?"}]


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first: int = probes[0].getsockname()[1]
            for offset, probe in enumerate(probes[1:], start=1):
                probe.bind(("127.0.0.1", first + offset))
            return first


METRICS_PORT = free_ports(3)
LOOP_METRICS = {"tandem_event_loop_lag_seconds", "tandem_event_loop_stop_seconds"}


def as_sagemaker(url: str) -> dict[str, str]:
    """The environment in which boto3 takes the gateway for SageMaker."""
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
    }


async def run_example(running: MeshProcess, name: str, *arguments: str) -> str:
    return await run(running, str(EXAMPLES / f"{name}.py"), *arguments)


async def run(running: MeshProcess, *command: str) -> str:
    """The output of a Python program. AssertionError if it fails."""
    async with running_process(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"TANDEM_HTTP": running.http, "HF_HUB_OFFLINE": "0"} | as_sagemaker(running.http),
    ) as process:
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_examples_run_and_http_answers_as_grpc_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    async with (
        running_collector() as collector,
        mesh(
            "tandem-small",
            tmp_path,
            "--http-port=0",
            f"--metrics-port={METRICS_PORT}",
            f"--otlp-endpoint={collector.address}",
        ) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        await check_examples(running)
        await check_grpc_examples(running)
        await check_documented_calls(running)
        await check_same_answers(running, client)
        await check_stop_strings(running)
        await check_many_payloads(running)
        await check_figures(running)
        await check_one_trace(running, collector)
        await pools_are_whole(client)


async def check_examples(running: MeshProcess) -> None:
    chat = await run_example(running, "openai_chat")
    assert "72" in "".join(re.findall(r"^'(.*?)' ", chat, re.MULTILINE))
    assert re.search(r"\d+ \+ \d+ tokens$", chat.strip())
    hub = await run_example(running, "hub_generate")
    assert "length after 12 tokens" in hub
    assert "42" in hub
    whole, streamed = (await run_example(running, "sagemaker_invoke")).splitlines()[:2]
    assert whole == f"{streamed!r}: length"
    sure = await run_example(running, "sagemaker_confidence")
    assert re.search(r"^confidence (0\.\d\d|1\.00)$", sure, re.MULTILINE)
    assert re.search(r"^\d+ requests, the last one ended with", await run_example(running, "sagemaker_chained"), re.M)
    text, ending = (await run_example(running, "lmi_lines")).splitlines()
    assert text == streamed
    confidence = re.fullmatch(r"length, confidence (0\.\d\d|1\.00)", ending)
    assert confidence


async def check_grpc_examples(running: MeshProcess) -> None:
    """As they stand there but for the port."""
    assert "confidence" in await run_grpc_example(running, "quickstart")
    assert "Paris" in await run_grpc_example(running, "sync_quickstart")
    assert len((await run_grpc_example(running, "stream_confidence")).splitlines()) >= 3
    assert "40 payloads from 8 threads" in await run_grpc_example(running, "many_prompts", "40", "8")


async def run_grpc_example(running: MeshProcess, name: str, *arguments: str) -> str:
    source = (EXAMPLES.parent / f"{name}.py").read_text()
    assert "127.0.0.1:50051" in source
    return await run(running, "-c", source.replace("127.0.0.1:50051", running.address), *arguments)


async def check_documented_calls(running: MeshProcess) -> None:
    """Every curl of docs/http.md, as it stands there but for the port."""
    blocks = re.findall(r"```sh\n(curl .*?)```", (ROOT / "docs" / "http.md").read_text(), re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        command = block.replace("http://127.0.0.1:8080", running.http).replace("curl -s", "curl --fail-with-body -s")
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, (block, out, err)
        assert b"error" not in out.replace(b'"error":null', b"")
        lines = [line for line in out.decode().splitlines() if line not in {"", "data: [DONE]"} and line[0] != ":"]
        assert json.loads(lines[-1].removeprefix("data: ")), block


async def check_same_answers(running: MeshProcess, client: tandem.AsyncClient) -> None:
    """Text, log-probs and counts of every dialect are the SDK's; chained requests give what one long one gives."""
    expected = await client.generate(messages=MESSAGES, max_new_tokens=60)
    async with httpx2.AsyncClient(base_url=running.http, timeout=60) as http:
        body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "logprobs": True}
        chat = (await http.post("/v1/chat/completions", json=body)).json()
        choice = chat["choices"][0]
        assert choice["message"]["content"] == expected.text
        shown = [token.logprob for token in expected.tokens if not token.special]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(shown, abs=1e-4)
        assert chat["usage"]["completion_tokens"] == expected.usage.completion_tokens
        table = [{"role": "user", "content": "Write the times table of 12."}]
        whole = await http.post("/v1/chat/completions", json=body | {"messages": table, "max_tokens": 300})
    chained, ending = (await run_example(running, "chained")).strip().rsplit("\n", 1)
    assert chained == whole.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(r"\d+ requests, the last one ended with stop", ending)


async def check_stop_strings(running: MeshProcess) -> None:
    """TGI leaves the stop string in the text, OpenAI does not."""
    async with httpx2.AsyncClient(base_url=running.http, timeout=60) as http:
        parameters = {"stop": [" named"], "max_new_tokens": 12, "details": True}
        tgi = (await http.post("/generate", json={"inputs": "Once upon a time", "parameters": parameters})).json()
        body = {"prompt": "Once upon a time", "stop": " named", "max_tokens": 12, "temperature": 0}
        openai = (await http.post("/v1/completions", json=body)).json()
    assert tgi["details"]["finish_reason"] == "stop_sequence"
    assert tgi["generated_text"] == openai["choices"][0]["text"] + " named"


async def check_many_payloads(running: MeshProcess) -> None:
    """Over 128 threads; two tokens each, because this is no benchmark."""
    said = await run_example(running, "many_payloads", str(NUM_PAYLOADS), "128", "2")
    assert f"{NUM_PAYLOADS} payloads from 128 threads" in said


async def check_figures(running: MeshProcess) -> None:
    """Router, prefill and decode worker tell theirs on ports in a row; all of it is documented."""
    for index, service in enumerate(("Router", "Workers", "Workers")):
        samples = await fetch(f"http://127.0.0.1:{METRICS_PORT + index}/metrics")
        assert names_of(samples) - documented(service).keys() == LOOP_METRICS
        generated = [value for (name, _), value in samples.items() if name.endswith("generation_tokens_total")]
        assert sum(generated) >= NUM_PAYLOADS, "two tokens for each payload; a prefill worker makes the first of them"
    assert names_of(await fetch(f"{running.http}/metrics")) - documented("Gateway").keys() <= LOOP_METRICS


async def check_one_trace(running: MeshProcess, collector: Collector) -> None:
    """A trace that a client's header begins goes through all four services, and the logs name it."""
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{caller}-01", "x-request-id": "traced-one"}
    async with httpx2.AsyncClient(base_url=running.http, timeout=60) as http:
        body = {"prompt": "Once upon a time in a far land", "max_tokens": 4}
        assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    phases = {("tandem-router", name) for name in ("generate", "queue", "prefill", "transfer", "decode")}
    workers = {(f"tandem-{role}-worker", name) for role in ("prefill", "decode") for name in (role, "transfer")}
    spans = await collector.wait_for(trace_id, phases | workers | {("tandem-gateway", "POST /v1/completions")})
    known = {span.span_id for span in spans}
    assert [span.name for span in spans if span.parent_id not in known] == ["POST /v1/completions"]
    assert {span.parent_id for span in spans} - known == {caller}
    logged = [
        json.loads(line) for line in (running.log_dir / "router.log").read_text().splitlines() if trace_id in line
    ]
    assert [line["client_request_id"] for line in logged if line["event"] == "finished"] == ["traced-one"]
