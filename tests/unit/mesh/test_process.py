"""What every service does around its work."""

import json
import os
import resource
import subprocess
import sys

import pytest

from tests.defects import Repaired

SERVICE = """
import resource, sys
from mesh.process import ProcessSettings, ServiceProgram

async def serve(settings):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    if sys.argv[1:] == ["fail"]:
        raise LookupError("unforeseen")

sys.exit(ServiceProgram("test", ProcessSettings, serve).main([]))
"""


def run(*arguments: str, soft: int = 64) -> subprocess.CompletedProcess[str]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n{SERVICE}"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)


def test_a_service_may_have_as_many_files_as_the_system_allows(repaired: Repaired) -> None:
    done = run()
    soft, hard = map(int, done.stdout.split())
    wanted = min(hard, 1 << 20)
    (limits,) = [entry for entry in map(json.loads, done.stderr.splitlines()) if entry["event"] == "limits"]
    assert done.returncode == 0
    assert soft == limits["open_files"] == wanted > 64
    repaired("D6", f"a service started with 64 descriptors may have {soft:,}")


def test_an_unforeseen_error_is_a_log_line_and_status_1() -> None:
    done = run("fail")
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["level"], last["exception"][0]["exc_type"]) == ("critical", "LookupError")


FULL = """
import asyncio, os, resource, signal
from mesh import process_limits
from mesh.process import ProcessSettings, ServiceProgram, until_stopped

process_limits._FILES_CHECK_S = 0.02

async def serve(settings):
    async def take_all():
        held = []
        try:
            while True:
                held.append(os.dup(2))
        except OSError:
            await asyncio.sleep(0.5)
        for fd in held:
            os.close(fd)
        os.kill(os.getpid(), signal.SIGTERM)
    taking = asyncio.get_running_loop().call_later(0.2, lambda: asyncio.create_task(take_all()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    await until_stopped(settings)

ServiceProgram("test", ProcessSettings, serve).main([])
"""


def test_a_lack_of_files_is_logged_and_not_with_every_check() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    (entry,) = [entry for entry in map(json.loads, done.stderr.splitlines()) if entry["level"] == "error"]
    assert entry["event"].startswith(
        "no more files can be opened, so new connections are not accepted: raise the limit"
    )
    assert (entry["limit"], entry["reason"]) == (160, "Too many open files")


LITTLE = """
import resource, sys
from mesh.process import ProcessSettings, ServiceProgram
from mesh.rpc.server import Listen, Server

async def serve(settings):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), resource.RLIM_INFINITY))
    if sys.argv[1] == "server":
        Server(Listen("127.0.0.1", 0, allow_anonymous=True))
    bytearray(1 << 30)

sys.exit(ServiceProgram("test", ProcessSettings, serve).main([]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
@pytest.mark.parametrize(
    ("what", "status", "words"), [("server", 2, "no room for the stacks of 32 threads"), ("bytes", 1, "out of memory")]
)
def test_too_little_address_space_is_said_once_with_what_to_do(what: str, status: int, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", LITTLE, what], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(lines)) == (status, 1), done.stderr
    assert lines[0].startswith(f"test: {words}: ulimit -v allows this process ")
    assert lines[0].endswith("start it after ulimit -v unlimited")


LEVEL_WHEN_GRPC_IS_IMPORTED = """
import importlib, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"), flush=True)
            os._exit(0)  # all else that they import takes seconds

sys.meta_path.insert(0, Finder())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


@pytest.mark.parametrize(
    "modules",
    [["router.__main__"], ["gateway.__main__"], ["decode_worker.__main__"], ["tandem_cli.main", "tandem_cli.chat"]],
)
def test_grpc_leaves_what_is_no_error_out_of_the_log(modules: list[str]) -> None:
    """Its core reads the level when it is imported, and writes lines that are no JSON."""
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = [sys.executable, "-c", LEVEL_WHEN_GRPC_IS_IMPORTED, *modules]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.returncode) == (["ERROR"], 0)


BROKEN = """
import asyncio, sys, time
from mesh.process import ProcessSettings, ServiceProgram, run_for_life, until_stopped

def broken(*arguments, **options):
    raise LookupError("unforeseen")

async def serve(settings):
    if sys.argv[1] == "any":
        async def work(): broken()
        task = run_for_life(work())
    elif sys.argv[1] == "expiry":
        import router.workers.coordination as coordination
        coordination.HEARTBEAT_INTERVAL_S = 0.01
        from mesh.rpc.credentials import Credentials
        from router.settings import RouterSettings
        from router.workers.connections import RouterIdentity
        from router.workers.membership import Membership
        membership = Membership(time.monotonic)
        membership.expire = broken
        settings = RouterSettings(model="none", registry_port=0)
        identity = RouterIdentity("r", settings.load_credentials())
        registry = coordination.LocalCoordination(settings, membership, identity)
        await registry.start()
    else:
        import socket
        from starlette.applications import Starlette
        import gateway.server as server
        server.Connections.watch = lambda self: work()
        async def work(): broken()
        limits = server.ConnectionLimits(max_connections=9, header_timeout_s=1, slow_reader_s=1)
        listener = socket.create_server(("127.0.0.1", 0))
        async with server.serving_at(Starlette(), listener, 1, limits):
            await until_stopped(ProcessSettings())
    await until_stopped(ProcessSettings())

sys.exit(ServiceProgram("test", ProcessSettings, serve).main([]))
"""


@pytest.mark.parametrize("where", ["any", "expiry", "connections"])
def test_a_background_task_that_fails_ends_the_service(where: str) -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN, where], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    entries = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (critical,) = [entry for entry in entries if entry["level"] == "critical"]
    assert critical["event"] == "a background task has failed, exiting"
    assert critical["exception"][0]["exc_type"] == "LookupError"
