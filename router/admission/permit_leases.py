"""Permit leases in Redis: sorted sets of permit ids by expiry, changed only by scripts, so that counts are exact.

    tandem:permits              permit ids of all routers, by expiry
    tandem:permits:of:<tenant>  permit ids of one tenant, by expiry
    tandem:routers              router ids, by expiry
    tandem:settling             the routers that have returned after Redis lost its data. Exists for a while after
                                leases were written anew, while other routers' leases may still be missing

Each model has its own keys: `tandem:permits@<model>`, and so on. All times are Redis's own clock, in milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from mesh.redis_connection import PREFIX, name_in

_NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

# Settling lasts at least `least`, and until all `known` routers have returned, but at most one lease: a router that was
# silent for that long holds no leases.
_SETTLING = """
local function is_settling(key, lease, least, known)
  local left = redis.call('PTTL', key)
  return left > 0 and (left > lease - least or redis.call('SCARD', key) < known)
end
"""

# Leases that expired while their router lived are missing, too: Redis was out of reach for longer than a lease, and so
# perhaps for others.
# KEYS: permits, permits of the tenant, routers, settling
# ARGV: lease, least settling time, known routers, router id or '', 1 if the router has been here before, number of
# released ids, released ids, held ids
_KEEP = (
    _NOW
    + _SETTLING
    + """
local lease, released = tonumber(ARGV[1]), tonumber(ARGV[6])
for i = 7, 6 + released do
  redis.call('ZREM', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], ARGV[i])
end
for i = 1, 3 do redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now) end
local returning = ARGV[5] == '1'
local missing = returning and not redis.call('ZSCORE', KEYS[3], ARGV[4])
for i = 7 + released, #ARGV do
  if redis.call('ZADD', KEYS[1], now + lease, ARGV[i]) == 1 then missing = true end
  redis.call('ZADD', KEYS[2], now + lease, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 2 * lease)
redis.call('PEXPIRE', KEYS[2], 2 * lease)
if missing or (returning and redis.call('EXISTS', KEYS[4]) == 1) then redis.call('SADD', KEYS[4], ARGV[4]) end
if missing then redis.call('PEXPIRE', KEYS[4], lease) end
local settling = 1
if not is_settling(KEYS[4], lease, tonumber(ARGV[2]), tonumber(ARGV[3])) then
  redis.call('PEXPIRE', KEYS[4], 0)
  settling = 0
end
if ARGV[4] ~= '' then
  redis.call('ZADD', KEYS[3], now + lease, ARGV[4])
  redis.call('PEXPIRE', KEYS[3], 2 * lease)
end
return {redis.call('ZCARD', KEYS[3]), settling, redis.call('ZCARD', KEYS[1])}
"""
)

# KEYS: as above. ARGV: lease, least settling time, known routers, router id, cap, cap of the tenant or -1, the router's
# allowance while leases of others may be missing, the number it holds, ids. If the router itself is missing, Redis has
# lost leases, even if no router has reported it yet.
_TAKE = (
    _NOW
    + _SETTLING
    + """
local lease, count = tonumber(ARGV[1]), #ARGV - 8
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local held, held_by_tenant = redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2])
local tenant_cap = tonumber(ARGV[6])
if tenant_cap >= 0 and held_by_tenant + count > tenant_cap then return {0, 1, held_by_tenant, 1} end
if held + count > tonumber(ARGV[5]) then return {0, 0, held, 0} end
local settling = 0
if is_settling(KEYS[4], lease, tonumber(ARGV[2]), tonumber(ARGV[3])) then settling = 1 end
local known_until = redis.call('ZSCORE', KEYS[3], ARGV[4])
if not known_until or tonumber(known_until) <= now then settling = 1 end
if settling == 1 and ARGV[8] + count > tonumber(ARGV[7]) then return {0, 0, held, 1} end
for i = 9, #ARGV do
  redis.call('ZADD', KEYS[1], now + lease, ARGV[i])
  redis.call('ZADD', KEYS[2], now + lease, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 2 * lease)
