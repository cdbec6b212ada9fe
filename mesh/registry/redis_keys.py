"""Names of the keys and channels in Redis that workers and routers share."""

from mesh.registry.redis_connection import PREFIX

BEATS = f"{PREFIX}beats"
WORKERS = f"{PREFIX}workers"
RECORD_TTL_S = 5.0


def record_key(worker_id: str) -> str:
    """The key that holds the worker's newest beat."""
    return f"{PREFIX}worker:{worker_id}"


def ask_channel(worker_id: str) -> str:
    """The channel on which routers request a snapshot from the worker, or refuse it."""
    return f"{PREFIX}asks:{worker_id}"
