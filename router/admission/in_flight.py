"""Work that this router has in flight at each worker. Placement counts it without waiting for the next heartbeat.

The sums of a worker change with each of its claims, so that placement need not add them up.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mesh.domain.worker import WorkerInfo
from router.admission.placement import Placement, longest_short
from router.admission.roster import InFlight
from router.workers.membership import WorkerView

# A heartbeat that arrives this soon after a claim may have been written before it.
_REPORT_DELAY_S = 0.1


@dataclass(frozen=True, slots=True)
class Transfers:
    """KV transfers of one worker that this router started: open now, and bytes moved since the worker joined."""

    num_open: int
    num_bytes: int


class CapacityClaim:
    """One attempt's part of the capacity of its workers. The holder must release it; a second release does nothing."""

    def __init__(
        self,
        in_flight: "InFlightTable",
        placement: Placement,
        num_tokens: int,
        on_first_token: Callable[[], None] | None,
    ) -> None:
        self.placement = placement
        self.num_tokens = num_tokens
        """Prompt and generated tokens so far: what the decode worker holds KV for. Changed by `grow`."""
        self.prefill_tokens = num_tokens
        """Prompt tokens still to be computed, by the prefill worker or, without one, by the decode worker."""
        self.confirmed_at_s: float | None = None
        """Time at which the decode worker confirmed that it holds the blocks."""
        self.is_reported = False
        """True if the decode worker's last report includes the blocks."""
        self.shares: dict[str, InFlight] = {}
        """The part of its workers' sums that is this claim, by incarnation."""
        self.num_shared_tokens = 0
        """Leading tokens whose blocks the first choice's claim counts; after its end, that of the first fork."""
        self.is_fork = False
        """True if another attempt's start message also starts this one."""
        self.forks: list[CapacityClaim] = []
        """The other claims with these leading tokens: this one counts the blocks for all."""
        self.holds_prefill = placement.prefill is not None
        self.is_transferring = False
        """KV is on its way, perhaps while the prompt is still computed."""
        self.started_s = in_flight.now_s()
        self.on_abandoned: Callable[[WorkerInfo], None] = _ignore
        """Called with the worker that the attempt should leave."""
        self._block_size = placement.decode.layout.block_size
        self._in_flight = in_flight
        self._on_first_token = on_first_token

    def confirm(self) -> None:
        """The decode worker has confirmed that it holds the blocks. Only the first call counts."""
        if self.confirmed_at_s is None:
            self.confirmed_at_s = self._in_flight.now_s()

    def grow(self, num_tokens: int) -> None:
        """The sequence has this many tokens by now. Called for each token, most of which need no new block."""
        last_block = (self.num_tokens - 1) // self._block_size
        self.num_tokens = num_tokens
        if (num_tokens - 1) // self._block_size != last_block:
            self._in_flight.recount(self)

    def first_token(self) -> None:
        """The attempt has its first token. Only the first call counts."""
        if self.placement.prefill is None and self.prefill_tokens > 0:
            self.prefill_computed()
        callback, self._on_first_token = self._on_first_token, None
        if callback is not None:
            callback()

    def prefill_computed(self) -> None:
        """The prompt is computed; its blocks stay on the prefill worker until they are sent."""
        if self.placement.prefill is not None:
            self._in_flight.prefilled_tokens += self.prefill_tokens
        self.prefill_tokens = 0
        self._in_flight.recount(self)
        self._in_flight.notify()

    def transfer_started(self) -> None:
        """The first KV leaves the prefill worker."""
        self.is_transferring = True

    def transfer_finished(self, num_bytes: int) -> None:
        """The decode worker has received all KV, `num_bytes` in total."""
        self._in_flight.count_transfer(self.placement, num_bytes)
        self.prefill_released()

    def prefill_released(self) -> None:
        """The prefill worker has freed the blocks. Only the first call counts."""
        if not (self.prefill_tokens or self.holds_prefill or self.is_transferring):
            return
        self.prefill_tokens, self.holds_prefill, self.is_transferring = 0, False, False
        self._in_flight.recount(self)
        self._in_flight.notify()

    def fork(self) -> "CapacityClaim":
        """Return a claim for a sequence at the same decode worker that shares this one's KV."""
        claim = self._in_flight.claim(Placement(None, self.placement.decode), self.num_tokens)
        claim.is_fork, claim.num_shared_tokens, claim.prefill_tokens = True, self.num_tokens, 0
        self.forks.append(claim)
        self._in_flight.recount(claim)
        return claim

    def release(self) -> None:
        self.on_abandoned = _ignore
        self._in_flight.remove(self)