redis.call('PEXPIRE', KEYS[2], 2 * lease)
return {1, 0, held + count, settling}
"""
)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The duration of a lease and the interval of renewals."""

    lease_s: float = 5.0
    renew_s: float = 1.0

    @property
    def lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    @property
    def settling_ms(self) -> int:
        """Minimum settling time: all routers renew once within half of it."""
        return int(self.renew_s * 2000)


@dataclass(frozen=True, slots=True)
class Keep:
    """One tenant's permit ids that this router releases and renews."""

    tenant: str
    released: Sequence[str] = ()
    held: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Take:
    """Permit ids to lease. `held`: permits that the router holds; `allowance`: permits it may hold while settling."""

    tenant: str
    tenant_cap: int | None
    cap: int
    ids: Sequence[str]
    allowance: int
    held: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a Take. A refusal is `by_tenant` for the tenant's own cap, with `num_held` permits held, those of
    all routers if `is_total`."""

    granted: bool
    by_tenant: bool
    num_held: int
    is_total: bool


@dataclass(frozen=True, slots=True)
class Known:
    """Routers seen, permits leased by all of them, and whether some of either may be missing."""

    num_routers: int
    num_leased: int
    settling: bool


@dataclass(frozen=True, slots=True)
class PermitExchange:
    """One round trip to Redis: keeps, then takes. `present` keeps the router in the set of known routers, `returning`
    says that it must already be there, and `num_routers` is the last known size of the set.
    """

    present: bool
    num_routers: int = 1
    returning: bool = False
    keeps: list[Keep] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)


class PermitStore:
    """One router's access to the shared permits. Errors of redis are passed through."""

    def __init__(self, router_id: str, times: LeaseTimes, model: str = "") -> None:
        self._router_id = router_id
        self._times = times
        self._of_model = f"@{model}" if model else ""

    async def exchange(self, redis: Redis, exchange: PermitExchange) -> tuple[Known | None, list[Taken]]:
        """Return the known routers (None without a Keep) and an answer to each Take."""
        async with redis.pipeline(transaction=False) as pipe:
            for keep in exchange.keeps:
                pipe.eval(_KEEP, 4, *self._keys(redis, keep.tenant), *self._keep_args(keep, exchange))
            for take in exchange.takes:
                pipe.eval(_TAKE, 4, *self._keys(redis, take.tenant), *self._take_args(take, exchange))
            answers = await pipe.execute()
        num_keeps = len(exchange.keeps)
        answers_to_takes = [
            Taken(bool(yes), bool(mine), int(held), not part) for yes, mine, held, part in answers[num_keeps:]
        ]
        if not num_keeps:
            return None, answers_to_takes
        num_routers, settling, num_leased = answers[num_keeps - 1]
        return Known(int(num_routers), int(num_leased), bool(settling)), answers_to_takes

    async def leave(self, redis: Redis) -> None:
        """Remove the router, which must have released all its permits."""
        await redis.zrem(self._key(redis, "routers"), self._router_id)

    def _keep_args(self, keep: Keep, exchange: PermitExchange) -> list[str | int]:
        router_id = self._router_id if exchange.present else ""
        head = [*self._caution(exchange), router_id, int(exchange.returning)]
        return [*head, len(keep.released), *keep.released, *keep.held]

    def _take_args(self, take: Take, exchange: PermitExchange) -> list[str | int]:
        tenant_cap = -1 if take.tenant_cap is None else take.tenant_cap
        caps = (take.cap, tenant_cap, take.allowance, take.held)
        return [*self._caution(exchange), self._router_id, *caps, *take.ids]

    def _caution(self, exchange: PermitExchange) -> list[str | int]:
        return [self._times.lease_ms, self._times.settling_ms, exchange.num_routers]

    def _keys(self, redis: Redis, tenant: str) -> tuple[str, str, str, str]:
        permits = self._key(redis, "permits")
        return permits, f"{permits}:of:{tenant}", self._key(redis, "routers"), self._key(redis, "settling")

    def _key(self, redis: Redis, name: str) -> str:
        return name_in(redis, f"{PREFIX}{name}{self._of_model}")
