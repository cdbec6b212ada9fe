"""Which layers of a model share the blocks of a group (mesh/domain/kv_groups.py), and when their KV is final.

The layers that store KV are cut into runs of consecutive layers, about equally long. Layer n of a block has the KV of
layers of run n, whichever group the block belongs to. A pipeline stage computes whole runs, so it has the same layers
of every block, and the layout does not depend on the number of stages.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from engine.models.model_config import ModelConfig
from engine.models.per_layer_config import KVPlace
from mesh.domain.kv import Span, equal_parts

_MAX_GROUPS = 12
"""A sequence grows by one block of each group at a time."""
_MAX_PADDING = 1.25
"""Layers that blocks have space for, padding included, divided by the layers that store KV."""


class KVGrouping(NamedTuple):
    """The groups, and where the layers of a model have their KV in them."""

    windows: tuple[int, ...]  # of each group, see KVGroups
    places: tuple[KVPlace, ...]  # of the KV that each layer of the model reads
    ends: tuple[int, ...]  # the layer of the model after each run


class _Kind(NamedTuple):
    """Layers of one kind may share a group."""

    window: int  # 0: they see all tokens of every sequence
    num_parts: int  # their KV takes one of these parts of a block


@cache
def _grouping_of(config: ModelConfig) -> KVGrouping | None:
    """None if all layers share a block and nothing is freed: no layer has a window, or blocks of groups would be mostly
    padding.

    Padding of groups that see all tokens costs memory for every token, so there is as little of it as possible.
    """
    stored = [layer for layer in range(config.num_layers) if config.stores_kv(layer)]
    if config.recurrent is not None or not any(_kind(config, layer).window for layer in stored):
        return None
    best: tuple[tuple[int, int, int], list[list[int]], Counter[_Kind]] | None = None
    for num_runs in range(1, len(stored) + 1):
        runs = [stored[run.first : run.end] for run in equal_parts(len(stored), num_runs)]
        num_groups = _count_groups(config, runs)
        num_full = sum(number for kind, number in num_groups.items() if not kind.window) * num_runs
        cost = num_full, num_groups.total() * num_runs, num_groups.total()
        is_worth_it = num_full < config.num_kv_layers and cost[1] <= _MAX_PADDING * config.num_kv_layers
        if is_worth_it and num_groups.total() <= _MAX_GROUPS and (best is None or cost < best[0]):
            best = cost, runs, num_groups
    return None if best is None else _assign_places(config, *best[1:])


def _assign_places(config: ModelConfig, runs: list[list[int]], num_groups: Counter[_Kind]) -> KVGrouping:
    kinds = sorted(num_groups)
    firsts = {kind: sum(num_groups[other] for other in kinds if other < kind) for kind in kinds}
    places: dict[int, KVPlace] = {}
    for number, run in enumerate(runs):
        assigned: Counter[_Kind] = Counter()
        for layer in run:
            kind = _kind(config, layer)
            group, part = divmod(assigned[kind], kind.num_parts)
            places[layer] = KVPlace(number, part, kind.num_parts, firsts[kind] + group)
            assigned[kind] += 1
    return KVGrouping(
        windows=tuple(kind.window for kind in kinds for _ in range(num_groups[kind])),
        places=tuple(places[config.kv_source(layer)] for layer in range(config.num_layers)),
        ends=tuple(run[-1] + 1 for run in runs),
    )


def _count_groups(config: ModelConfig, runs: list[list[int]]) -> Counter[_Kind]:
    """How many groups of each kind the layers of any run need."""
    num_groups: Counter[_Kind] = Counter()
    for run in runs:
        for kind, count in Counter(_kind(config, layer) for layer in run).items():
            num_groups[kind] = max(num_groups[kind], -(-count // kind.num_parts))
    return num_groups


def _kind(config: ModelConfig, layer: int) -> _Kind:
    window = config.windows[layer]
    num_parts = 1 if config.per_layer is None else config.per_layer.place(layer).num_parts
    return _Kind(window if window is not None and window < config.max_model_len else 0, num_parts)


def group_windows(config: ModelConfig, num_stages: int = 1) -> tuple[int, ...]:
    """The windows of the groups, see KVGroups; () if all layers share a block and nothing is freed, as where stages are
    more than runs.
    """
    grouping = _grouping_of(config)
    return () if grouping is None or num_stages > len(grouping.ends) else grouping.windows


def kv_place(config: ModelConfig, layer: int, windows: Sequence[int]) -> KVPlace:
    """The place of the KV that a layer reads, in a layout with these windows."""
    if windows and (grouping := _grouping_of(config)) is not None:
        return grouping.places[layer]
    return KVPlace(config.num_kv_layers_before(layer)) if config.per_layer is None else config.per_layer.place(layer)


def num_kv_layers(config: ModelConfig, windows: Sequence[int]) -> int:
    """The layers of a block."""
    grouping = _grouping_of(config) if windows else None
    return config.num_kv_layers if grouping is None else len(grouping.ends)


def stage_layers(config: ModelConfig, num_stages: int) -> list[Span]:
    """The layers that each pipeline stage computes: whole runs, if there are enough of them."""
    grouping = _grouping_of(config)
    if grouping is None or num_stages > len(grouping.ends):
        return equal_parts(config.num_layers, num_stages)
    starts = (0, *grouping.ends[:-1], config.num_layers)
    return [
        Span(starts[runs.first], starts[runs.end] - starts[runs.first])
        for runs in equal_parts(len(grouping.ends), num_stages)
    ]


def num_final_kv_layers(config: ModelConfig, windows: Sequence[int]) -> list[int]:
    """The leading layers of blocks that are final in all groups, by the number of the model's layers that are computed:
    from none to all.
    """
    grouping = _grouping_of(config) if windows else None
    if grouping is None:
        return [config.num_kv_layers_before(layer) for layer in range(config.num_layers + 1)]
    return [sum(end <= layer for end in grouping.ends) for layer in range(config.num_layers + 1)]
