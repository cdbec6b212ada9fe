"""`python -m switchable_worker`: builds both roles of a worker and runs it, first in the role of its settings."""

import sys

from decode_worker.role import decode_role
from mesh.domain.worker import WorkerRole
from mesh.process import ServiceProgram
from prefill_worker.role import prefill_role
from switchable_worker.settings import SwitchableSettings
from worker.load_engine import LoadRunner, load_runner_with_ranks
from worker.worker import Worker


async def serve(settings: SwitchableSettings, load: LoadRunner = load_runner_with_ranks) -> None:
    """Load the model, then serve until stopped."""
    roles = [prefill_role(settings), decode_role(settings)]
    roles.sort(key=lambda role: role.kind is not WorkerRole(settings.role))
    await Worker(settings, roles, load=load).run()


if __name__ == "__main__":
    sys.exit(ServiceProgram("switchable_worker", SwitchableSettings, serve).main())
