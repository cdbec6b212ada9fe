"""Which layers of a model share the blocks of a group (mesh/domain/kv_groups.py), and when their KV is final.

The layers that store KV are cut into runs of consecutive layers, about equally long. Layer n of a block has the KV of
layers of run n, whichever group the block belongs to. A pipeline stage computes whole runs, so it has the same layers
of every block, and the layout does not depend on the number of stages.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from engine.models.mixed_config import KVPlace
from engine.models.model_config import ModelConfig
from mesh.domain.kv import Span, equal_parts

_MAX_GROUPS = 12
"""Each block that a sequence grows by is one of each group."""
_MAX_PADDING = 1.25
"""Layers that blocks have room for, divided by those that they would have if each had all."""


class Dealing(NamedTuple):
    """`windows`: of the groups, see KVGroups. `places`: of the KV that each layer of the model reads. `ends`: the layer
    of the model with which each run ends, plus 1.
    """

    windows: tuple[int, ...]
    places: tuple[KVPlace, ...]
    ends: tuple[int, ...]


class _Kind(NamedTuple):
    """Layers that may share a group: they see as much, and their KV takes one of `num_parts` parts of a block."""

    seen: int
    num_parts: int


@cache
def _dealt(config: ModelConfig) -> Dealing | None:
    """None if all layers share a block and nothing is freed: no layer has a window, or blocks of groups would be mostly
    room for layers that are not there.

    Room in groups that see all tokens costs memory for every token, so there is as little of it as possible.
    """
    stored = [layer for layer in range(config.num_layers) if config.stores_kv(layer)]
    if config.recurrent is not None or not any(_kind(config, layer).seen for layer in stored):
        return None
    best: tuple[tuple[int, int, int], list[Span], Counter[_Kind]] | None = None
    for size in range(1, len(stored) + 1):
        runs = equal_parts(len(stored), size)
        numbers = _numbers(config, [stored[run.first : run.end] for run in runs])
        num_full = sum(number for kind, number in numbers.items() if not kind.seen) * size
        cost = num_full, numbers.total() * size, numbers.total()
        is_worth_it = num_full < config.num_kv_layers and cost[1] <= _MAX_PADDING * config.num_kv_layers
        if is_worth_it and numbers.total() <= _MAX_GROUPS and (best is None or cost < best[0]):
            best = cost, runs, numbers
    if best is None:
        return None
    _, runs, numbers = best
    return _deal(config, [stored[run.first : run.end] for run in runs], numbers)


def _deal(config: ModelConfig, runs: list[list[int]], numbers: Counter[_Kind]) -> Dealing:
    kinds = sorted(numbers)
    firsts = {kind: sum(numbers[other] for other in kinds if other < kind) for kind in kinds}
    places: dict[int, KVPlace] = {}
    for number, run in enumerate(runs):
        dealt: Counter[_Kind] = Counter()
        for layer in run:
            kind = _kind(config, layer)
            group, part = divmod(dealt[kind], kind.num_parts)
            places[layer] = KVPlace(number, part, kind.num_parts, firsts[kind] + group)
            dealt[kind] += 1
    return Dealing(
        windows=tuple(kind.seen for kind in kinds for _ in range(numbers[kind])),
        places=tuple(places[config.kv_source(layer)] for layer in range(config.num_layers)),
        ends=tuple(run[-1] + 1 for run in runs),
    )


def _numbers(config: ModelConfig, runs: list[list[int]]) -> Counter[_Kind]:
    """The groups of each kind that have room for the layers of each run."""
    numbers: Counter[_Kind] = Counter()
    for run in runs:
        for kind, count in Counter(_kind(config, layer) for layer in run).items():
            numbers[kind] = max(numbers[kind], -(-count // kind.num_parts))
    return numbers


def _kind(config: ModelConfig, layer: int) -> _Kind:
    """`seen` is 0 for a layer that sees all tokens of every sequence."""
    window = config.windows[layer]
    num_parts = 1 if config.mixed is None else config.mixed.place(layer).num_parts
    return _Kind(window if window is not None and window < config.max_model_len else 0, num_parts)


def group_windows(config: ModelConfig, num_stages: int = 1) -> tuple[int, ...]:
    """The windows of the groups, see KVGroups; () if all layers share a block and nothing is freed, as where stages are
    more than runs.
    """
    dealing = _dealt(config)
    return () if dealing is None or num_stages > len(dealing.ends) else dealing.windows


def kv_place(config: ModelConfig, layer: int, windows: Sequence[int]) -> KVPlace:
    """The place of the KV that a layer reads, in a layout with these windows."""
    if windows and (dealing := _dealt(config)) is not None:
        return dealing.places[layer]
    return KVPlace(config.num_kv_layers_before(layer)) if config.mixed is None else config.mixed.place(layer)


def num_kv_layers(config: ModelConfig, windows: Sequence[int]) -> int:
    """The layers of a block."""
    dealing = _dealt(config) if windows else None
    return config.num_kv_layers if dealing is None else len(dealing.ends)


def stage_layers(config: ModelConfig, num_stages: int) -> list[Span]:
    """The layers that each pipeline stage computes: whole runs, if there are enough of them."""
    dealing = _dealt(config)
    if dealing is None or num_stages > len(dealing.ends):
        return equal_parts(config.num_layers, num_stages)
    starts = (0, *dealing.ends[:-1], config.num_layers)
    return [
        Span(starts[runs.first], starts[runs.end] - starts[runs.first])
        for runs in equal_parts(len(dealing.ends), num_stages)
    ]


def num_final_kv_layers(config: ModelConfig, windows: Sequence[int]) -> list[int]:
    """The leading layers of blocks that are final in all groups, by the number of the model's layers that are computed:
    from none to all.
    """
    dealing = _dealt(config) if windows else None
    if dealing is None:
        return [config.num_kv_layers_before(layer) for layer in range(config.num_layers + 1)]
    return [sum(end <= layer for end in dealing.ends) for layer in range(config.num_layers + 1)]
