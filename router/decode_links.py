"""Links to all decode workers: opened when a worker joins, closed when it leaves, opened again after a break."""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from mesh.domain.errors import MeshError
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.registry.membership import Registry, WorkerView
from router.channels import Caller, Channels
from router.decode_link import DecodeLink

log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 10.0


class DecodeLinks:
    """One link for each decode worker's current incarnation. `on_change` is called when one comes up or breaks."""

    def __init__(self, registry: Registry, channels: Channels, caller: Caller, on_change: Callable[[], None]) -> None:
        self._registry = registry
        self._channels = channels
        self._caller = caller
        self._on_change = on_change
        self._links: dict[str, DecodeLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_failures: dict[str, int] = {}  # breaks in a row, by incarnation

    def find(self, info: WorkerInfo) -> DecodeLink | None:
        """The working link to this run of a worker, or None."""
        link = self._links.get(info.incarnation)
        return link if link is not None and link.is_up else None

    def unreachable(self, views: Iterable[WorkerView]) -> frozenset[str]:
        """Incarnations of decode workers without a working link: they get no work."""
        return frozenset(
            view.info.incarnation
            for view in views
            if view.info.role is WorkerRole.DECODE and self.find(view.info) is None
        )

    def reconcile(self) -> None:
        """Follow the registry: open links to workers that are there, close those to others."""
        views = self._registry.workers()
        present = {
            view.info.incarnation: view.info
            for view in views
            if view.info.role is WorkerRole.DECODE and view.state is not WorkerState.LOST
        }
        for forgotten in self._num_failures.keys() - {view.info.incarnation for view in views}:
            del self._num_failures[forgotten]
        for incarnation in self._tasks.keys() - present.keys():
            self._tasks.pop(incarnation).cancel()
        for incarnation, info in present.items():
            if incarnation not in self._tasks:
                self._tasks[incarnation] = asyncio.get_running_loop().create_task(self._keep(info))

    async def close(self) -> None:
        """Close all links; attempts on them fail."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, info: WorkerInfo) -> None:
        """Hold one link open. When it breaks, the worker counts as lost until its next heartbeat."""
        await asyncio.sleep(self._retry_delay_s(info.incarnation))
        link = DecodeLink(info, self._channels.get(info), self._caller)
        self._links[info.incarnation] = link
        try:
            await link.run(lambda: self._came_up(info))
        except MeshError as error:
            log.warning("decode link broken", worker=info.worker_id, address=info.address, error=str(error))
        except Exception:
            log.exception("decode link failed", worker=info.worker_id)
        finally:
            if self._links.get(info.incarnation) is link:
                del self._links[info.incarnation]
        self._broke(info)

    def _came_up(self, info: WorkerInfo) -> None:
        self._num_failures.pop(info.incarnation, None)
        self._on_change()

    def _broke(self, info: WorkerInfo) -> None:
        if self._tasks.get(info.incarnation) is not asyncio.current_task():
            return  # the registry was faster, and somebody else follows this worker now
        del self._tasks[info.incarnation]
        self._num_failures[info.incarnation] = self._num_failures.get(info.incarnation, 0) + 1
        self._registry.lose(info.worker_id, info.incarnation)
        self._on_change()

    def _retry_delay_s(self, incarnation: str) -> float:
        num_failures = self._num_failures.get(incarnation, 0)
        return min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** (num_failures - 1)) if num_failures else 0.0
