"""The router's side of the Redis registry: follows all workers and feeds a Membership.

    heartbeat published ─▶ signature valid, fresh, not a replay? ─▶ Membership: join, heartbeat, cache events
                          └─ no: refused                          └─ gap in the events: request a snapshot
    every second: read the newest heartbeat of every worker from its key, in case published messages were lost

While Redis, or the network to it, is unavailable the Membership stays as it is, and silent workers are checked directly
(DirectChecks). The same check keeps a worker that alone has lost its connection to Redis. Workers register again when
Redis returns, so nothing in Redis has to survive.

RedisCoordination, the Coordination of routers that share workers and permits, runs all this and the shared limiters.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from mesh import wire
from mesh.domain.errors import InvalidRequest, LayoutMismatch
from mesh.domain.worker import HEARTBEAT_INTERVAL_S, WorkerInfo, WorkerLoad, WorkerState
from mesh.logs import LogLimit
from mesh.process import run_for_life
from mesh.redis_connection import (
    FAILURES,
    HEARTBEATS,
    PREFIX,
    TRAFFIC,
    WORKERS,
    ask_channel,
    cause_of,
    name_in,
    open_redis,
    record_key,
    require_registry,
    stay_connected,
)
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials
from mesh.signed_messages import FreshnessGuard, MessageSigner, Refused, WorkerMessage, signature_of
from mesh.tasks import cancel_all, is_cancelled, require_not_cancelled
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.admission.limiter import ConcurrencyLimiter
from router.admission.shared_limiter import SharedLimiter
from router.settings import RouterSettings
from router.traffic import Traffic, TrafficTable, traffic_from_json, traffic_to_json
from router.workers.connections import RouterIdentity
from router.workers.coordination import FORGET_S, SILENT_S, TwinWatch, apply_report, worker_joined, worker_left
from router.workers.membership import Membership, WorkerView

log = structlog.get_logger(__name__)

_MAX_WORKERS = 10_000
_LOAD_INTERVAL_S = 1.0
_DEAF_S = 3.0
# The same heartbeat comes both from its key and over the channel; that is no replay attack.
_OVERLAP_S = 2.0
_PROBE_AFTER_S = 3 * HEARTBEAT_INTERVAL_S

_HEALTH_TIMEOUT_S = 1.0
# A worker in a long step answers its health check, but not this call.
_LOAD_TIMEOUT_S = 0.5
_MAX_CONCURRENT = 32

# KEYS: a sorted set with the router that acts, by the end of its time. ARGV: router id, milliseconds.
_ACT = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) > 0 and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""


class RedisRegistry:
    """Feeds one router's Membership (clock: time.monotonic). Run `run()` as a task; it ends only when cancelled."""

    def __init__(self, url: str, membership: Membership, credentials: Credentials, traffic: Traffic) -> None:
        key = require_registry(url, credentials.key)
        self._url = url
        self._membership = membership
        self._traffic = traffic
        self._signer = MessageSigner(key)
        self._guard = FreshnessGuard()
        self._checks = DirectChecks(membership, credentials)
        self._twins = TwinWatch(membership)
        self._log_limit = LogLimit(burst=1)
        self._taken: dict[str, bytes] = {}  # the signature of the newest message of each worker, by worker id
        self._heard: dict[str, int] = {}  # the number of the newest message over the channel, by worker id
        self._misfits: dict[str, str] = {}  # refused incarnations, by worker id
        self._outbox: dict[str, bytes] = {}  # messages to send, by worker id: a refusal, or empty to request a snapshot
        self.connected = asyncio.Event()
        """Set while this router receives heartbeats."""

    async def run(self) -> None:
        """Follow the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(stay_connected(self._url, "discovery", self._follow))
            group.create_task(self._watch_silence())

    async def _follow(self, redis: Redis) -> None:
        try:
            async with redis.pubsub() as heartbeats:
                await heartbeats.subscribe(name_in(redis, HEARTBEATS))
                loaded_s = heard_s = 0.0
                while True:
                    require_not_cancelled()
                    if time.monotonic() - loaded_s > _LOAD_INTERVAL_S:
                        await heartbeats.ping()
                        await self._load(redis)
                        await self.exchange_traffic(redis)
                        loaded_s = time.monotonic()
                        heard_s = heard_s or loaded_s
                        self.connected.set()
                    message = await heartbeats.get_message(ignore_subscribe_messages=True, timeout=HEARTBEAT_INTERVAL_S)
                    if message is not None:
                        heard_s = time.monotonic()
                        if message["type"] == "message":
                            self._take(message["data"], over_channel=True)
                    elif time.monotonic() - heard_s > _DEAF_S:
                        raise TimeoutError("the subscription is silent")
                    await self._send_outbox(redis)
        finally:
            self.connected.clear()

    async def _load(self, redis: Redis) -> None:
        """Read the newest heartbeat of each worker from its key; remove the ids of workers whose keys have expired."""
        ids = [str(name, "utf-8", "replace") for name in await _members(redis)]
        records = await redis.mget([name_in(redis, record_key(name)) for name in ids]) if ids else []
        for name, record in zip(ids, records, strict=True):
            # Nearly all have come over the channel before; opening them again would cost as much as the first time.
            if isinstance(record, bytes) and signature_of(record) != self._taken.get(name):
                self._take(record)
        known = set(ids)
        expired = [name for name, record in zip(ids, records, strict=True) if record is None]
        if expired:
            await redis.zrem(name_in(redis, WORKERS), *expired)
        self._taken = {name: signature for name, signature in self._taken.items() if name in known}
        self._heard = {name: number for name, number in self._heard.items() if name in known}
        self._misfits = {name: incarnation for name, incarnation in self._misfits.items() if name in known}
        self._guard.forget_silent()

    async def exchange_traffic(self, redis: Redis) -> None:
        """Adopt the shares in Redis that are newer than this router's; write those there that are older, or lost."""
        [signed] = await redis.mget([name_in(redis, TRAFFIC)])
        found = TrafficTable({})
        try:
            if isinstance(signed, bytes):
                found = traffic_from_json(self._signer.verify_traffic(signed))
        except (Refused, InvalidRequest) as refused:
            if self._log_limit.admit(str(refused)) is not None:
                log.warning("traffic refused", cause=str(refused))
        self._traffic.adopt(found)
        if self._traffic.table.set_at != found.set_at:
            try:
                await redis.set(
                    name_in(redis, TRAFFIC), self._signer.sign_traffic(traffic_to_json(self._traffic.table))
                )
            except ResponseError as error:  # the user may not SET; discovery must go on
                if self._log_limit.admit(str(error)) is not None:
                    log.warning("other routers do not get the traffic of this one", cause=str(error))

    async def _send_outbox(self, redis: Redis) -> None:
        messages, self._outbox = self._outbox, {}
        for worker_id, message in messages.items():
            await redis.publish(name_in(redis, ask_channel(worker_id)), message)

    def _take(self, signed: bytes, *, over_channel: bool = False) -> None:
        try:
            received = self._signer.verify(signed)
            is_next = over_channel and self._is_next(received)
            if self._guard.is_new(received):
                self._taken[received.info.worker_id] = signature_of(signed)
                self._apply(received)
            elif self._guard.lag_s(received) > _OVERLAP_S:
                if not is_next:
                    raise Refused("it is older than a heartbeat that its worker has sent before: replayed")
            elif received.message.HasField("heartbeat"):
                self._twins.note(received.info, wire.state_from_proto(received.message.heartbeat.state))
        except Refused as refused:
            if self._log_limit.admit(str(refused)) is not None:
                log.warning("registry message refused", cause=str(refused))

    def _is_next(self, received: WorkerMessage) -> bool:
        """Record a message of the channel. Return True if it is the newest there: a router that was stopped for seconds
        finds a newer one under the worker's key, and then reads those that have waited in the channel."""
        is_next = received.number > self._heard.get(received.info.worker_id, 0)
        if is_next:
            self._heard[received.info.worker_id] = received.number
        return is_next

    def _apply(self, received: WorkerMessage) -> None:
        info, message = received.info, received.message
        if message.HasField("heartbeat"):
            state = wire.state_from_proto(message.heartbeat.state)
            if state.is_gone:
                worker_left(self._membership, info, state)
                return
            if not self._has_joined(info):
                return
        elif not message.HasField("snapshot"):
            return
        if not apply_report(self._membership, info, message):
            self._outbox[info.worker_id] = b""

    def _has_joined(self, info: WorkerInfo) -> bool:
        """Add a worker that is new, has restarted or was gone. False if it is incompatible."""
        member = self._membership.find(info.worker_id)
        if member is not None and member.info.incarnation == info.incarnation and not member.state.is_gone:
            return True
        try:
            worker_joined(self._membership, info)
        except LayoutMismatch as mismatch:
            if self._misfits.get(info.worker_id) != info.incarnation:
                self._misfits[info.worker_id] = info.incarnation
                log.error("worker refused", worker=info.worker_id, address=info.address, error=str(mismatch))
            # Sent again with every heartbeat: the worker may not have subscribed yet.
            self._outbox[info.worker_id] = self._signer.sign_refusal(info.incarnation, str(mismatch))
            return False
        self._misfits.pop(info.worker_id, None)
        return True

    async def _watch_silence(self) -> None:
        """Check silent workers directly, and expire those that do not answer.

        While Redis is unavailable, lost workers are checked as well, because no heartbeat can come.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            silent = [
                view
                for view in self._membership.views()
                if time.monotonic() - view.last_seen_s > _PROBE_AFTER_S
                and (not view.state.is_gone or not self.connected.is_set())
            ]
            began_s = time.monotonic()
            await self._checks.check(silent)
            # Where many do not answer, the checks take longer than SILENT_S, and a worker that answered first is alive.
            silent_s = max(SILENT_S, time.monotonic() - began_s)
            self._membership.expire(silent_s=silent_s, forget_s=FORGET_S)


class RedisCoordination:
    """A Coordination through Redis: routers share the workers and the cap on permits. Raises ConfigurationError."""

    address = ""

    def __init__(
        self, settings: RouterSettings, membership: Membership, identity: RouterIdentity, traffic: Traffic
    ) -> None:
        self._registry = RedisRegistry(settings.registry_url, membership, identity.credentials, traffic)
        self._settings = settings
        self._router_id = identity.router_id
        self._permits: list[SharedLimiter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def limiter_for(self, model: str) -> ConcurrencyLimiter:
        cap = self._settings.max_concurrent_requests
        permits = SharedLimiter(self._settings.registry_url, self._router_id, cap, model=model)
        self._permits.append(permits)
        return permits

    async def tell_traffic(self) -> None:
        """If Redis is away, they learn of it when it is back."""
        try:
            async with open_redis(self._settings.registry_url) as redis:
                await self._registry.exchange_traffic(redis)
        except FAILURES as error:
            log.warning("redis is away", what="traffic", error=cause_of(error))

    async def may_act(self, purpose: str, seconds: float) -> bool:
        """False while Redis is unavailable."""
        try:
            async with open_redis(self._settings.registry_url) as redis:
                acting = name_in(redis, f"{PREFIX}acting:{purpose}")
                ours = await redis.eval(_ACT, 1, acting, self._router_id, int(1000 * seconds))
        except FAILURES as error:
            log.warning("redis is away", what=purpose, error=cause_of(error))
            return False
        require_not_cancelled()  # the caller asks again and again
        return bool(ours)

    async def start(self) -> None:
        runs = (self._registry.run(), *(permits.run() for permits in self._permits))
        self._tasks = [run_for_life(run) for run in runs]

    async def stop(self) -> None:
        """Release all leases at once, so that other routers need not wait until they expire."""
        await cancel_all(self._tasks)
        await asyncio.gather(*(permits.leave() for permits in self._permits))


async def _members(redis: Redis) -> list[bytes]:
    members: list[bytes] = await redis.zrange(name_in(redis, WORKERS), 0, _MAX_WORKERS - 1)  # type: ignore[assignment]
    return members


class DirectChecks:
    """Calls workers at the addresses that they have registered."""

    def __init__(self, membership: Membership, credentials: Credentials) -> None:
        self._membership = membership
        self._credentials = credentials
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def check(self, views: Iterable[WorkerView]) -> None:
        """Count an answer as a heartbeat. Without an answer nothing changes: `expire` handles silent workers."""
        await asyncio.gather(*(self._check(view) for view in views))

    async def _check(self, view: WorkerView) -> None:
        async with self._slots:
            try:
                async with open_channel(view.info.address, self._credentials.tls, own_connection=True) as channel:
                    serving = await _is_serving(channel)
                    load = await self._load(channel, view)
            except grpc.aio.AioRpcError:
                return
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                return
        if load is None:
            self._membership.lose(view.info)
            return
        now = self._membership.find(view.info.worker_id)
        if now is None or now.last_seen_s != view.last_seen_s:
            return  # a heartbeat has arrived in the meantime
        # The last heartbeat tells why a worker does not serve.
        state_if_not_serving = (
            now.state if now.state in (WorkerState.STALLED, WorkerState.DRAINING) else WorkerState.DRAINING
        )
        state = WorkerState.READY if serving else state_if_not_serving
        with suppress(LayoutMismatch):  # it stays lost, and is told when Redis is back
            self._membership.heartbeat(view.info, load, state)

    async def _load(self, channel: grpc.aio.Channel, view: WorkerView) -> WorkerLoad | None:
        """Return the load; None if another run of a worker has taken over the address."""
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).GetWorker(
                worker_pb2.GetWorkerRequest(), timeout=_LOAD_TIMEOUT_S, metadata=self._credentials.metadata()
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return view.load
            raise
        is_same = answer.record.incarnation == view.info.incarnation
        return wire.load_from_proto(answer.load) if is_same else None


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
