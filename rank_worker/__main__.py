"""`python -m rank_worker`: one rank of a worker, started by the worker itself (engine/ranks/launch.py).

    setup ──▶ load weights ──▶ loaded ──▶ number of blocks ──▶ ready ──▶ commands, until the worker is gone

The process never outlives its worker: it ends when its socket closes, and the system kills it with its parent. Signals
to the process group are for the worker, which drains first.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys

import structlog

from engine.ranks.launch import RankSetup, serve_rank
from mesh.domain.errors import ConfigurationError
from mesh.logs import configure_logging, flush_outputs

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until the worker is gone. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="rank_worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker")
    arguments = parser.parse_args()
    _die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=arguments.socket_fd) as leader:
        setup = RankSetup.receive(leader)
        configure_logging("rank_worker", level=setup.log_level)
        try:
            serve_rank(setup, leader)
        except ConfigurationError as error:
            return _fail(leader, str(error))
        except OSError:  # the worker has ended
            return 1
        except Exception as error:
            log.critical("unexpected error, exiting", rank=setup.rank, exc_info=error)
            return _fail(leader, f"{type(error).__name__}: {error}; its log has the details")
    return 0


def _fail(leader: socket.socket, reason: str) -> int:
    RankSetup.send_failure(leader, reason)
    flush_outputs()
    return 1


def _die_with(parent: int) -> None:
    """Let the system kill this process as soon as its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
