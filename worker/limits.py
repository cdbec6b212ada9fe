"""The limits of a role on its engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.settings import NO_SPECULATION, Speculation


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """A role's limits on its engine: tokens per step, concurrent sequences, tokens of KV (None: as memory allows),
    speculative decoding, how much prompts may stretch a step (SchedulerConfig), and the sizes of decode steps that are
    captured as CUDA graphs.
    """

    max_batch_tokens: int
    max_num_seqs: int
    max_kv_tokens: int | None = None
    speculation: Speculation = NO_SPECULATION
    max_step_stretch: float = 0.0
    graph_sizes: tuple[int, ...] = ()


def widest(limits: Sequence[EngineLimits]) -> EngineLimits:
    """The limits of an engine that can serve within each of `limits`: the largest of each. At most one of them has
    speculative decoding."""
    speculations = (limit.speculation for limit in limits if limit.speculation != NO_SPECULATION)
    return EngineLimits(
        max(limit.max_batch_tokens for limit in limits),
        max(limit.max_num_seqs for limit in limits),
        max(limit.max_kv_tokens or 0 for limit in limits) or None,
        next(speculations, NO_SPECULATION),
        max(limit.max_step_stretch for limit in limits),
        max((limit.graph_sizes for limit in limits), key=len),
    )
