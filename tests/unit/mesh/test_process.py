"""What every service does around its work."""

import json
import resource
import subprocess
import sys

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
