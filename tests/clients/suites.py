"""The test suites that clients bring along for servers, against a mesh with the bundled model.

    python -m tests.clients.suites

LangChain's (`langchain-tests`) is the one here: it is made to be pointed at a model, whoever serves it. The status is
pytest's.
"""

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.shapes import BUNDLED
from mesh.interrupts import run_program
from tests.client_environment import python_with
from tests.e2e.mesh_process import mesh

_SUITE = Path(__file__).with_name("langchain_suite.py")
# The client keeps one connection pool for all tests, which belongs to an event loop.
_SCOPES = ("asyncio_default_fixture_loop_scope=session", "asyncio_default_test_loop_scope=session")
_OPTIONS = ("asyncio_mode=auto", *_SCOPES)


async def run_suite() -> int:
    """Returns pytest's status."""
    modules = "langchain_tests, langchain_openai"
    python = await asyncio.to_thread(python_with, "langchain-tests", modules, "langchain-openai")
    with TemporaryDirectory(prefix="tandem-suites-") as folder:
        async with mesh(BUNDLED, Path(folder), "--http-port=0") as running:
            options = [word for option in _OPTIONS for word in ("-o", option)]
            process = await asyncio.create_subprocess_exec(
                *(python, "-P", "-m", "pytest", "-q", "-rxX", "--tb=short", "-p", "no:cacheprovider"),
                *("--rootdir", folder, "-c", os.devnull, *options, str(_SUITE)),
                env=os.environ
                | {"TANDEM_URL": running.http, "TANDEM_MODEL": BUNDLED.name, "PYTHONDONTWRITEBYTECODE": "1"},
            )
            return await process.wait()


def main() -> int:
    return asyncio.run(run_suite())


if __name__ == "__main__":
    run_program(main)
