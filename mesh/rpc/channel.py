"""gRPC channels for all outgoing calls inside the mesh."""

import grpc

from mesh.rpc.credentials import TlsIdentity
from mesh.rpc.server import KEEPALIVE_MS, MAX_MESSAGE_BYTES

NO_PROXY = ("grpc.enable_http_proxy", 0)

_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # Members are reached directly: a proxy of the environment (http_proxy) would see the mesh key and all KV.
    NO_PROXY,
    # Reconnect within a second to a worker that restarts at the same address.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Limit on the time to connect. Where packets vanish, the system repeats the first one ever more rarely, so that an
    # attempt that began before the network was back notices late.
    ("grpc.min_reconnect_backoff_ms", 5000),
)


def open_channel(
    address: str, tls: TlsIdentity | None = None, *, own_connection: bool = False, keepalive_ms: int = KEEPALIVE_MS
) -> grpc.aio.Channel:
    """Open a channel to `address`, in plaintext without `tls`. `own_connection` shares no socket with other channels,
    so that control messages do not wait behind KV payload. The server must allow a ping every `keepalive_ms`.
    """
    options = [
        *_OPTIONS,
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms // 2),
        *((("grpc.use_local_subchannel_pool", 1),) if own_connection else ()),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, *tls.channel_options()])
