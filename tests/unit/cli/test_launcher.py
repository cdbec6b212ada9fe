"""What `tandem up` leaves of a child that has ended: nothing."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mesh.process import adopt_orphans
from tandem_cli.local_mesh.deployment import Service
from tandem_cli.local_mesh.launcher import Child, LocalLauncher, ServiceEvent
from tests.orphans import disown_orphans

# Prints the process id of a grandchild, which ignores the end of its parent, and is killed.
_PROGRAM = """
import json, os, signal, subprocess
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps({"event": "grandchild", "pid": child.pid}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def adopting() -> Iterator[None]:
    if sys.platform != "linux":
        pytest.skip("orphans can be adopted on Linux only")
    adopt_orphans()
    yield
    disown_orphans()


@pytest.mark.usefixtures("adopting")
async def test_a_child_has_exited_when_its_ranks_are_gone(tmp_path: Path) -> None:
    events: list[ServiceEvent] = []
    launcher = LocalLauncher({"decode": (sys.executable, "-c", _PROGRAM)}, dict(os.environ), tmp_path)
    service = Service("decode-0", "decode", ())
    child = await Child.start(service, launcher, on_event=events.append, on_warning=lambda *_: None)
    async with asyncio.timeout(60):
        await child.exited
    grandchild, exited = events
    assert (exited.kind, exited.fields["status"]) == ("exited", -9)
    assert not psutil.pid_exists(grandchild.fields["pid"])
