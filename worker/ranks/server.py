"""The gRPC server into which ranks dial, and the facts on which a worker and its ranks on other machines must agree.

Calls run on threads, see listener.py.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import grpc
import torch

import tandem
from mesh.domain.host import join_host
from mesh.domain.worker import PROTOCOL_VERSION
from mesh.rpc.server import MAX_MESSAGE_BYTES, Listen, require_listenable
from mesh.v1 import rank_pb2_grpc

RANK_KEEPALIVE_MS = 8_000
"""A machine that vanishes is noticed within 1.5 times this time. Shorter than in the rest of the mesh: all ranks wait
for the one that is lost.
"""


def bind_server(listen: Listen, servicer: rank_pb2_grpc.RanksServicer, *, max_calls: int) -> tuple[grpc.Server, int]:
    """A server that has its port, and is still to start. Raises ConfigurationError."""
    require_listenable(listen)
    server = grpc.server(
        _DaemonThreads(),
        options=[
            ("grpc.keepalive_time_ms", RANK_KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", RANK_KEEPALIVE_MS // 2),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", RANK_KEEPALIVE_MS // 4),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=max_calls,
    )
    address = join_host(listen.host, listen.port)
    if listen.tls is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, listen.tls.server_credentials())
    rank_pb2_grpc.add_RanksServicer_to_server(servicer, server)
    return server, port


class _DaemonThreads(Executor):
    """A thread for each call. Python does not wait for them when the process ends, as it would for a pool's."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="rank-call", daemon=True).start()
        return future


def versions() -> str:
    """The versions that must be equal in all ranks. They divide the model by the same code, and gloo has no version."""
    return f"tandem {tandem.__version__}, protocol {PROTOCOL_VERSION}, torch {torch.__version__.partition('+')[0]}"
