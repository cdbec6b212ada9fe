"""The resources that each worker asks Ray for, if the nodes of the cluster have them. Pure: knows no Ray.

Ray places the workers. The nodes are only looked at to divide them into equal shares, as `tandem up` divides the cores
of one machine, and to refuse at once what no placement can hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError

_RANK_BYTES = 1 << 30
"""Memory of a process besides weights and KV: Python, torch, compiled loops, buffers of a step."""


@dataclass(frozen=True, slots=True)
class Node:
    """All that a node offers, free or not."""

    address: str
    cpus: float
    memory_bytes: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """A worker's needs, by `tandem plan`'s formulas. Its KV takes `min_kv_bytes` at least, which is one sequence of
    full length, and `max_kv_bytes` at most, which is all sequences that may run; both are 0 on a GPU.
    """

    name: str
    num_ranks: int
    weights_bytes: float
    min_kv_bytes: float
    max_kv_bytes: float
    num_gpus: int = 0

    @property
    def fixed_bytes(self) -> float:
        """Memory besides KV."""
        return self.weights_bytes + self.num_ranks * _RANK_BYTES


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """A worker's request to Ray."""

    name: str
    num_ranks: int
    cpus_per_rank: int
    memory_bytes: float
    kv_bytes: int
    num_gpus: int = 0

    @property
    def cpus(self) -> int:
        return self.num_ranks * self.cpus_per_rank

    @property
    def bundles(self) -> list[dict[str, float]]:
        """A bundle for each rank. The first is the actor's, whose process starts the other ranks: it has all GPUs,
        since Ray shows a process those of its bundle only.
        """
        bundle = {"CPU": float(self.cpus_per_rank), "memory": float(int(self.memory_bytes / self.num_ranks))}
        bundles = [dict(bundle) for _ in range(self.num_ranks)]
        if self.num_gpus:
            bundles[0]["GPU"] = float(self.num_gpus)
        return bundles

    def __str__(self) -> str:
        ranks = f" for {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return _describe(self.num_gpus, self.cpus, self.memory_bytes) + ranks


def divide(needs: Sequence[WorkerNeed], nodes: Sequence[Node], max_cores: int | None = None) -> list[WorkerResources]:
    """The resources of each worker: as many cores for each rank as all workers can have, at most `max_cores` for a
    worker, and of the memory the same share as of the cores. Raises ConfigurationError if the nodes are too small.
    """
    max_cpus = int(max((node.cpus for node in nodes), default=0))
    for cores in range(min(max_cpus, max_cores or max_cpus), 0, -1):
        requests = [_resources(need, nodes, cores, max_cores) for need in needs]
        if _fit(requests, nodes):
            return requests
    raise _too_small([_resources(need, (), 1, None) for need in needs], nodes)


def _resources(need: WorkerNeed, nodes: Sequence[Node], cores: int, max_cores: int | None) -> WorkerResources:
    """A request with `cores` per rank. KV gets what the worker's share of the node with the least memory leaves."""
    per_rank = max(1, min(cores, (max_cores or cores * need.num_ranks) // need.num_ranks))
    cpus = need.num_ranks * per_rank
    fitting = [node for node in nodes if node.cpus >= cpus and node.gpus >= need.num_gpus]
    kv_room = min((node.memory_bytes * cpus / node.cpus for node in fitting), default=0.0) - need.fixed_bytes
    kv_bytes = int(min(max(kv_room, need.min_kv_bytes), need.max_kv_bytes))
    return WorkerResources(need.name, need.num_ranks, per_rank, need.fixed_bytes + kv_bytes, kv_bytes, need.num_gpus)


def _fit(requests: Sequence[WorkerResources], nodes: Sequence[Node]) -> bool:
    """Whether the nodes can hold all of it, the largest placed first, each on the first node that has room."""
    free = [[node.gpus, node.cpus, node.memory_bytes] for node in nodes]
    for request in sorted((_row(request) for request in requests), reverse=True):
        remainders = [[have - want for have, want in zip(row, request, strict=True)] for row in free]
        number = next((number for number, remainder in enumerate(remainders) if min(remainder) >= 0), None)
        if number is None:
            return False
        free[number] = remainders[number]
    return True


def _row(request: WorkerResources) -> tuple[float, float, float]:
    return request.num_gpus, request.cpus, request.memory_bytes


def _too_small(minimum: Sequence[WorkerResources], nodes: Sequence[Node]) -> ConfigurationError:
    """The error that says what is missing, for the least that the workers need."""
    for worker in minimum:
        if not any(_fit([worker], [node]) for node in nodes):
            offers = [f"{node.address} has {_describe(node.gpus, node.cpus, node.memory_bytes)}" for node in nodes]
            advice = "a smaller degree, " if worker.num_ranks > 1 else ""
            return ConfigurationError(
                f"no node of the Ray cluster can hold {worker.name}, which needs {worker} on one node: "
                f"{', '.join(offers) or 'there is none'}; choose {advice}less KV (--kv-cache-bytes, --max-model-len) "
                "or larger nodes"
            )
    have = [sum(column) for column in zip(*((node.gpus, node.cpus, node.memory_bytes) for node in nodes), strict=True)]
    need = [sum(column) for column in zip(*map(_row, minimum), strict=True)]
    return ConfigurationError(
        f"the Ray cluster is too small: {len(minimum)} workers need {_describe(*need)}, each worker on one node, and "
        f"{len(nodes)} nodes have {_describe(*have)}: add nodes, or start fewer workers (--prefill, --decode)"
    )


def _describe(gpus: float, cpus: float, memory_bytes: float) -> str:
    return f"{cpus:g} CPU, {memory_bytes / (1 << 30):.2f} GiB of memory" + (f", {gpus:g} GPU" if gpus else "")


def nodes_of(tables: Sequence[Mapping[str, object]]) -> list[Node]:
    """The nodes that can run workers, from what `ray.nodes()` returns."""
    nodes = []
    for table in tables:
        resources = table["Resources"]
        if table["Alive"] and isinstance(resources, Mapping) and resources.get("CPU", 0) >= 1:
            figures = (float(resources.get(name, 0.0)) for name in ("CPU", "memory", "GPU"))
            nodes.append(Node(str(table["NodeManagerAddress"]), *figures))
    return nodes
