"""Models from S3: a worker gives up when loading takes too long, and `tandem up` when the download does."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fakes.file_servers import S3Server
from tests.processes import running_process


async def test_a_worker_downloads_its_model_and_ends_when_loading_takes_too_long(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    files = {f"bucket/tiny/{path.name}": path.read_bytes() for path in checkpoint("llama").iterdir()}
    flags = {
        "model": "s3://bucket/tiny",
        "model-cache": str(tmp_path),
        "registry-address": "127.0.0.1:1",
        "model-loading-timeout": "0.01",
    }
    with S3Server.serving(files) as server:
        async with running_process(
            *(sys.executable, "-m", "decode_worker", *(f"--{name}={value}" for name, value in flags.items())),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ
            | {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
        ) as process:
            out, err = await process.communicate()
    assert process.returncode == 1, err.decode()
    assert b'"model not loaded in time"' in err
    assert b"0.01" in err
    assert b'{"event": "downloading", "fraction": 1.0}' in out
    copy = next((tmp_path / "s3").glob("bucket-tiny-*/model.safetensors"))
    assert copy.read_bytes() == files["bucket/tiny/model.safetensors"]


async def test_up_gives_up_a_download_that_takes_longer_than_the_loading_timeout(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    files = {f"bucket/tiny/{path.name}": path.read_bytes() for path in checkpoint("llama").iterdir()}
    with S3Server.serving(files) as server:
        server.stalled.add("bucket/tiny/model.safetensors")
        async with running_process(
            *(sys.executable, "-m", "tandem_cli", "up", "s3://bucket/tiny", f"--model-cache={tmp_path}"),
            *("--port=0", "--no-http", "--model-loading-timeout=2"),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ
            | {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
        ) as process:
            _, err = await process.communicate()
    assert process.returncode == 1, err.decode()
    assert b"downloaded after 2 s: raise model_loading_timeout" in err
