"""What SageMaker's platform does with the image: `docker run IMAGE serve`, a model in /opt/ml/model, boto3, SIGTERM."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import httpx2
import pytest

from tests.compose.engine import READY_S, ROOT, docker, free_port
from tests.fakes.file_servers import HubServer, S3Server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

MODEL = ROOT / "demo_model" / "tandem-small"
PAYLOAD = {"inputs": "The opposite of hot is", "parameters": {"max_new_tokens": 12, "details": True}}
STOP_S = 30
"""What SageMaker gives a container between SIGTERM and SIGKILL."""
CONFINED = ("--read-only", "--tmpfs=/tmp", "--volume=/var/cache/tandem", "--cap-drop=ALL")
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Container:
    """A container of the image, and where it serves. It is removed at the end, so a test asks for its log before."""

    name: str
    url: str

    @property
    def log(self) -> str:
        command = ("docker", "logs", self.name)
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout

    def exit_status(self) -> int:
        """Once it has ended."""
        return int(docker("wait", self.name))

    def stop(self) -> float:
        """SIGTERM; returns the seconds until its end."""
        begun_s = time.monotonic()
        docker("stop", f"--time={STOP_S}", self.name)
        return time.monotonic() - begun_s

    async def pings(self) -> None:
        """Return when /ping answers 200."""
        async with asyncio.timeout(READY_S), httpx2.AsyncClient(base_url=self.url, trust_env=False) as http:
            while True:
                assert docker("inspect", "--format={{.State.Running}}", self.name).strip() == "true", self.log
                try:
                    if (await http.get("/ping")).status_code == 200:
                        return
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.5)


@contextmanager
def serving(image: str, *options: str, variables: Mapping[str, str] | None = None) -> Iterator[Container]:
    """Start `docker run IMAGE serve` as SageMaker does: without an init, with port 8080 published."""
    environ = [f"--env={name}={value}" for name, value in (variables or {}).items()]
    port = free_port()
    name = docker("run", "--detach", f"--publish=127.0.0.1:{port}:8080", *environ, *options, image, "serve").strip()
    try:
        yield Container(name, f"http://127.0.0.1:{port}")
    finally:
        docker("rm", "--force", "--volumes", name)


def invoke(url: str, model: str) -> tuple[str, str]:
    """The answer of invoke_endpoint, and the text of the streamed one."""
    runtime = boto3.client(
        "sagemaker-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )
    call = {"EndpointName": model, "ContentType": "application/json"}
    whole = json.loads(runtime.invoke_endpoint(**call, Body=json.dumps(PAYLOAD))["Body"].read())
    streamed = runtime.invoke_endpoint_with_response_stream(**call, Body=json.dumps(PAYLOAD | {"stream": True}))
    parts = [event["PayloadPart"]["Bytes"] for event in streamed["Body"]]
    assert len(parts) > 1, "the answer came in one part"
    texts = [json.loads(line)["token"]["text"] for line in b"".join(parts).splitlines()]
    return str(whole["generated_text"]), "".join(texts)


async def test_a_checkpoint_in_the_models_folder(image: str) -> None:
    """Confined as in docker-compose.yml; SageMaker itself confines less."""
    with serving(image, f"--volume={MODEL}:/opt/ml/model:ro", *CONFINED) as container:
        begun_s = time.monotonic()
        await container.pings()
        print(f"pings after {time.monotonic() - begun_s:.0f} s")  # noqa: T201
        async with httpx2.AsyncClient(base_url=container.url, trust_env=False) as http:
            plain = (await http.post("/invocations", json=PAYLOAD)).json()
        whole, streamed = await asyncio.to_thread(invoke, container.url, "model")
        assert whole == streamed == plain["generated_text"] != ""
        assert docker("exec", container.name, "id", "-u").strip() == "10001"
        assert container.stop() < STOP_S
        assert container.exit_status() == 0, container.log


async def test_serving_properties_win_over_variables(image: str, tmp_path: Path) -> None:
    """The checkpoint is elsewhere, as that of `option.model_id` may be."""
    (tmp_path / "serving.properties").write_text("option.model_id=/models/small\noption.max_rolling_batch_size=3\n")
    await asyncio.to_thread(tmp_path.chmod, 0o755)
    mounts = (f"--volume={tmp_path}:/opt/ml/model:ro", f"--volume={MODEL}:/models/small:ro")
    variables = {"OPTION_MAX_ROLLING_BATCH_SIZE": "9", "OPTION_MAX_MODEL_LEN": "256", "SM_NUM_GPUS": "0"}
    with serving(image, *mounts, variables=variables) as container:
        await container.pings()
        whole, streamed = await asyncio.to_thread(invoke, container.url, "small")
        assert whole == streamed != ""
        assert "option.max_rolling_batch_size=3 (serving.properties)" in container.log
        assert "option.max_model_len=256" in container.log


async def test_a_model_of_the_hub(image: str) -> None:
    """HF_MODEL_ID: it is downloaded to a folder that the image's user may write. The container has the host's network,
    where the hub's stand-in listens."""
    port = free_port()
    with HubServer.serving({f"org/small/{path.name}": path.read_bytes() for path in MODEL.iterdir()}) as hub:
        variables = {"HF_MODEL_ID": "org/small", "HF_ENDPOINT": hub.url, "SAGEMAKER_BIND_TO_PORT": str(port)}
        variables |= {"TANDEM_HTTP_HOST": "127.0.0.1", "TANDEM_PORT": "0", "OPTION_MODEL_LOADING_TIMEOUT": "600"}
        with serving(image, "--network=host", *CONFINED, variables=variables) as container:
            here = Container(container.name, f"http://127.0.0.1:{port}")
            await here.pings()
            whole, streamed = await asyncio.to_thread(invoke, here.url, "small")
            assert whole == streamed != ""
    assert hub.reads["org/small/model.safetensors"] == 1


def test_a_download_counts_in_the_loading_timeout(image: str) -> None:
    files = {f"bucket/small/{path.name}": path.read_bytes() for path in MODEL.iterdir()}
    with S3Server.serving(files) as s3:
        s3.stalled.add("bucket/small/model.safetensors")
        variables = {"OPTION_MODEL_ID": "s3://bucket/small", "OPTION_MODEL_LOADING_TIMEOUT": "15"}
        variables |= {"AWS_ENDPOINT_URL": s3.url, **KEYS}
        with serving(image, "--network=host", variables=variables) as container:
            assert container.exit_status() == 1
            assert "downloaded after 15 s: raise model_loading_timeout" in container.log


def test_without_a_model_it_says_where_one_belongs(image: str) -> None:
    with serving(image) as container:
        assert container.exit_status() == 1
        assert "serve: /opt/ml/model has neither serving.properties nor config.json" in container.log
