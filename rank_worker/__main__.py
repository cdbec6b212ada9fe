"""`python -m rank_worker`: one rank of a worker, started by the worker itself (engine/ranks/launch.py).

    setup ──▶ load weights ──▶ loaded ──▶ number of blocks ──▶ ready ──▶ commands, until the worker is gone

`python -m rank_worker --leader HOST:PORT --rank R`: the same on another machine (rank_worker/joining.py).

The process never outlives its worker. A worker that stops kills its ranks after its last step. If it ends otherwise, a
rank ends when its socket closes, and Linux kills it when the worker's thread that started it ends. Signals to the
process group are for the worker, which drains first.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until the worker is gone. Returns the exit status."""
    if "--socket-fd" not in sys.argv:
        from mesh.process import ServiceProgram
        from rank_worker.joining import serve as join
        from rank_worker.settings import RankSettings

        return ServiceProgram("rank_worker", RankSettings, join).main()
    parser = argparse.ArgumentParser(prog="rank_worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker")
    arguments = parser.parse_args()
    _die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Not imported before _die_with: it takes seconds, and the worker may end meanwhile.
    from rank_worker.serving import serve

    with socket.socket(fileno=arguments.socket_fd) as leader:
        return serve(leader)


def _die_with(parent: int) -> None:
    """Let Linux kill this process as soon as the thread of the parent that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
