"""How many workers a load keeps busy, and what its tokens cost. Pure, over bench.capacity."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from bench.capacity import Capacity

BLENDED_RATIO = 3
"""Input tokens for each output token in a blended price."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for: lengths, and requests per second."""

    input_tokens: int
    output_tokens: int
    requests_per_s: float

    @property
    def mean_context_tokens(self) -> float:
        """Of a sequence over its decode steps."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class PassTimes:
    """What one prompt takes, and one decode step of `batch` sequences; predicted or measured."""

    prefill_s: float
    step_s: float
    batch: int


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """Workers, in fractions, that a load keeps busy all the time."""

    prefill: float
    decode: float

    @property
    def decode_per_prefill(self) -> float:
        """Decode workers for each prefill worker: the same at every rate."""
        return self.decode / self.prefill

    @property
    def whole(self) -> tuple[int, int]:
        """Prefill and decode workers to start at the least; queues are short only with some to spare."""
        return max(1, ceil(self.prefill)), max(1, ceil(self.decode))


def largest_batch(capacity: Capacity, load: Load, batches: Iterable[int]) -> int | None:
    """The largest of `batches` whose sequences fit into memory at their full length; None if none does."""
    users = capacity.users(load.input_tokens + load.output_tokens)
    return max((batch for batch in batches if batch <= users), default=None)


def predicted_times(capacity: Capacity, load: Load, batch: int) -> PassTimes:
    """At best."""
    step_s = capacity.decode_step_s(batch, load.mean_context_tokens)
    return PassTimes(capacity.prefill_s(load.input_tokens), step_s, batch)


def workers_for(load: Load, times: PassTimes) -> WorkerNeed:
    """By Little's law: work that arrives in a second over what one worker does in it. The first token comes from
    prefill, the others from decode."""
    decode_s = (load.output_tokens - 1) * times.step_s / times.batch
    return WorkerNeed(load.requests_per_s * times.prefill_s, load.requests_per_s * decode_s)


def rate_of_users(load: Load, times: PassTimes, users: int) -> float:
    """Requests per second of users who send their next one as soon as the last has ended, if nobody waits."""
    return users / (times.prefill_s + (load.output_tokens - 1) * times.step_s)


def price_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """price / (3600 x tokens/s) x 1e6."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6


def blended_price(input_price: float, output_price: float) -> float:
    """Per million tokens, three of input for each one of output."""
    return (BLENDED_RATIO * input_price + output_price) / (BLENDED_RATIO + 1)
