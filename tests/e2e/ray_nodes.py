"""A Ray cluster of several nodes on this machine, in a process of its own: `python -m tests.e2e.ray_nodes`.

It takes commands as lines, and answers each with a line of JSON:

    add CPUS            start a node                   -> its number
    lose NUMBER         kill the node's processes      -> null
    state               what meshes have asked for     -> {"groups": .., "actors": ..}, those that are not gone
    nodes               the node of each actor         -> {name of the actor: number of the node}
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

START_S = 600.0
"""For a node or a worker of Ray, each of which imports Ray, on a busy machine. Ray's own limits are 30 s and 60 s."""
_END_S = 300.0
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass
class RayNodes:
    """The cluster's process, for tests."""

    process: "subprocess.Popen[str]"
    environ: dict[str, str]
    """The variables with which Ray finds the cluster."""

    def ask(self, *words: object) -> Any:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    async def ask_soon(self, *words: object) -> Any:
        """As `ask`, while the event loop runs on."""
        return await asyncio.to_thread(self.ask, *words)


@contextlib.contextmanager
def ray_nodes(*cpus: int) -> Iterator[RayNodes]:
    """A cluster with a head that runs no workers, and a node for each of `cpus`; node 0 has the first number. Each node
    has an address of its own on loopback. Ray also listens on other addresses, and asks there for the token of
    `RayNodes.environ`.
    """
    environ = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_register_timeout_seconds": f"{START_S:.0f}",
    }
    command = [sys.executable, "-m", "tests.e2e.ray_nodes"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environ
    ) as process:
        assert process.stdout is not None
        try:
            environ["RAY_ADDRESS"] = json.loads(process.stdout.readline())
            nodes = RayNodes(process, environ)
            for number, count in enumerate(cpus):
                assert nodes.ask("add", count) == number
            yield nodes
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            try:
                process.wait(_END_S)
            finally:
                process.kill()  # the end of the block waits for it


class _Commands:
    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._nodes: list[Any] = []
        self._cluster = Cluster(initialize_head=True, head_node_args=self._of_node(0))
        ray.init(self._cluster.address, log_to_driver=False, configure_logging=False)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: str) -> int:
        node = self._cluster.add_node(wait=False, **self._of_node(int(cpus)))
        self._cluster._wait_for_node(node, START_S)
        self._nodes.append(node)
        return len(self._nodes) - 1

    def lose(self, number: str) -> None:
        self._cluster.remove_node(self._nodes[int(number)], allow_graceful=False)

    def state(self) -> dict[str, int]:
        groups = self._ray.util.placement_group_table().values()
        return {
            "groups": sum(group["state"] != "REMOVED" for group in groups),
            "actors": sum(actor["State"] != "DEAD" for actor in self._actors()),
        }

    def nodes(self) -> dict[str, int]:
        numbers = {node.node_id: number for number, node in enumerate(self._nodes)}
        return {
            actor["Name"].removeprefix("tandem "): numbers[actor["Address"]["NodeID"]]
            for actor in self._actors()
            if actor["State"] == "ALIVE"
        }

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()

    def _actors(self) -> list[dict[str, Any]]:
        from ray._private.state import actors

        return list(actors().values())

    def _of_node(self, cpus: int) -> dict[str, Any]:
        """The resources of a node: some memory in name only, and a small object store."""
        return {
            "num_cpus": cpus,
            "memory": 8 * _GIB,
            "object_store_memory": 80 * _MIB,
            "node_ip_address": f"127.0.0.{2 + len(self._nodes)}",
            "include_dashboard": False,
        }


def serve(commands: _Commands, out: TextIO) -> None:
    """Answer on `out`."""
    try:
        out.write(json.dumps(commands.address) + "\n")
        out.flush()
        for line in sys.stdin:
            name, *arguments = line.split()
            out.write(json.dumps(getattr(commands, name)(*arguments)) + "\n")
            out.flush()
    finally:
        commands.close()


def main() -> None:
    """Serve commands until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there
    # Paths of sockets are short, and Ray's processes may still write as they end.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        serve(_Commands(), out)


if __name__ == "__main__":
    main()
