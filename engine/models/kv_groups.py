"""Which layers of a model share the blocks of a group (mesh/domain/kv_groups.py), and when their KV is final."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.models.model_config import ModelConfig
from mesh.domain.kv import Span

_MAX_GROUPS = 8
"""Each block that a sequence grows by is one of each group."""
_MAX_PADDING = 1.25
"""Layers that blocks have room for, divided by those of the model."""


class KVPlace(NamedTuple):
    """The KV of a layer is that of layer `layer` in the blocks of a group."""

    group: int
    layer: int


def group_windows(config: ModelConfig) -> tuple[int, ...]:
    """The windows of the groups, see KVGroups; () if all layers share a block and nothing is freed: no layer has a
    window, or something else keeps KV together.

    Groups of equal sizes have room for more layers than there are. Room in those that see all tokens costs memory for
    every token, so there is as little of it as possible.
    """
    if config.recurrent is not None or config.mixed is not None or config.windows_are_chunks:
        return ()
    counts = Counter(_seen(config, layer) for layer in range(config.num_layers))
    best: tuple[int, int, tuple[int, ...]] | None = None
    for size in range(1, config.num_layers + 1):
        numbers = {window: -(-count // size) for window, count in sorted(counts.items())}
        windows = tuple(window for window, number in numbers.items() for _ in range(number))
        num_full, num_layers = windows.count(0) * size, len(windows) * size
        is_worth_it = num_full < config.num_layers and num_layers <= _MAX_PADDING * config.num_layers
        if is_worth_it and len(windows) <= _MAX_GROUPS:
            best = min(best or (num_full, num_layers, windows), (num_full, num_layers, windows), key=_cost)
    return best[2] if best is not None else ()


def _cost(found: tuple[int, int, tuple[int, ...]]) -> tuple[int, int, int]:
    num_full, num_layers, windows = found
    return num_full, num_layers, len(windows)


def _seen(config: ModelConfig, layer: int) -> int:
    """The window of a layer, 0 if it sees all tokens of every sequence."""
    window = config.windows[layer]
    return window if window is not None and window < config.max_model_len else 0


def kv_places(config: ModelConfig, windows: Sequence[int]) -> list[KVPlace]:
    """The place of each layer, in a layout with these windows. The layers with a window are dealt out to its groups in
    turn, so that those at the same place in their blocks are computed soon after each other.
    """
    if not windows:
        return [KVPlace(0, config.num_kv_layers_before(layer)) for layer in range(config.num_layers)]
    places: list[KVPlace] = []
    dealt: Counter[int] = Counter()
    for layer in range(config.num_layers):
        seen = _seen(config, layer)
        place, number = divmod(dealt[seen], windows.count(seen))
        places.append(KVPlace(windows.index(seen) + number, place))
        dealt[seen] += 1
    return places


def num_kv_layers(config: ModelConfig, windows: Sequence[int]) -> int:
    """The layers of a block."""
    return 1 + max(place.layer for place in kv_places(config, windows)) if windows else config.num_kv_layers


def final_kv_layers(config: ModelConfig, windows: Sequence[int], computed: Span) -> Span:
    """The layers of blocks that are final, in all groups, once these layers of the model are computed."""
    if not windows:
        return config.kv_layers(computed)
    first, end = (_num_final(config, windows, layer) for layer in (computed.first, computed.end))
    return Span(first, end - first)


def _num_final(config: ModelConfig, windows: Sequence[int], num_computed: int) -> int:
    places = kv_places(config, windows)
    return min((place.layer for place in places[num_computed:]), default=num_kv_layers(config, windows))
