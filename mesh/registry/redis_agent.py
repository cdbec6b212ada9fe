"""The worker's side of the Redis registry: each beat is signed, kept under a key that expires, and published.

tandem:worker:<id>   the newest beat, for routers that come later; gone RECORD_TTL_S after the worker
tandem:workers       ids, so that nobody has to scan
tandem:beats         channel: every beat and snapshot of every worker
tandem:asks:<id>     channel: a router has lost track of this worker's cache and asks for a snapshot; or refuses it
"""

import asyncio
import contextlib

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from mesh import wire
from mesh.domain.worker import WorkerState
from mesh.registry.redis_connection import FAILURES, PREFIX, require_not_cancelled, require_registry, stay_connected
from mesh.registry.redis_records import MAX_EVENTS, MAX_SNAPSHOT_BLOCKS, RecordSeal, Refused
from mesh.registry.servicer import HEARTBEAT_INTERVAL_S
from mesh.rpc.credentials import MeshKey
from mesh.worker.agent import RegistryAgent
from tandem.v1 import worker_pb2

log = structlog.get_logger(__name__)

BEATS = f"{PREFIX}beats"
WORKERS = f"{PREFIX}workers"
RECORD_TTL_S = 5.0

_SNAPSHOT_INTERVAL_S = 0.5
_ASK_WAIT_S = 1.0
_LEAVE_S = 0.5


def record_key(worker_id: str) -> str:
    """Where a worker's newest beat is."""
    return f"{PREFIX}worker:{worker_id}"


def ask_channel(worker_id: str) -> str:
    """Where routers ask a worker for a snapshot, or say that they cannot use it."""
    return f"{PREFIX}asks:{worker_id}"


class RedisAgent:
    """Keeps one worker in the registry; what it says comes from its RegistryAgent. Raises ConfigurationError."""

    def __init__(self, url: str, key: MeshKey | None, agent: RegistryAgent) -> None:
        self._url = url
        self._seal = RecordSeal(require_registry(url, key))
        self._agent = agent
        self._refusals: set[str] = set()

    async def run(self) -> None:
        """Stay registered until cancelled, then say good-bye."""
        await stay_connected(self._url, "registration", self._stay_registered)

    async def _stay_registered(self, redis: Redis) -> None:
        async with redis.pubsub() as letters:
            # Before the first beat: it may be answered.
            await letters.subscribe(ask_channel(self._agent.info.worker_id))
            await self._beat_and_listen(redis, letters)

    async def _beat_and_listen(self, redis: Redis, letters: PubSub) -> None:
        publication = _Publication(redis, self._seal, self._agent)
        tasks = [
            asyncio.create_task(self._agent.beat(publication, HEARTBEAT_INTERVAL_S)),
            asyncio.create_task(self._listen(letters)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            with contextlib.suppress(*FAILURES):
                async with asyncio.timeout(_LEAVE_S):
                    await self._leave(redis)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, letters: PubSub) -> None:
        """Snapshots are asked for by anybody who can reach Redis, so at most one goes out at a time."""
        while True:
            require_not_cancelled()
            message = await letters.get_message(ignore_subscribe_messages=True, timeout=_ASK_WAIT_S)
            if message is None:
                continue
            if message["data"]:
                self._note_refusal(message["data"])
            else:
                self._agent.ask_snapshot()
                await asyncio.sleep(_SNAPSHOT_INTERVAL_S)

    def _note_refusal(self, letter: bytes) -> None:
        """Tell the operator once. The worker stays: another router may be able to use it, or this one after an
        update."""
        try:
            reason = self._seal.open_refusal(self._agent.info.incarnation, letter)
        except Refused:
            return
        if reason not in self._refusals:
            self._refusals.add(reason)
            log.error("a router refuses this worker", worker=self._agent.info.worker_id, error=reason)

    async def _leave(self, redis: Redis) -> None:
        """Routers need not wait for silence."""
        info = self._agent.info
        farewell = worker_pb2.Heartbeat(state=wire.state_to_proto(WorkerState.LOST))
        async with redis.pipeline(transaction=False) as pipe:
            pipe.publish(BEATS, self._seal.seal(info, worker_pb2.RegisterRequest(heartbeat=farewell)))
            pipe.delete(record_key(info.worker_id))
            pipe.zrem(WORKERS, info.worker_id)
            await pipe.execute()


class _Publication:
    """A BeatSink: where RegistryAgent writes its messages to."""

    def __init__(self, redis: Redis, seal: RecordSeal, agent: RegistryAgent) -> None:
        self._redis = redis
        self._seal = seal
        self._info = agent.info
        self._registered = False

    async def write(self, request: worker_pb2.RegisterRequest) -> None:
        """Sign and publish one message; a heartbeat is kept for later routers too."""
        _bound(request)
        sealed = self._seal.seal(self._info, request)
        worker_id = self._info.worker_id
        async with self._redis.pipeline(transaction=False) as pipe:
            if request.HasField("heartbeat"):
                pipe.set(record_key(worker_id), sealed, px=int(RECORD_TTL_S * 1000))
                pipe.zadd(WORKERS, {worker_id: 0})
            pipe.publish(BEATS, sealed)
            await pipe.execute()
        require_not_cancelled()
        if not self._registered:
            self._registered = True
            log.info("registered", worker=worker_id)


def _bound(request: worker_pb2.RegisterRequest) -> None:
    """Leave out what is too much. Left-out events look like a gap, and routers ask for a snapshot; left-out hashes
    of a snapshot are prefixes that routers don't know of."""
    if request.HasField("snapshot"):
        del request.snapshot.block_hashes[:-MAX_SNAPSHOT_BLOCKS]
    elif len(request.heartbeat.cache_events.events) > MAX_EVENTS:
        cache_events = request.heartbeat.cache_events
        cache_events.first_number += len(cache_events.events)
        del cache_events.events[:]
