"""The test suites that clients bring along for servers, against a mesh with the bundled model.

    python -m tests.clients.suites                     all
    python -m tests.clients.suites openai anthropic    these

LangChain's (`langchain-tests`) is made to be pointed at a model, whoever serves it. OpenAI's and Anthropic's source
distributions have tests that call a server at `TEST_API_BASE_URL`, also with strict validation of each answer. The
status is that of the first suite that fails.
"""

import asyncio
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mesh.interrupts import run_async, run_program
from tandem_cli.model_files.model_folders import BUNDLED
from tests.client_environment import python_with
from tests.e2e.mesh_process import mesh

_HERE = Path(__file__).parent
# The client keeps one connection pool for all tests, which belongs to an event loop.
_SCOPES = ("asyncio_default_fixture_loop_scope=session", "asyncio_default_test_loop_scope=session")
_OPTIONS = ("asyncio_mode=auto", *_SCOPES)
_LANGCHAIN = ("langchain-tests==1.1.9", "langchain_tests, langchain_openai", "langchain-openai==1.7.4")
_SDK_NEEDS = ("pytest", "pytest-asyncio", "respx", "httpx2", "dirty-equals", "inline-snapshot", "http-snapshot")
_SDKS = {
    "openai": (
        "3.57.0",
        ("chat/test_completions.py", "test_completions.py", "test_models.py", "test_files.py", "test_batches.py"),
    ),
    "anthropic": ("2.12.0", ("test_messages.py", "test_models.py")),
}
"""Versions, and the tests of routes that the gateway has."""
# Models that the tests ask for, as further names of the bundled one.
_NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "gpt-4o-mini", "claude-opus-5-5", "model_id")


async def run_langchain(url: str, folder: Path) -> int:
    """Returns pytest's status."""
    requirement, modules, *others = _LANGCHAIN
    python = await asyncio.to_thread(python_with, requirement, modules, *others)
    environment = {"TANDEM_URL": url, "TANDEM_MODEL": BUNDLED.name}
    # Our own conftest.py needs what only our environment has.
    return await _pytest(python, folder, environment, "--confcutdir", str(_HERE), str(_HERE / "langchain_suite.py"))


async def run_sdk(name: str, url: str, folder: Path) -> int:
    """Returns pytest's status. The tests are in the source distribution only."""
    version, tests = _SDKS[name]
    requirement = f"{name}[aiohttp]=={version}"
    python = await asyncio.to_thread(python_with, requirement, f"{name}, http_snapshot", *_SDK_NEEDS)
    source = await asyncio.to_thread(_unpacked, f"{name}=={version}", folder)
    base_url = f"{url}/v1" if name == "openai" else url
    environment = {"TEST_API_BASE_URL": base_url, "PYTHONPATH": str(_HERE)}
    paths = [str(source / "tests" / "api_resources" / test) for test in tests]
    return await _pytest(python, source, environment, "-p", "sdk_suite", *paths)


def _unpacked(requirement: str, folder: Path) -> Path:
    """The folder of a package's source distribution, in `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-binary", ":all:", "-d", str(folder), requirement], check=True)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


async def _pytest(python: str, folder: Path, environment: Mapping[str, str], *arguments: str) -> int:
    options = [word for option in _OPTIONS for word in ("-o", option)]
    process = await asyncio.create_subprocess_exec(
        *(python, "-P", "-m", "pytest", "-q", "-rxX", "--tb=short", "-p", "no:cacheprovider"),
        *("--rootdir", str(folder), "-c", os.devnull, *options, *arguments),
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
    )
    return await process.wait()


async def run_suites(names: Sequence[str]) -> int:
    """Returns the status of the first suite that fails, else 0."""
    traffic = ";".join(f"{name}={BUNDLED.name}:1" for name in _NAMES)
    statuses = []
    with TemporaryDirectory(prefix="tandem-suites-") as folder:
        flags = ("--http-port=0", "--traffic", traffic, "--batch-folder", f"{folder}/batches")
        async with mesh(BUNDLED, Path(folder), *flags) as running:
            for name in names:
                run = run_langchain if name == "langchain" else partial(run_sdk, name)
                with TemporaryDirectory(prefix=f"tandem-{name}-") as own:
                    statuses.append(await run(running.http, Path(own)))
    return next(filter(None, statuses), 0)


def main(names: Sequence[str]) -> int:
    known = ("langchain", *_SDKS)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no suite {', '.join(unknown)}; there are {', '.join(known)}")
    return run_async(run_suites(names or known))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
