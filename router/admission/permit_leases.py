"""Permit leases in Redis: each router's counts, held by a lease on the router, changed by one script at a time.

    tandem:routers   router ids, by expiry of their leases
    tandem:held      router ids, by the permits that they hold; <router>/<tenant>, by those that are the tenant's
    tandem:rounds    router ids, by the number of their last round trip
    tandem:settling  the routers that have returned after Redis lost its data. Exists for a while after counts were
                     written anew, while other routers' counts may still be missing

All are sorted sets but the last. A renewal costs the same whether the router holds one permit or 100,000. Each model
has its own keys: `tandem:routers@<model>`, and so on. All times are Redis's own clock, in milliseconds.

A router writes its counts as they are, not as they change, so a round trip whose answer was lost does no harm. Rounds
are numbered: one that Redis executes late, after a newer one, changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from mesh.redis_connection import PREFIX, name_in

# A router whose lease has expired holds nothing.
_FORGET = """
local function forget(router)
  redis.call('ZREM', KEYS[1], router)
  redis.call('ZREM', KEYS[2], router)
  redis.call('ZREM', KEYS[3], router)
  local of_tenants = router .. '/'
  for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    if string.sub(name, 1, #of_tenants) == of_tenants then redis.call('ZREM', KEYS[2], name) end
  end
end
"""

# KEYS: routers, held, rounds. ARGV: router id
_LEAVE = _FORGET + "forget(ARGV[1])"

# Settling lasts at least `least`, and until all `known` routers have returned, but at most one lease: a router that was
# silent for that long holds no permits.
#
# Counts are missing in Redis if it does not know a round that it has answered (it lost its data, or was out of reach of
# this router for longer than a lease, and so perhaps of others), or fewer permits than the router holds (it was away,
# and the router took permits of its share).
#
# KEYS: routers, held, rounds, settling
# ARGV: router id, lease, least settling time, known routers, the last round that was answered or 0, this round, permits
# held, number of tenants, a tenant and its permits for each of them; then takes, each of five: tenant, cap of the
# tenant or -1, cap, the router's allowance while counts of others may be missing, number of permits
# Returns routers, 1 while settling, permits of all routers, 1 if this router's counts were missing, and for each take:
# 1 if granted, 1 if the tenant's cap refuses, permits held, 1 if those may not be all
_EXCHANGE = (
    _FORGET
    + """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local router, lease, least, known = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local answered, round, held, num_tenants = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

local function count(name) return tonumber(redis.call('ZSCORE', KEYS[2], name) or 0) end
local function is_settling()
  local left = redis.call('PTTL', KEYS[4])
  return left > 0 and (left > lease - least or redis.call('SCARD', KEYS[4]) < known)
end

if tonumber(redis.call('ZSCORE', KEYS[3], router) or 0) >= round then return {} end

local leases, routers = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), {router}
for i = 1, #leases, 2 do
  if tonumber(leases[i + 1]) <= now then forget(leases[i])
  elseif leases[i] ~= router then routers[#routers + 1] = leases[i] end
end
local missing = tonumber(redis.call('ZSCORE', KEYS[3], router) or 0) < answered or count(router) < held

redis.call('ZADD', KEYS[1], now + lease, router)
redis.call('ZADD', KEYS[2], held, router)
redis.call('ZADD', KEYS[3], round, router)
for i = 9, 8 + 2 * num_tenants, 2 do
  local name = router .. '/' .. ARGV[i]
  if tonumber(ARGV[i + 1]) > 0 then redis.call('ZADD', KEYS[2], ARGV[i + 1], name)
  else redis.call('ZREM', KEYS[2], name) end
end
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], 2 * lease) end

if missing or (answered > 0 and redis.call('EXISTS', KEYS[4]) == 1) then redis.call('SADD', KEYS[4], router) end
if missing then redis.call('PEXPIRE', KEYS[4], lease + 1) end -- Redis counts whole milliseconds
local settling = 1
if not is_settling() then
  redis.call('PEXPIRE', KEYS[4], 0)
  settling = 0
end

