"""`python -m decode_worker`: builds the decode worker's objects and runs them."""

import sys

from decode_worker.role import decode_role
from decode_worker.settings import DecodeSettings
from mesh.process import ServiceProgram
from worker.load_engine import LoadRunner, load_runner_with_ranks
from worker.worker import Worker


async def serve(settings: DecodeSettings, load: LoadRunner = load_runner_with_ranks) -> None:
    """Load the model, then serve until stopped."""
    await Worker(settings, [decode_role(settings)], load=load).run()


if __name__ == "__main__":
    sys.exit(ServiceProgram("decode_worker", DecodeSettings, serve).main())
