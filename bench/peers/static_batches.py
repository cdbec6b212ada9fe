"""Static batches for engines without continuous batching: waiting requests form a batch, later ones wait for
the next.
"""

import time
from collections.abc import Callable

from bench.peers.wire import Request, Wire

_GATHER_S = 0.01  # requests that are sent together arrive within this time


def serve(wire: Wire, max_seqs: int, generate: Callable[[list[Request]], None]) -> None:
    """Serve requests until the driver closes stdin. `generate` sends all tokens of a batch to the driver."""
    wire.ready()
    waiting: list[Request] = []
    while True:
        if not waiting:
            waiting = wire.arrived(wait_s=None)
            time.sleep(_GATHER_S)
        waiting += wire.arrived()
        batch, waiting = waiting[:max_seqs], waiting[max_seqs:]
        generate(batch)
        for request in batch:
            wire.done(request.id)
