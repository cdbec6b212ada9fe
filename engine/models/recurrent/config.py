"""RecurrentConfig: the recurrent layers of a model. Data only, no tensors."""

from dataclasses import dataclass, field
from math import inf

NUMBER_BYTES = 4
"""A state is in fp32, whatever the type of the weights."""


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """Further facts of Mamba 2. `norm`: the heads of a key head are normed together, `gated` or `before` the gate, or
    not at all ("").

    `factors`: of the gate, the values, the keys (B), the queries (C) and the steps, as the projection gives them.
    `out_factor`: of the last projection, beside `residual_scale`. `step_limits`: the least and the largest step.
    """

    norm: str = "gated"
    factors: tuple[float, ...] = (1.0,) * 5
    out_factor: float = 1.0
    step_limits: tuple[float, float] = (0.0, inf)


@dataclass(frozen=True, slots=True)
class ChannelScanConfig:
    """Further facts of Mamba 1. `step_rank`: width of what steps are projected from. `norm`: that, keys and queries are
    normed, with weights (`weighted`) or without (`plain`), or not at all ("").
    """

    step_rank: int = 0
    norm: str = ""
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """`layers` marks the recurrent layers, which are of one kind:

    conv: a short convolution between two gates (LFM2).
    delta: a gated delta net (Yang et al. 2024) behind a short convolution (Qwen 3.5). Each of `num_key_heads` heads of
    `key_dim` serves equally many of `num_heads` heads of `value_dim`.
    scan: Mamba 2 (Dao and Gu 2024) behind a short convolution. Its groups are the key heads here.
    channels: Mamba 1 (Gu and Dao 2023) behind a short convolution: one head, whose decays differ by key and channel.

    The convolution sees the last `kernel` inputs of each of `channels`. `bias`: of the projections; `conv_bias`: of the
    convolution. `is_fused`: the checkpoint has the projections in two tensors (Qwen3-Next), see
    `engine.models.row_orders`. `attention` marks the layers with attention, where these are not all others: layers may
    have both side by side, or neither; then they are an MLP alone, and the others have none (block "single").
    """

    kind: str
    layers: tuple[bool, ...]
    kernel: int
    channels: int
    bias: bool = False
    conv_bias: bool = False
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_fused: bool = False
    attention: tuple[bool, ...] = ()
    scan: ScanConfig = ScanConfig()
    channel_scan: ChannelScanConfig = field(default=ChannelScanConfig(), repr=False)

    def num_before(self, layer: int) -> int:
        """Number of recurrent layers before this one."""
        return sum(self.layers[:layer])

    def num_kv_before(self, layer: int) -> int:
        """Number of layers with attention before this one. A model without any has one layer of KV behind its last one,
        which nobody writes: states lie in blocks of KV.
        """
        if not any(map(self.has_attention, range(len(self.layers)))):
            return int(layer == len(self.layers))
        return sum(self.attention[:layer]) if self.attention else layer - self.num_before(layer)

    def has_attention(self, layer: int) -> bool:
        return self.attention[layer] if self.attention else not self.layers[layer]

    def kv_layers(self, first: int, end: int) -> tuple[int, int]:
        """The first layer with KV, and the number of them, that are final once layers [first, end) are computed. The
        last one waits for the model's last layer: who sees it is sure that recurrent states are final, too.
        """
        last = self.num_kv_before(len(self.layers)) - 1
        first_kv, end_kv = (min(self.num_kv_before(layer), last) for layer in (first, end))
        return first_kv, (last + 1 if end == len(self.layers) else end_kv) - first_kv

    @property
    def conv_numbers(self) -> int:
        """Numbers of the convolution's state: its last inputs, but for the current one."""
        return (self.kernel - 1) * self.channels

    @property
    def state_numbers(self) -> int:
        """Numbers of the state of one layer."""
        return self.conv_numbers + self.num_heads * self.key_dim * self.value_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's state, in all layers."""
        return sum(self.layers) * self.state_numbers * NUMBER_BYTES

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def norm_width(self) -> int:
        """Number of weights of the norm of a layer's result, 0 if there is none."""
        widths = {"delta": self.value_dim, "scan": self.value_width if self.scan.norm else 0}
        return widths.get(self.kind, 0)

    @property
    def projected(self) -> int:
        """Width of a layer's first projection: conv, the two gates and the input; delta, queries, keys and values, the
        gate of the result, then the strength of updates and the decay of each head; scan, the gate, values, keys and
        queries, then the step of each head; channels, the values and the gate.
        """
        if self.kind in ("conv", "channels"):
            return self.channels * (3 if self.kind == "conv" else 2)
        return self.channels + self.value_width + self.num_heads * (2 if self.kind == "delta" else 1)

    @property
    def inner_width(self) -> int:
        """Width of the rows between the two small matrices of `channels`: what steps are projected from, a key and a
        query.
        """
        return self.channel_scan.step_rank + 2 * self.key_dim if self.kind == "channels" else 0

    @property
    def result_width(self) -> int:
        """Width of what a layer's last projection takes."""
        return self.channels if self.kind == "conv" else self.value_width
