"""For engines without continuous batching: whatever waits forms a batch; what arrives meanwhile waits for the next."""

import time
from collections.abc import Callable

from bench.peers.wire import Request, Wire

_GATHER_S = 0.01  # requests sent at the same moment come within this


def serve(wire: Wire, max_seqs: int, generate: Callable[[list[Request]], None]) -> None:
    """Until the driver closes stdin. `generate` says all tokens of a batch over the wire."""
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