local total = 0
for _, other in ipairs(routers) do total = total + count(other) end
local answer = {#routers, settling, total, missing and 1 or 0}
for i = 9 + 2 * num_tenants, #ARGV, 5 do
  local tenant_cap, cap = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local allowance, wanted = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  local of_tenant = 0
  if tenant_cap >= 0 then
    for _, other in ipairs(routers) do of_tenant = of_tenant + count(other .. '/' .. ARGV[i]) end
  end
  if tenant_cap >= 0 and of_tenant + wanted > tenant_cap then answer[#answer + 1] = {0, 1, of_tenant, 1}
  elseif total + wanted > cap then answer[#answer + 1] = {0, 0, total, 0}
  elseif settling == 1 and held + wanted > allowance then answer[#answer + 1] = {0, 0, total, 1}
  else
    total, held = total + wanted, held + wanted
    redis.call('ZADD', KEYS[2], 'INCR', wanted, router)
    redis.call('ZADD', KEYS[2], 'INCR', wanted, router .. '/' .. ARGV[i])
    answer[#answer + 1] = {1, 0, total, settling}
  end
end
return answer
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
class PermitRequest:
    """`count` permits to take."""

    tenant: str
    tenant_cap: int | None
    cap: int
    count: int


@dataclass(frozen=True, slots=True)
class PermitReply:
    """A refusal is `by_tenant` for the tenant's own cap, with `num_held` permits held, those of all routers if
    `is_total`."""

    granted: bool
    by_tenant: bool
    num_held: int
    is_total: bool


@dataclass(frozen=True, slots=True)
class PermitTotals:
    """Routers seen, permits leased by all of them, and whether some of either may be missing. `was_missing`: this
    router's own counts were, and those of its tenants must be told anew."""

    num_routers: int
    num_leased: int
    settling: bool
    was_missing: bool


class PermitStore:
    """One router's access to the shared permits, for one round trip at a time. Errors of redis are passed through."""

    def __init__(self, router_id: str, times: LeaseTimes, model: str = "") -> None:
        self._router_id = router_id
        self._times = times
        self._of_model = f"@{model}" if model else ""
        self._round = 0
        self._answered = 0

    async def exchange(
        self,
        redis: Redis,
        num_routers: int,
        held: int,
        by_tenant: Mapping[str, int],
        requests: Sequence[PermitRequest] = (),
        *,
        allowance: int = 0,
    ) -> tuple[PermitTotals, list[PermitReply]]:
        """Renew the router's lease, write the permits that it holds, and take more.

        `num_routers` is the last known number of routers; `by_tenant` has the permits of tenants whose count has
        changed since the last round trip that was answered. `allowance`: permits that the router may hold while
        settling.
        """
        self._round += 1
        head = (self._router_id, self._times.lease_ms, self._times.settling_ms, num_routers)
        args: list[str | int] = [*head, self._answered, self._round, held, len(by_tenant)]
        for tenant, count in by_tenant.items():
            args += (tenant, count)
        for request in requests:
            tenant_cap = -1 if request.tenant_cap is None else request.tenant_cap
            args += (request.tenant, tenant_cap, request.cap, allowance, request.count)
        answer = await redis.eval(_EXCHANGE, 4, *self._keys(redis, "routers", "held", "rounds", "settling"), *args)
        if not answer:
            raise ResponseError("permits were refused: this router has told newer counts")
        self._answered = self._round
        num_routers, settling, num_leased, was_missing, *replies = answer
        totals = PermitTotals(int(num_routers), int(num_leased), bool(settling), bool(was_missing))
        return totals, [
            PermitReply(bool(yes), bool(mine), int(number), not part) for yes, mine, number, part in replies
        ]

    async def leave(self, redis: Redis) -> None:
        """Remove the router and all that it holds."""
        await redis.eval(_LEAVE, 3, *self._keys(redis, "routers", "held", "rounds"), self._router_id)

    def _keys(self, redis: Redis, *names: str) -> list[str]:
        return [name_in(redis, f"{PREFIX}{name}{self._of_model}") for name in names]
