"""The connection to a Ray cluster, and what it holds of this mesh: a placement group and an actor for each worker."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mesh.domain.errors import ConfigurationError
from mesh.domain.host import host_and_port
from tandem_cli.on_ray.node import WorkerActor
from tandem_cli.on_ray.resources import Node, WorkerResources, nodes_of

_ANY_PORT = 9
_CONNECT_S = 5.0


@contextmanager
def connected(address: str) -> Iterator["RayCluster"]:
    """The cluster that `--on ADDRESS` means. When the block ends, or this process dies, Ray drops all that this process
    has asked for. Raises ConfigurationError.
    """
    address = address if address.startswith("ray://") else os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, port = host_and_port(address.removeprefix("ray://"), -1, name="the address of Ray")
            socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigurationError(
            f"no Ray cluster answers at {address}: {reason}; start one with `ray start --head`, and name another with "
            "RAY_ADDRESS or --on ray://HOST:10001"
        ) from error
    try:
        yield RayCluster()
    finally:
        ray.shutdown()


class Placed:
    """A worker's actor in its placement group."""

    def __init__(self, actor: Any, group: PlacementGroup) -> None:
        self.actor = actor
        self._group: PlacementGroup | None = group

    def is_waiting(self) -> bool:
        """Whether Ray has not found a node for the worker."""
        return self._group is not None and bool(placement_group_table(self._group)["state"] != "CREATED")

    def remove(self) -> None:
        """Kill the actor for good, and give its resources back; once."""
        if self._group is not None:
            ray.kill(self.actor, no_restart=True)
            remove_placement_group(self._group)
            self._group = None


class RayCluster:
    """The cluster that this process is connected to."""

    def nodes(self) -> list[Node]:
        """The nodes that can run workers."""
        return nodes_of(ray.nodes())

    def own_address(self) -> str:
        """This machine's address in the network of the nodes: that of the route to one of them."""
        nodes = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
        family = socket.AF_INET6 if ":" in nodes[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as way:  # nothing is sent
            way.connect((nodes[0], _ANY_PORT))
            return str(way.getsockname()[0])

    def place(self, resources: WorkerResources, *, restarts: bool) -> Placed:
        """Ask for a worker's resources on one node, and an actor with them. Returns at once: Ray places both when it
        can, and again when the node is lost. With `restarts`, Ray starts an actor again whenever it has ended.
        """
        group = placement_group(resources.bundles, strategy="STRICT_PACK", name=f"tandem {resources.name}")
        bundle = resources.bundles[0]
        options = {
            "name": f"tandem {resources.name}",
            "num_cpus": bundle["CPU"],
            "memory": bundle["memory"],
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": -1 if restarts else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        return Placed(ray.remote(WorkerActor).options(**options).remote(), group)
