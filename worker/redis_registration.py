"""The worker's side of the Redis registry: signs each heartbeat, stores it under a key that expires, and publishes it.

tandem:worker:<id>   the newest heartbeat, for routers that start later; expires RECORD_TTL_S after the worker's death
tandem:workers       ids of all workers, so that routers need not scan the keys
tandem:beats         channel: every heartbeat and snapshot of every worker
tandem:asks:<id>     channel: a router that missed cache events requests a snapshot, or a router refuses the worker
"""

import asyncio
import contextlib
from functools import partial

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from mesh import wire
from mesh.domain.worker import HEARTBEAT_INTERVAL_S, WorkerState
from mesh.logs import LogLimit
from mesh.redis_connection import (
    FAILURES,
    HEARTBEATS,
    RECORD_TTL_S,
    WORKERS,
    ask_channel,
    name_in,
    record_key,
    require_registry,
    stay_connected,
)
from mesh.rpc.credentials import MeshKey
from mesh.signed_messages import MessageSigner, Refused
from mesh.tasks import cancel_all, require_not_cancelled
from mesh.v1 import worker_pb2
from worker.registration import Registration

log = structlog.get_logger(__name__)

_SNAPSHOT_INTERVAL_S = 0.5
_ASK_WAIT_S = 1.0
_LEAVE_S = 0.5


class RedisRegistration:
    """Keeps one worker registered in Redis, with the heartbeats of its Registration. Raises ConfigurationError."""

    def __init__(self, url: str, key: MeshKey | None, registration: Registration) -> None:
        self._url = url
        self._signer = MessageSigner(require_registry(url, key))
        self._registration = registration
        self._refusals = LogLimit(burst=1, lines_per_s=0)

    async def run(self) -> None:
        """Stay registered until a last heartbeat, or until cancelled. Either way unregister."""
        await stay_connected(self._url, "registration", self._stay_registered)

    async def _stay_registered(self, redis: Redis) -> None:
        async with redis.pubsub() as letters:
            # Subscribe before the first heartbeat, because a router may reply to it.
            await letters.subscribe(name_in(redis, ask_channel(self._registration.info.worker_id)))
            require_not_cancelled()
            await self._send_and_listen(redis, letters)

    async def _send_and_listen(self, redis: Redis, letters: PubSub) -> None:
        tasks = [
            asyncio.create_task(
                self._registration.send_heartbeats(partial(self._publish, redis), HEARTBEAT_INTERVAL_S)
            ),
            asyncio.create_task(self._listen(letters)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._leave(redis)  # the last heartbeat has been sent
        except asyncio.CancelledError:
            with contextlib.suppress(*FAILURES):
                async with asyncio.timeout(_LEAVE_S):
                    if not self._registration.state.is_gone:
                        await self._publish_loss(redis)
                    await self._leave(redis)
            raise
        finally:
            await cancel_all(tasks)

    async def _listen(self, letters: PubSub) -> None:
        """Serve requests of routers. Anybody with access to Redis can request snapshots, so their rate is limited."""
        while True:
            require_not_cancelled()
            message = await letters.get_message(ignore_subscribe_messages=True, timeout=_ASK_WAIT_S)
            if message is None:
                continue
            if message["data"]:
                self._note_refusal(message["data"])
            else:
                self._registration.ask_snapshot()
                await asyncio.sleep(_SNAPSHOT_INTERVAL_S)

    def _note_refusal(self, letter: bytes) -> None:
        """Log the refusal once. The worker stays registered: another router may accept it, or this one after an
        update."""
        try:
            reason = self._signer.verify_refusal(self._registration.info.incarnation, letter)
        except Refused:
            return
        if self._refusals.admit(reason) is not None:
            log.error("a router refuses this worker", worker=self._registration.info.worker_id, error=reason)

    async def _publish(self, redis: Redis, request: worker_pb2.RegisterRequest) -> None:
        """Sign and publish one message. A heartbeat is also stored for routers that start later."""
        signed = self._signer.sign(self._registration.info, request)
        worker_id = self._registration.info.worker_id
        async with redis.pipeline(transaction=False) as pipe:
            if request.HasField("heartbeat"):
                pipe.set(name_in(redis, record_key(worker_id)), signed, px=int(RECORD_TTL_S * 1000))
                pipe.zadd(name_in(redis, WORKERS), {worker_id: 0})
            pipe.publish(name_in(redis, HEARTBEATS), signed)
            await pipe.execute()
        require_not_cancelled()

    async def _publish_loss(self, redis: Redis) -> None:
        """Tell the routers, which need not wait for the record to expire then."""
        loss = worker_pb2.Heartbeat(state=wire.state_to_proto(WorkerState.LOST))
        await redis.publish(
            name_in(redis, HEARTBEATS),
            self._signer.sign(self._registration.info, worker_pb2.RegisterRequest(heartbeat=loss)),
        )

    async def _leave(self, redis: Redis) -> None:
        async with redis.pipeline(transaction=False) as pipe:
            pipe.delete(name_in(redis, record_key(self._registration.info.worker_id)))
            pipe.zrem(name_in(redis, WORKERS), self._registration.info.worker_id)
            await pipe.execute()