class InFlightTable:
    """All claims of one model at one router. `clock` returns monotonic seconds, as Membership's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self.prefilled_tokens = 0
        """Prompt tokens that prefill workers have computed for this router so far."""
        self._claims: dict[CapacityClaim, None] = {}
        self._sums: dict[str, InFlight] = {}
        self._unreported: dict[str, dict[CapacityClaim, None]] = {}  # by decode worker
        self._kv_bytes: Counter[str] = Counter()
        self._callbacks: list[Callable[[], None]] = []
        self._watchers: list[Callable[[str, InFlight], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever capacity may have become free."""
        self._callbacks.append(callback)

    def watch(self, watcher: Callable[[str, InFlight], None]) -> None:
        """Call `watcher` with the new sums of a worker, by incarnation, whenever they have changed."""
        self._watchers.append(watcher)

    def claim(
        self, placement: Placement, num_tokens: int, on_first_token: Callable[[], None] | None = None
    ) -> CapacityClaim:
        """Count an attempt; the caller owns the claim. `on_first_token` is called once, at its first token."""
        claim = CapacityClaim(self, placement, num_tokens, on_first_token)
        self._claims[claim] = None
        self._unreported.setdefault(placement.decode.incarnation, {})[claim] = None
        self.recount(claim)
        return claim

    def remove(self, claim: CapacityClaim) -> None:
        """Stop counting an attempt. Only CapacityClaim.release calls this."""
        if claim in self._claims:
            del self._claims[claim]
            self._forget_unreported(claim)
            self.recount(claim)
            alive = [fork for fork in claim.forks if fork in self._claims]
            if alive:  # the first fork counts the shared blocks from now on
                alive[0].num_shared_tokens, alive[0].forks = claim.num_shared_tokens, alive[1:]
                self.recount(alive[0])
            self.notify()

    def abandon(self, info: WorkerInfo) -> None:
        """Tell every attempt that still needs this run of the worker to leave it."""
        for claim in list(self._claims):
            placement = claim.placement
            workers = [placement.decode, placement.prefill] if claim.holds_prefill else [placement.decode]
            if info in workers:
                claim.on_abandoned(info)

    def notify(self) -> None:
        """Notify listeners: capacity may have become free."""
        for callback in self._callbacks:
            callback()

    def count_transfer(self, placement: Placement, num_bytes: int) -> None:
        """Count bytes that have moved between the two workers."""
        for info in (placement.prefill, placement.decode):
            if info is not None:
                self._kv_bytes[info.incarnation] += num_bytes

    def follow(self, views: Sequence[WorkerView]) -> None:
        """Read the workers' reports, and drop the byte counts of workers that are not among `views`."""
        for view in views:
            self.reported(view)
        known = {view.info.incarnation for view in views}
        for incarnation in self._kv_bytes.keys() - known:
            del self._kv_bytes[incarnation]

    @property
    def num_transferring(self) -> int:
        """Number of KV transfers that are open now."""
        return sum(claim.is_transferring for claim in self._claims)

    def transfers(self) -> dict[str, Transfers]:
        """Transfers that each run of a worker sends or receives, by incarnation; none for those that are not there."""
        num_open = Counter(
            info.incarnation
            for claim in self._claims
            if claim.is_transferring
            for info in (claim.placement.prefill, claim.placement.decode)
            if info is not None
        )
        return {key: Transfers(num_open[key], self._kv_bytes[key]) for key in num_open | self._kv_bytes}

    def by_worker(self) -> Mapping[str, InFlight]:
        """The sums of each worker's claims, by incarnation. A live view."""
        return self._sums

    def reported(self, view: WorkerView) -> None:
        """A worker has reported: the report includes what it had confirmed before."""
        waiting = self._unreported.get(view.info.incarnation, {})
        for claim in list(waiting):
            if claim.confirmed_at_s is not None and view.last_seen_s > claim.confirmed_at_s + _REPORT_DELAY_S:
                claim.is_reported = True
                self._forget_unreported(claim)
                self.recount(claim)

    def recount(self, claim: CapacityClaim) -> None:
        """Bring the sums of its workers up to date. Only a claim that has changed calls this."""
        before, now = claim.shares, _shares(claim) if claim in self._claims else {}
        if now == before:
            return
        claim.shares = now
        for incarnation in before.keys() | now.keys():
            total = self._sums.pop(incarnation, InFlight())
            total = total.plus(now.get(incarnation, InFlight())).plus(before.get(incarnation, InFlight()), -1)
            if total.num_seqs:
                self._sums[incarnation] = total
            for watcher in self._watchers:
                watcher(incarnation, total)

    def _forget_unreported(self, claim: CapacityClaim) -> None:
        incarnation = claim.placement.decode.incarnation
        waiting = self._unreported.get(incarnation, {})
        waiting.pop(claim, None)
        if not waiting:
            self._unreported.pop(incarnation, None)


def _shares(claim: CapacityClaim) -> dict[str, InFlight]:
    """The load that a claim is at each of its workers, by incarnation."""
    decode, prefill = claim.placement.decode, claim.placement.prefill
    groups = decode.layout.groups
    blocks = decode.layout.num_blocks_for(claim.num_tokens) + groups.count
    blocks -= claim.num_shared_tokens // groups.block_size * groups.num_full
    own_tokens = claim.prefill_tokens if prefill is None else 0
    shares = {decode.incarnation: InFlight(1, blocks, 0 if claim.is_reported else blocks, own_tokens)}
    if prefill is not None and claim.holds_prefill:
        blocks = prefill.layout.num_blocks_for(claim.num_tokens)
        is_short = claim.prefill_tokens <= longest_short(prefill.max_batch_tokens)
        short_tokens = claim.prefill_tokens if is_short else 0
        shares[prefill.incarnation] = InFlight(1, blocks, 0, claim.prefill_tokens, short_tokens)
    return shares


def _ignore(info: WorkerInfo) -> None:
    """Before the attempt has started, or after its end."""
