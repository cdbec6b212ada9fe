"""PerLayerConfig: heads and MLPs that differ by layer, and layers that read the KV of an earlier one. Data only.

All layers share one KVLayout. Its row, the keys of a token in a layer, is that of the widest layer. A narrower layer
takes one of several equal parts of each block instead, and as many such layers share a layer of the cache. So blocks
stay bytes of one size for everything that pages, sends or counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from engine.models.tensor_names import TensorNames


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """`kv_source`: the layer whose KV this one reads: itself, or an earlier one."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    kv_source: int
    keys_are_values: bool = False
    """Values are the projected keys, before norms and rotation."""

    @property
    def row(self) -> int:
        """Numbers of a token's keys, or values."""
        return self.head_dim * self.num_kv_heads


class KVPlace(NamedTuple):
    """The KV of a layer of the model is part `part` of `num_parts` of a group's blocks, in this layer of the cache."""

    layer: int
    part: int = 0
    num_parts: int = 1
    group: int = 0


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """Facts of Gemma 4 and 3n. `input_width`: of what each layer adds for the token itself (per-layer embeddings), 0
    without; `input_vocab`: tokens that have such rows, the others have the first one.

    Gemma 3n has `num_streams` residuals (engine/models/streams.py), a matrix of `laurel_rank` beside attention, and
    MLPs in which a share of gates is 0, the `sparsity` of each layer. Its layers have no scalar.
    """

    layers: tuple[LayerSizes, ...]
    input_width: int = 0
    input_vocab: int = 0
    num_streams: int = field(default=1, repr=False)
    laurel_rank: int = field(default=0, repr=False)
    sparsity: tuple[float, ...] = field(default=(), repr=False)

    def facts_of(self, layer: int, names: "TensorNames") -> dict[str, Any]:
        """The fields of ModelConfig that a layer has for itself."""
        sizes, (queries, keys, values) = self.layers[layer], names.qkv
        if sizes.kv_source != layer:
            keys = values = ""
        elif sizes.keys_are_values:
            values = keys
        return {
            "head_dim": sizes.head_dim,
            "num_kv_heads": sizes.num_kv_heads,
            "intermediate_size": sizes.intermediate_size,
            "gate_sparsity": self.sparsity[layer] if self.sparsity else 0.0,
            "tensors": replace(names, qkv=(queries, keys, values)),
        }

    @property
    def read_later(self) -> set[int]:
        """Layers whose KV others read."""
        return {sizes.kv_source for layer, sizes in enumerate(self.layers) if sizes.kv_source != layer}

    def place(self, layer: int) -> KVPlace:
        """Where the KV is that this layer reads."""
        return _places(self.layers)[self.layers[layer].kv_source]

    def num_kv_layers_before(self, layer: int) -> int:
        """Number of layers of the cache that are complete before this layer is computed."""
        return sum(group[-1] < layer for group in _groups(self.layers))


def common_row(layers: Sequence[LayerSizes]) -> tuple[int, int]:
    """Heads and width of a head in KVLayout. Raises ConfigurationError if layers' rows do not divide one another."""
    widest, narrowest = max(sizes.row for sizes in layers), min(sizes.head_dim for sizes in layers)
    for sizes in layers:
        if widest % sizes.row or sizes.head_dim % narrowest:
            raise ConfigurationError(
                f"config.json: layers with {sizes.num_kv_heads} KV heads of {sizes.head_dim} beside others with KV of "
                f"{widest} numbers are not supported: one must be a multiple of the other"
            )
    return widest // narrowest, narrowest


@cache
def _places(layers: tuple[LayerSizes, ...]) -> dict[int, KVPlace]:
    """The places of the layers that have KV."""
    return {
        layer: KVPlace(number, part, _num_parts(layers, layer))
        for number, group in enumerate(_groups(layers))
        for part, layer in enumerate(group)
    }


@cache
def _groups(layers: tuple[LayerSizes, ...]) -> list[list[int]]:
    """The layers that share each layer of the cache, in the order in which these become complete."""
    groups: list[list[int]] = []
    incomplete: dict[int, list[int]] = {}  # by the size of a row
    for layer, sizes in enumerate(layers):
        if sizes.kv_source != layer:
            continue
        group = incomplete.setdefault(sizes.row, [])
        group.append(layer)
        if len(group) == 1:
            groups.append(group)
        if len(group) == _num_parts(layers, layer):
            del incomplete[sizes.row]
    return sorted(groups, key=max)


def _num_parts(layers: Sequence[LayerSizes], layer: int) -> int:
    heads, dim = common_row(layers)
    return heads * dim // layers[layer].row
