"""A mesh whose workers compute nothing (tandem_cli.load_test.paced), with each process on a chosen core.

The pace is that of the environment (TANDEM_PACE), or steps of 10 ms.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from bench.processes import on_cores
from tandem_cli.load_test.endpoints import PACE_ENV
from tandem_cli.model_files.model_folders import BUNDLED

_DEFAULT_PACE = "10.0,0"


@asynccontextmanager
async def paced_mesh(
    router_core: int, worker_core: int, max_requests: int, decode_flags: Sequence[str], num_decode: int = 1
) -> AsyncIterator[tuple[int, str]]:
    """Run a router, a prefill worker and decode workers. Yields the process id and the address of the router."""
    model = ("--model", str(BUNDLED))
    caps = ("--max-concurrent-requests", str(max_requests), "--max-queued-requests", str(max_requests))
    expected = ("--expect-prefill", "1", "--expect-decode", str(num_decode))
    async with AsyncExitStack() as stack:
        router = service(router_core, "router", *model, "--port", "0", "--registry-port", "0", *caps, *expected)
        pid, ready = await stack.enter_async_context(router)
        worker_flags = (*model, "--registry-address", ready["registry_address"])
        await stack.enter_async_context(service(worker_core, "tandem_cli.load_test.paced prefill", *worker_flags))
        decode_flags = (*worker_flags, "--max-rolling-batch-size", str(max_requests), *decode_flags)
        for _ in range(num_decode):
            await stack.enter_async_context(service(worker_core, "tandem_cli.load_test.paced decode", *decode_flags))
        yield pid, ready["address"]


@asynccontextmanager
async def service(core: int, module: str, *flags: str) -> AsyncIterator[tuple[int, Mapping[str, str]]]:
    """Run `python -m module` on one core. Yields its process id and its announcement "listening"."""
    process = await asyncio.create_subprocess_exec(
        *on_cores({core}, sys.executable, "-m", *module.split(), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={PACE_ENV: _DEFAULT_PACE, **os.environ},
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            announcement = json.loads(line)
            if announcement["event"] == "listening":
                yield process.pid, announcement
                break
        else:
            raise SystemExit(f"{module} did not start")
    finally:
        with suppress(ProcessLookupError):  # Ctrl-C in a terminal is for it, too
            process.terminate()
        await process.communicate()
