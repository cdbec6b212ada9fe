"""The layers of a model are dealt out to groups so that stages, one or many, hold whole layers of every block."""

from collections import defaultdict
from itertools import pairwise

import pytest

from engine.models.kv_groups import group_windows, kv_place, num_final_kv_layers, num_kv_layers, stage_layers
from engine.models.model_config import ModelConfig, RopeConfig
from engine.models.per_layer_config import LayerSizes, PerLayerConfig, common_row
from mesh.domain.kv import equal_parts

PATTERN = (None, 1024)
GEMMA_4 = {  # layers, those that read KV of earlier ones, and rows with a window and without
    "E2B": (35, 20, 5, (1, 256), (1, 512)),
    "E4B": (42, 18, 6, (2, 256), (2, 512)),
    "26B-A4B": (30, 0, 6, (8, 256), (2, 512)),
    "31B": (60, 0, 6, (16, 256), (4, 512)),
}


def model(
    windows: tuple[int | None, ...], *, are_chunks: bool = False, per_layer: PerLayerConfig | None = None
) -> ModelConfig:
    heads, dim = (4, 64) if per_layer is None else common_row(per_layer.layers)
    rope = RopeConfig("default", 1e4, dim, 2**17)
    sizes = (100, 64, 64, len(windows), 8, heads, dim, 2**17)
    return ModelConfig("M", *sizes, rope, windows, "float32", windows_are_chunks=are_chunks, per_layer=per_layer)


def every(pattern: int, num_layers: int, window: int) -> tuple[int | None, ...]:
    """Each layer of so many sees all tokens."""
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))


def gemma_4(
    num_layers: int, num_shared: int, pattern: int, narrow: tuple[int, int], wide: tuple[int, int]
) -> ModelConfig:
    windows, first_shared = every(pattern, num_layers, 512), num_layers - num_shared
    layers = []
    for layer, window in enumerate(windows):
        last = max((n for n in range(first_shared) if windows[n] == window), default=layer)
        heads, dim = wide if window is None else narrow
        layers.append(LayerSizes(dim, heads, 64, layer if layer < first_shared else last))
    return model(windows, per_layer=PerLayerConfig(tuple(layers)))


MODELS = {
    "gpt-oss 20B": (model(every(2, 24, 128)), 12, (0, 128)),
    "Gemma 3 270M": (model(every(6, 18, 512)), 3, (0, *[512] * 5)),
    "Gemma 3 1B": (model(every(6, 26, 512)), 4, (0, *[512] * 6)),
    "Gemma 3 4B": (model(every(6, 34, 1024)), 5, (0, *[1024] * 6)),
    "Gemma 3 12B": (model(every(6, 48, 1024)), 8, (0, *[1024] * 5)),
    "Gemma 3 27B": (model(every(6, 62, 1024)), 10, (0, *[1024] * 6)),
    "Command R7B": (model(every(4, 32, 4096)), 8, (0, *[4096] * 3)),
    "Mistral v0.1": (model((4096,) * 32), 32, (4096,)),
    "Llama 4 Scout": (model(every(4, 48, 8192), are_chunks=True), 12, (0, *[8192] * 3)),
    "Gemma 4 E2B": (gemma_4(*GEMMA_4["E2B"]), 3, (0, 512, 512)),
    "Gemma 4 E4B": (gemma_4(*GEMMA_4["E4B"]), 2, (0, 0, *[512] * 5)),
    "Gemma 4 26B-A4B": (gemma_4(*GEMMA_4["26B-A4B"]), 3, (0, *[512] * 9)),
    "Gemma 4 31B": (gemma_4(*GEMMA_4["31B"]), 5, (0, *[512] * 10)),
    "no window": (model((None,) * 4), 4, ()),
    "windows of the last layers only": (model((None,) * 21 + (512,) * 7), 28, ()),
}


@pytest.mark.parametrize("name", MODELS)
def test_published_models(name: str) -> None:
    config, num_layers, windows = MODELS[name]
    assert group_windows(config) == windows
    assert num_kv_layers(config, windows) == num_layers
    taken = defaultdict(list)
    for layer in range(config.num_layers):
        place = kv_place(config, layer, windows)
        assert place == kv_place(config, config.kv_source(layer), windows)
        assert not windows or windows[place.group] == (config.windows[layer] or 0)
        if config.stores_kv(layer):
            taken[place.group, place.layer].append((place.part, place.num_parts))
    for parts in taken.values():
        assert sorted(part for part, _ in parts) == list(range(len(parts)))
        assert len(parts) <= parts[0][1]


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_final_once_all_of_them_are_computed(name: str) -> None:
    config, num_layers, windows = MODELS[name]
    places = [kv_place(config, layer, windows).layer for layer in range(config.num_layers)]
    final = num_final_kv_layers(config, windows)
    assert (final[0], final[-1]) == (0, num_layers)
    for computed, number in enumerate(final):
        stored = [place for layer, place in enumerate(places) if config.stores_kv(layer) and layer >= computed]
        assert number == min(stored, default=num_layers)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][0].per_layer is None])
def test_stages_hold_whole_layers_of_every_block(name: str, num_stages: int) -> None:
    """Else the layout is another, so that nobody sends such a worker other KV."""
    config, num_layers, windows = MODELS[name]
    stages = stage_layers(config, num_stages)
    assert all(before.end == after.first for before, after in pairwise(stages))
    assert (stages[0].first, stages[-1].end) == (0, config.num_layers)
    if num_stages > num_layers:
        assert group_windows(config, num_stages) == ()
        assert stages == equal_parts(config.num_layers, num_stages)
        return
    assert group_windows(config, num_stages) == windows
    for stage, held in zip(stages, equal_parts(num_layers, num_stages), strict=True):
        places = [kv_place(config, layer, windows).layer for layer in range(stage.first, stage.end)]
        assert sorted(set(places)) == list(range(held.first, held.end))
