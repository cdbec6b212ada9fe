"""`python -m rank_worker`: one rank of a worker, started by the worker itself (engine/ranks/launch.py).

    setup ──▶ load weights ──▶ loaded ──▶ number of blocks ──▶ ready ──▶ commands, until the worker is gone

`python -m rank_worker --leader HOST:PORT --rank R`: a rank that shares no memory with the worker, on another machine
or, with `--parent`, started by the worker on this one (rank_worker/remote_rank.py).

The process never outlives its worker. A worker that stops kills its ranks after its last step. If it ends otherwise, a
rank ends when its socket closes, and Linux kills it when the worker's thread that started it ends. Signals to the
process group are for the worker, which drains first.
"""

import argparse
import gc
import socket
import sys

from mesh.parent import die_with


def main() -> int:
    """Serve until the worker is gone. Returns the exit status."""
    if "--socket-fd" not in sys.argv:
        from mesh.process import ServiceProgram
        from rank_worker.remote_rank import serve as join
        from rank_worker.settings import RankSettings

        return ServiceProgram("rank_worker", RankSettings, join).main()
    parser = argparse.ArgumentParser(prog="rank_worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    # Not imported before die_with: it takes seconds, and the worker may end meanwhile. What it makes is no garbage.
    gc.disable()
    from rank_worker.shared_rank import serve

    gc.freeze()
    gc.enable()
    with socket.socket(fileno=arguments.socket_fd) as leader:
        return serve(leader)


if __name__ == "__main__":
    sys.exit(main())
