"""`python -m prefill_worker`: builds the prefill worker's objects and runs them."""

import sys

from mesh.process import ServiceProgram
from prefill_worker.role import prefill_role
from prefill_worker.settings import PrefillSettings
from worker.load_engine import LoadRunner, load_runner_with_ranks
from worker.worker import Worker


async def serve(settings: PrefillSettings, load: LoadRunner = load_runner_with_ranks) -> None:
    """Load the model, then serve until stopped."""
    await Worker(settings, [prefill_role(settings)], load=load).run()


if __name__ == "__main__":
    sys.exit(ServiceProgram("prefill_worker", PrefillSettings, serve).main())
