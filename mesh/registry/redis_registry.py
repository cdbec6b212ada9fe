"""The router's side of the Redis registry: follows all workers and feeds a Membership, which is what routers read.

    beat published ─▶ signature, freshness, never seen before? ─▶ Membership: join, heartbeat, cache events
                          └─ no: refused                             └─ gap in the events: ask for a snapshot
    every second: newest beats from their keys, for those whose messages were lost

While Redis is away the Membership stays as it is, and silent workers are asked directly (DirectChecks). The same check
saves a worker that alone has lost its way to Redis. Workers write themselves again when Redis returns, so nothing in
Redis has to survive.
"""

import asyncio
import time

import structlog
from redis.asyncio import Redis

from mesh import wire
from mesh.domain.errors import LayoutMismatch
from mesh.domain.worker import CacheEvent, WorkerInfo, WorkerState
from mesh.registry.membership import Membership
from mesh.registry.redis_agent import BEATS, WORKERS, ask_channel, record_key
from mesh.registry.redis_connection import LogLimit, require_not_cancelled, require_registry, stay_connected
from mesh.registry.redis_probe import DirectChecks
from mesh.registry.redis_records import Beat, RecordSeal, Refused, ReplayGuard
from mesh.registry.servicer import FORGET_S, HEARTBEAT_INTERVAL_S, SILENT_S
from mesh.rpc.credentials import Credentials

log = structlog.get_logger(__name__)

_MAX_WORKERS = 10_000
_LOAD_INTERVAL_S = 1.0
_DEAF_S = 3.0
# The same beat comes by its key and by the channel; that is no replay.
_OVERLAP_S = 2.0
_PROBE_AFTER_S = 3 * HEARTBEAT_INTERVAL_S


class RedisRegistry:
    """Feeds one router's Membership (clock: time.monotonic). Run `run()` as a task; it ends only when cancelled."""

    def __init__(self, url: str, membership: Membership, credentials: Credentials) -> None:
        key = require_registry(url, credentials.key)
        self._url = url
        self._membership = membership
        self._seal = RecordSeal(key)
        self._guard = ReplayGuard()
        self._checks = DirectChecks(membership, credentials)
        self._log_limit = LogLimit()
        self._misfits: dict[str, str] = {}  # incarnations that cannot work here, by worker id
        self._letters: dict[str, bytes] = {}  # to be sent, by worker id: a refusal, or nothing: a snapshot is wanted
        self.connected = asyncio.Event()
        """Set while this router hears of beats."""

    async def run(self) -> None:
        """Follow the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(stay_connected(self._url, "discovery", self._follow))
            group.create_task(self._watch_silence())

    async def _follow(self, redis: Redis) -> None:
        try:
            async with redis.pubsub() as beats:
                await beats.subscribe(BEATS)
                loaded_s = heard_s = 0.0
                while True:
                    require_not_cancelled()
                    if time.monotonic() - loaded_s > _LOAD_INTERVAL_S:
                        await beats.ping()
                        await self._load(redis)
                        loaded_s = time.monotonic()
                        heard_s = heard_s or loaded_s
                        self.connected.set()
                    message = await beats.get_message(ignore_subscribe_messages=True, timeout=HEARTBEAT_INTERVAL_S)
                    if message is not None:
                        heard_s = time.monotonic()
                        if message["type"] == "message":
                            self._take(message["data"])
                    elif time.monotonic() - heard_s > _DEAF_S:
                        raise TimeoutError("the subscription is silent")
                    await self._send_letters(redis)
        finally:
            self.connected.clear()

    async def _load(self, redis: Redis) -> None:
        """Take the newest beat of each worker from its key, and forget the ids of those whose keys have expired."""
        ids = [str(name, "utf-8", "replace") for name in await _members(redis)]
        records = await redis.mget([record_key(name) for name in ids]) if ids else []
        for record in records:
            if isinstance(record, bytes):
                self._take(record)
        expired = [name for name, record in zip(ids, records, strict=True) if record is None]
        if expired:
            await redis.zrem(WORKERS, *expired)
        self._misfits = {name: incarnation for name, incarnation in self._misfits.items() if name in ids}
        self._guard.forget_stale(int(time.time() * 1e6))

    async def _send_letters(self, redis: Redis) -> None:
        letters, self._letters = self._letters, {}
        for worker_id, letter in letters.items():
            await redis.publish(ask_channel(worker_id), letter)

    def _take(self, sealed: bytes) -> None:
        try:
            beat = self._seal.open(sealed)
            if self._guard.is_new(beat):
                self._apply(beat)
            elif self._guard.lag_s(beat) > _OVERLAP_S:
                raise Refused("it is older than what its worker has said before: replayed")
        except Refused as refused:
            if self._log_limit.allows(str(refused)):
                log.warning("registry message refused", cause=str(refused))

    def _apply(self, beat: Beat) -> None:
        info, message = beat.info, beat.message
        if message.HasField("snapshot"):
            snapshot = message.snapshot
            self._membership.replace_cache(
                info.worker_id, info.incarnation, snapshot.next_number, snapshot.block_hashes
            )
            return
        if not message.HasField("heartbeat"):
            return
        state = wire.state_from_proto(message.heartbeat.state)
        if state is WorkerState.LOST:
            self._membership.lose(info.worker_id, info.incarnation)
            log.warning("worker left", worker=info.worker_id, role=info.role.value)
        elif self._has_joined(info):
            load = wire.load_from_proto(message.heartbeat.load)
            self._membership.heartbeat(info.worker_id, info.incarnation, load, state)
            cache_events = message.heartbeat.cache_events
            events = [CacheEvent(event.block_hash, event.evicted) for event in cache_events.events]
            is_followed = self._membership.apply_cache_events(
                info.worker_id, info.incarnation, cache_events.first_number, events
            )
            if not is_followed:
                self._letters[info.worker_id] = b""

    def _has_joined(self, info: WorkerInfo) -> bool:
        """Join a worker that is new, or back as another run. False if it does not fit."""
        known = self._membership.find(info.worker_id)
        if known is not None and known.info.incarnation == info.incarnation:
            return True
        try:
            self._membership.join(info)
        except LayoutMismatch as mismatch:
            if self._misfits.get(info.worker_id) != info.incarnation:
                self._misfits[info.worker_id] = info.incarnation
                log.error("worker refused", worker=info.worker_id, address=info.address, error=str(mismatch))
            # Said again with every beat: the worker may not have listened yet.
            self._letters[info.worker_id] = self._seal.seal_refusal(info.incarnation, str(mismatch))
            return False
        self._misfits.pop(info.worker_id, None)
        log.info("worker joined", worker=info.worker_id, role=info.role.value, address=info.address, pid=info.pid)
        return True

    async def _watch_silence(self) -> None:
        """Ask the silent, lose those who don't answer. While Redis is away, ask the lost as well: no beat can come."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            silent = [
                view
                for view in self._membership.workers()
                if time.monotonic() - view.last_seen_s > _PROBE_AFTER_S
                and (view.state is not WorkerState.LOST or not self.connected.is_set())
            ]
            await self._checks.check(silent)
            self._membership.expire(silent_s=SILENT_S, forget_s=FORGET_S)


async def _members(redis: Redis) -> list[bytes]:
    members: list[bytes] = await redis.zrange(WORKERS, 0, _MAX_WORKERS - 1)  # type: ignore[assignment]
    return members
