"""What this router has in flight at each worker: placement must not wait for the next heartbeat to know."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mesh.domain.worker import WorkerInfo
from mesh.registry.membership import WorkerView
from router.placement import InFlight, Placement

# A heartbeat that arrives this soon after a reservation may have been written before it.
_REPORT_DELAY_S = 0.1


@dataclass(frozen=True, slots=True)
class Transfers:
    """KV between a worker and others, as one router has asked for it: on its way now, and moved since it is known."""

    num_open: int
    num_bytes: int


class Booking:
    """One attempt's share of its workers. Release it whatever happens; releasing twice does nothing."""

    def __init__(
        self, ledger: "Ledger", placement: Placement, num_tokens: int, on_first_token: Callable[[], None] | None
    ) -> None:
        self.placement = placement
        self.num_tokens = num_tokens
        """Prompt and generated tokens so far: what the decode worker holds KV for."""
        self.prefill_tokens = num_tokens
        """Prompt tokens that the prefill worker, or without one the decode worker, has still to compute."""
        self.reserved_at_s: float | None = None
        """When the decode worker confirmed its reservation."""
        self.num_shared_tokens = 0
        """Leading tokens whose blocks another booking counts."""
        self.forks: list[Booking] = []
        """Those whose shared tokens this one counts."""
        self.holds_prefill = placement.prefill is not None
        self.is_transferring = False
        """KV is on its way, perhaps while the prompt is still computed."""
        self.begun_s = ledger.now_s()
        self.on_abandoned: Callable[[WorkerInfo], None] = _nobody_listens
        """Called when the attempt should leave this one of its workers."""
        self._ledger = ledger
        self._on_first_token = on_first_token

    def reserved(self) -> None:
        """The decode worker has reserved blocks."""
        self.reserved_at_s = self._ledger.now_s()

    def first_token(self) -> None:
        """The attempt has brought a token. Only the first call counts."""
        if self.placement.prefill is None and self.prefill_tokens > 0:
            self.prefill_computed()
        callback, self._on_first_token = self._on_first_token, None
        if callback is not None:
            callback()

    def prefill_computed(self) -> None:
        """The prompt is computed; its blocks stay on a prefill worker until they are sent."""
        self.prefill_tokens = 0
        self._ledger.changed()

    def transfer_started(self) -> None:
        """The first KV leaves the prefill worker."""
        self.is_transferring = True

    def transfer_finished(self, num_bytes: int) -> None:
        """The decode worker has all KV: these bytes have moved."""
        self._ledger.count_transfer(self.placement, num_bytes)
        self.prefill_released()

    def prefill_released(self) -> None:
        """The prefill worker has nothing of it any more."""
        self.prefill_tokens, self.holds_prefill, self.is_transferring = 0, False, False
        self._ledger.changed()

    def fork(self) -> "Booking":
        """A sequence at the same decode worker that begins with this one's KV."""
        booking = self._ledger.book(Placement(None, self.placement.decode), self.num_tokens)
        booking.num_shared_tokens, booking.prefill_tokens = self.num_tokens, 0
        self.forks.append(booking)
        return booking

    def release(self) -> None:
        """The attempt is over."""
        self.on_abandoned = _nobody_listens
        self._ledger.remove(self)


class Ledger:
    """All bookings of one router. `clock` gives the registry's monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self._bookings: dict[Booking, None] = {}
        self._kv_bytes: Counter[str] = Counter()
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever room may have appeared."""
        self._callbacks.append(callback)

    def book(self, placement: Placement, num_tokens: int, on_first_token: Callable[[], None] | None = None) -> Booking:
        """Count an attempt in."""
        booking = Booking(self, placement, num_tokens, on_first_token)
        self._bookings[booking] = None
        return booking

    def remove(self, booking: Booking) -> None:
        """Count an attempt out."""
        if self._bookings.pop(booking, booking) is None:
            alive = [fork for fork in booking.forks if fork in self._bookings]
            if alive:  # the first of them counts from now on what all share
                alive[0].num_shared_tokens, alive[0].forks = booking.num_shared_tokens, alive[1:]
            self.changed()

    def abandon(self, info: WorkerInfo) -> None:
        """Let every attempt that needs this run of a worker leave it."""
        for booking in list(self._bookings):
            placement = booking.placement
            needed = [placement.decode, placement.prefill] if booking.holds_prefill else [placement.decode]
            if info in needed:
                booking.on_abandoned(info)

    def changed(self) -> None:
        """Room may have appeared."""
        for callback in self._callbacks:
            callback()

    def count_transfer(self, placement: Placement, num_bytes: int) -> None:
        """KV has moved between the two workers."""
        for info in (placement.prefill, placement.decode):
            if info is not None:
                self._kv_bytes[info.incarnation] += num_bytes

    def follow(self, views: Iterable[WorkerView]) -> None:
        """These are all workers there are: forget what others have sent and received."""
        known = {view.info.incarnation for view in views}
        for incarnation in self._kv_bytes.keys() - known:
            del self._kv_bytes[incarnation]

    @property
    def num_transferring(self) -> int:
        """KV transfers under way."""
        return sum(booking.is_transferring for booking in self._bookings)

    def transfers(self, info: WorkerInfo) -> Transfers:
        """What a run of a worker sends or receives."""
        num_open = sum(
            booking.is_transferring and info in (booking.placement.prefill, booking.placement.decode)
            for booking in self._bookings
        )
        return Transfers(num_open, self._kv_bytes[info.incarnation])

    def in_flight(self, views: Iterable[WorkerView]) -> Mapping[str, InFlight]:
        """Sums by worker incarnation."""
        last_seen_s = {view.info.incarnation: view.last_seen_s for view in views}
        sums: dict[str, InFlight] = {}
        for booking in self._bookings:
            decode, prefill = booking.placement.decode, booking.placement.prefill
            blocks = decode.layout.num_blocks_for(booking.num_tokens) + 1
            blocks -= booking.num_shared_tokens // decode.layout.block_size
            reported = self._is_reported(booking, last_seen_s.get(decode.incarnation, 0.0))
            own_tokens = booking.prefill_tokens if prefill is None else 0
            _add(sums, decode, InFlight(1, blocks, 0 if reported else blocks, own_tokens))
            if prefill is not None and booking.holds_prefill:
                blocks = prefill.layout.num_blocks_for(booking.num_tokens)
                _add(sums, prefill, InFlight(1, blocks, 0, booking.prefill_tokens))
        return sums

    def _is_reported(self, booking: Booking, last_seen_s: float) -> bool:
        return booking.reserved_at_s is not None and last_seen_s > booking.reserved_at_s + _REPORT_DELAY_S


def _nobody_listens(info: WorkerInfo) -> None:
    """The attempt has not begun, or is over."""


def _add(sums: dict[str, InFlight], info: WorkerInfo, more: InFlight) -> None:
    have = sums.get(info.incarnation, InFlight())
    sums[info.incarnation] = InFlight(
        have.num_seqs + more.num_seqs,
        have.num_blocks + more.num_blocks,
        have.num_unreported_blocks + more.num_unreported_blocks,
        have.prefill_tokens + more.prefill_tokens,
    )
