"""Adds and removes workers of a mesh that runs, as its router advises (router/advice.py).

One change of a role at a time: the next one waits until the added worker serves, or the removed one has left. A worker
that does not serve yet can be removed: perhaps no machine has room for it. Only workers beyond those of the start are
removed, the last one first. A failure is reported, and the routers are asked again.
"""

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tandem
from mesh.domain.errors import MeshError
from tandem_cli.local_mesh.deployment import Service

_ASK_EACH_S = 5.0
_ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Change:
    """A worker to start, or to stop. `reason` is a clause for operators."""

    service: Service
    is_added: bool
    reason: str


class Scaling:
    """`spares(registry address)`: the workers that may be added. `client(addresses)`: a client for the routers."""

    def __init__(self, spares: Callable[[str], Sequence[Service]], client: Callable[[str], tandem.AsyncClient]) -> None:
        self._spares = spares
        self._client = client

    async def run(
        self,
        addresses: str,
        registry_address: str,
        *,
        on_change: Callable[[Change], None],
        on_warning: Callable[[str], None],
    ) -> None:
        """Ask the routers every few seconds, and report each change, until cancelled. A repeated failure is reported
        once, until the routers have answered again.
        """
        scaler: Scaler | None = None
        told = ""
        while True:
            await asyncio.sleep(_ASK_EACH_S)
            try:
                scaler = scaler or Scaler(self._spares(registry_address))
                for change in scaler.follow(await self._ask(addresses)):
                    on_change(change)
                told = ""
            except Exception as error:
                if (text := _describe(error)) != told:
                    on_warning(f"no worker is added or removed: {text}; trying again each {_ASK_EACH_S:g} s")
                told = text

    async def _ask(self, addresses: str) -> tandem.Mesh:
        async with self._client(addresses) as client:
            return await client.mesh(timeout=_ASK_TIMEOUT_S)


def _describe(error: Exception) -> str:
    """The message of an error that is meant for users; any other error with its type and place."""
    if isinstance(error, tandem.TandemError | MeshError):
        return str(error) or type(error).__name__
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


class Scaler:
    """Knows which spares run. No I/O."""

    def __init__(self, spares: Sequence[Service]) -> None:
        self._spares = spares
        self._running: list[str] = []  # the last added at the end
        self._changing: dict[str, Change] = {}  # by role

    def follow(self, mesh: tandem.Mesh) -> list[Change]:
        """Return the changes to make now, by the advice of `mesh`."""
        states = {worker.worker_id: worker.state for worker in mesh.workers}
        self._changing = {role: change for role, change in self._changing.items() if not _is_done(change, states)}
        changes = []
        for advice in mesh.advice:
            pending = self._changing.get(advice.role)
            if pending is not None and not (pending.is_added and advice.action == "remove"):
                continue
            change = self._change(advice)
            if change is not None:
                self._changing[advice.role] = change
                changes.append(change)
        return changes

    def _change(self, advice: tandem.Advice) -> Change | None:
        of_role = [spare for spare in self._spares if spare.role == advice.role]
        if advice.action == "add":
            free = next((spare for spare in of_role if spare.name not in self._running), None)
            if free is None:
                return None
            self._running.append(free.name)
            return Change(free, is_added=True, reason=advice.reason)
        names = {spare.name: spare for spare in of_role}
        last = next((name for name in reversed(self._running) if name in names), None)
        if last is None:
            return None
        self._running.remove(last)
        return Change(names[last], is_added=False, reason=advice.reason)


def _is_done(change: Change, states: dict[str, str]) -> bool:
    state = states.get(change.service.name)
    return state == "ready" if change.is_added else state in (None, "stopped", "lost")
