"""The number of workers that a load needs, and the price of its tokens. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from tandem_cli.capacity.capacity import Capacity

_DEFAULT_BATCHES = (1, 8, 32, 128)
BLENDED_RATIO = 3
"""Input tokens for each output token in a blended price."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load: tokens per prompt, tokens per answer, and requests per second."""

    input_tokens: int
    output_tokens: int
    requests_per_s: float

    @property
    def mean_context_tokens(self) -> float:
        """Mean length of a sequence over its decode steps."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one prompt, and of one decode step of `batch` sequences, either predicted or measured."""

    prefill_s: float
    step_s: float
    batch: int


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """The number of workers that a load keeps fully busy, as fractions."""

    prefill: float
    decode: float

    @property
    def decode_per_prefill(self) -> float:
        """Decode workers per prefill worker. The ratio is the same at every rate."""
        return self.decode / self.prefill

    @property
    def whole(self) -> tuple[int, int]:
        """Minimum number of prefill and decode workers to start. Queues stay short only with spare workers."""
        return max(1, ceil(self.prefill)), max(1, ceil(self.decode))


def largest_batch(capacity: Capacity, load: Load, batches: Iterable[int]) -> int | None:
    """The largest of `batches` whose sequences fit into memory at full length; None if none fits."""
    users = capacity.users(load.input_tokens + load.output_tokens)
    return max((batch for batch in batches if batch <= users), default=None)


def batches_to_plan(capacity: Capacity, load: Load, requested: Sequence[int] | None) -> list[int]:
    """`requested` batches, or those of 1, 8, 32 and 128 that fit. If one does not fit, the largest that fits is
    added.
    """
    users = capacity.users(load.input_tokens + load.output_tokens)
    candidates = set(requested or _DEFAULT_BATCHES)
    batches = candidates if requested else {batch for batch in candidates if batch <= users}
    if 0 < users < max(candidates):
        batches.add(users)
    return sorted(batches) or [1]


def predicted_times(capacity: Capacity, load: Load, batch: int) -> PassTimes:
    """Best-case times of a prompt, and of a decode step at the mean length of a sequence."""
    step_s = capacity.decode_step_s(batch, load.mean_context_tokens)
    return PassTimes(capacity.prefill_s(load.input_tokens), step_s, batch)


def workers_for(load: Load, times: PassTimes) -> WorkerNeed:
    """Workers by Little's law: work that arrives per second, over the work of one worker per second. Prefill makes the
    first token, decode all others."""
    decode_s = (load.output_tokens - 1) * times.step_s / times.batch
    return WorkerNeed(load.requests_per_s * times.prefill_s, load.requests_per_s * decode_s)


def rate_of_users(load: Load, times: PassTimes, users: int) -> float:
    """Requests per second of users who send their next request when the last one has ended, without queueing."""
    return users / (times.prefill_s + (load.output_tokens - 1) * times.step_s)


def price_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens: price per hour / (3600 x tokens/s) x 1e6."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6


def blended_price(input_price: float, output_price: float) -> float:
    """Price of a million tokens, with three input tokens per output token."""
    return (BLENDED_RATIO * input_price + output_price) / (BLENDED_RATIO + 1)
