"""A rank that shares memory with its leader: loads its share, executes commands, and tells the leader if it fails."""

import os
import socket
from contextlib import suppress
from functools import partial

import structlog
import torch

from engine.loading.load_phases import load_phase, measured_load, rounded
from engine.loading.resolve import freed_windows, resolve
from engine.models.model_config import ModelConfig
from engine.ranks.collectives import shared_store
from engine.ranks.commands import Command, Report, decode_command, encode_command, encode_report
from engine.ranks.messages import MAX_MESSAGE_BYTES, RankSetup, receive_message, send_message
from engine.ranks.rank import Execute, Rank, map_kv
from engine.ranks.shared import SharedGroup, step_memory
from mesh.domain.errors import ConfigurationError
from mesh.logs import configure_logging, flush_outputs

log = structlog.get_logger(__name__)


def serve(leader: socket.socket) -> int:
    """Serve until the worker is gone. Returns the exit status."""
    try:
        setup = RankSetup.receive(leader)
        configure_logging("rank_worker", level=setup.log_level, json=setup.log_json)
        structlog.contextvars.bind_contextvars(rank=setup.rank)
        with measured_load() as seconds:
            execute = _load(setup, leader)
        send_message(leader, ready=True, phases=rounded(seconds))
        while message := leader.recv(MAX_MESSAGE_BYTES):
            execute(decode_command(message))
    except ConnectionError:  # the worker has ended
        return 1
    except Exception as error:
        if not isinstance(error, ConfigurationError):
            log.critical("unexpected error, exiting", exc_info=error)
        flush_outputs()  # before the leader knows: it kills this process then
        RankSetup.send_failure(leader, error)
        return 1
    return 0


def _load(setup: RankSetup, leader: socket.socket) -> Execute:
    """Load the rank's share. Raises ConfigurationError, and ConnectionError if the leader ends meanwhile."""
    os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.num_threads)
    settings, config = resolve(setup.settings)
    assert isinstance(config, ModelConfig), "the leader has checked it"
    num_groups = max(1, len(freed_windows(config, settings)))
    memory = step_memory(settings, config, setup.max_blocks, num_groups, setup.memory_fd)
    group = SharedGroup(setup.rank, settings.degrees, memory, partial(_post, setup), partial(_report, setup))
    rank = Rank(settings, config, group, shared_store(setup.store_fd))
    send_message(leader, loaded=True)
    allocated = receive_message(leader)
    num_blocks = allocated["num_blocks"]
    with load_phase("kv"):
        caches = rank.caches(num_blocks, map_kv(setup.kv_fd, allocated["kv_bytes"]))
    rank.connect()
    with load_phase("build"):
        return rank.follow(caches[setup.rank])


def _post(setup: RankSetup, stage: int, command: Command) -> None:
    """Send a command to the next stage."""
    for fd in setup.next_fds:
        with suppress(BrokenPipeError):  # that a rank has ended is noticed by the leader
            os.write(fd, encode_command(command))


def _report(setup: RankSetup, report: Report) -> None:
    os.write(setup.report_fd, encode_report(report))
