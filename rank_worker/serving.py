"""A rank's work between its start and the end of its worker, and what the worker learns if the rank fails."""

import socket

import structlog

from engine.ranks.launch import RankSetup, serve_rank
from mesh.domain.errors import ConfigurationError
from mesh.logs import configure_logging, flush_outputs

log = structlog.get_logger(__name__)


def serve(leader: socket.socket) -> int:
    """Serve until the worker is gone. Returns the exit status."""
    try:
        setup = RankSetup.receive(leader)
        configure_logging("rank_worker", level=setup.log_level)
        serve_rank(setup, leader)
    except ConnectionError:  # the worker has ended
        return 1
    except Exception as error:
        if not isinstance(error, ConfigurationError):
            log.critical("unexpected error, exiting", exc_info=error)
        RankSetup.send_failure(leader, error)
        flush_outputs()
        return 1
    return 0
