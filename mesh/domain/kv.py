"""KV as workers agree on it: its shape, and the part that each rank holds.

A worker is a group of ranks. With pipeline degree P and tensor degree T it has P * T ranks; rank `stage * T + t` holds
the layers of pipeline stage `stage` and the KV heads of tensor rank `t`: a rectangle, layers x heads. With more tensor
ranks than heads, several ranks hold copies of one head. A prefill and a decode worker may have different degrees:
`plan_shards` says which rank sends which rectangle, a shard of the transfer, to which rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from mesh.domain.errors import ConfigurationError, LayoutMismatch
from mesh.domain.kv_groups import KVGroups

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one weight, by dtype."""
KV_DTYPE_BYTES = {**DTYPE_BYTES, "int8": 1, "fp8": 1}
"""Bytes of one KV element, by dtype. int8 KV has one fp32 scale per row (one head of one token). fp8 is e4m3, whose
scales belong to the model (`engine/kv/scales.py`)."""
SCALE_BYTES = 4
INT8_UNIT_TOKENS = 16
"""int8 KV stores this many tokens of a head contiguously, which suits the CPU's multiply instructions."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers [first, first + count)."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """One past the last integer."""
        return self.first + self.count

    def intersection(self, other: "Span") -> "Span | None":
        """Return the integers in both spans, None if there are none."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return Span(first, end - first) if first < end else None

    def is_inside(self, other: "Span") -> bool:
        """True if the span is not empty and `other` contains all of it."""
        return self.count > 0 and other.first <= self.first and self.end <= other.end

    def slice_in(self, outer: "Span") -> slice:
        """Return the slice of this span in an array with one element per integer of `outer`."""
        return slice(self.first - outer.first, self.end - outer.first)

    def split(self, count: int) -> "tuple[Span, Span]":
        """Return the first `count` integers and the remaining ones."""
        return Span(self.first, count), Span(self.first + count, self.count - count)


@dataclass(frozen=True, slots=True, order=True)
class KVSpan:
    """A rectangle of a model's KV: some layers of some KV heads."""

    layers: Span
    heads: Span

    @property
    def num_layer_heads(self) -> int:
        """The number of (layer, head) pairs."""
        return self.layers.count * self.heads.count

    def intersection(self, other: "KVSpan") -> "KVSpan | None":
        """Return the rectangle in both spans, None if there is none."""
        layers, heads = self.layers.intersection(other.layers), self.heads.intersection(other.heads)
        return KVSpan(layers, heads) if layers is not None and heads is not None else None

    def is_inside(self, other: "KVSpan") -> bool:
        """True if the span is not empty and `other` contains all of it."""
        return self.layers.is_inside(other.layers) and self.heads.is_inside(other.heads)

    def require_inside(self, cached: "KVSpan") -> None:
        """Raise IndexError unless a cache that has `cached` has all of this span."""
        if not self.is_inside(cached):
            raise IndexError(f"{self} is not completely in this cache, which has {cached}")

    def __str__(self) -> str:
        layers, heads = self.layers, self.heads
        return f"layers {layers.first}..{layers.end - 1}, KV heads {heads.first}..{heads.end - 1}"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a whole model's KV. Two workers that exchange KV must have equal layouts.

    A rank holds a `KVSpan`: some layers of some heads. There, one block of one layer is two arrays, keys then values,
    of shape `[block_size, heads held, head_dim]` in C order. In int8 the shape is `[block_size / 16, heads held, rows
    and scales of 16 tokens]`, in the order of `engine/kernels/cpu/attention/kv_segments.py`.

    Where `keys_are_values`, as in latent attention, a block has one array, whose rows are keys and values at once. In
    int8 it has the order of values.

    A model with recurrent layers has no KV of these, but a state of each sequence. The first `state_blocks` blocks of a
    sequence hold it (`engine/models/recurrent/state.py`), those behind them the KV of its tokens.

    A block has the KV of `num_layers` layers. Where KV behind sliding windows is freed, these are a group of the
    model's layers, and `windows` are those of the groups (KVGroups); else it is empty, and a block has all layers.
    """

    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    state_blocks: int = field(default=0, repr=False)
    keys_are_values: bool = field(default=False, repr=False)
    windows: tuple[int, ...] = field(default=(), repr=False)
    windows_are_chunks: bool = field(default=False, repr=False)

    @property
    def groups(self) -> KVGroups:
        return KVGroups(self.block_size, self.windows or (0,), self.windows_are_chunks)

    @property
    def num_unused(self) -> int:
        """Blocks that nobody gets, see NO_BLOCK."""
        return 1 if self.windows else 0

    @property
    def whole(self) -> KVSpan:
        """All layers of all heads: the span of a worker with one rank."""
        return KVSpan(Span(0, self.num_layers), Span(0, self.num_kv_heads))

    @property
    def num_planes(self) -> int:
        """Arrays of a block in one layer: keys and values, or one that is both."""
        return 1 if self.keys_are_values else 2

    @property
    def cell_bytes(self) -> int:
        """Bytes of one block of one head in one layer, keys and values."""
        return self.num_planes * self.block_size * self.row_bytes

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block of all heads in one layer, keys and values."""
        return self.num_kv_heads * self.cell_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token, keys or values."""
        row_bytes = self.head_dim * KV_DTYPE_BYTES[self.dtype]
        return row_bytes + SCALE_BYTES if self.dtype == "int8" else row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.layer_block_bytes

    @property
    def unit_tokens(self) -> int:
        """Tokens of one head that a block stores contiguously."""
        return INT8_UNIT_TOKENS if self.dtype == "int8" else 1

    @property
    def block_units(self) -> int:
        """Units of one head in a block; a block smaller than a unit counts as one."""
        return max(1, self.block_size // self.unit_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks of a sequence with up to `num_tokens` tokens, once its prompt is computed."""
        return self.state_blocks + self.groups.num_blocks_for(num_tokens)

    def num_entries_for(self, num_tokens: int) -> int:
        """The length of the block table of a sequence with `num_tokens` tokens."""
        return self.state_blocks + self.groups.count * self.groups.num_positions(num_tokens)

    def transfer_entries(self, num_tokens: int) -> list[int]:
        """The entries of a prompt's block table whose blocks a transfer sends, in its order: those of tokens that are
        visible, then those of the state. So the blocks that a receiver has already are the first ones. The place of a
        block in this list is its index in the transfer, which both sides know it by.
        """
        of_tokens = (self.state_blocks + entry for entry in self.groups.visible_entries(num_tokens))
        return [*of_tokens, *range(self.state_blocks)]

    def transfer_blocks(self, block_table: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """The blocks of `transfer_entries`: ids by index in the transfer."""
        return tuple(block_table[entry] for entry in self.transfer_entries(num_tokens))

    def num_transfer_blocks(self, num_tokens: int) -> int:
        """The length of `transfer_entries`."""
        return self.first_transfer_index(num_tokens, self.groups.num_positions(num_tokens)) + self.state_blocks

    def first_transfer_index(self, num_tokens: int, position: int) -> int:
        """The index in the transfer of the first block at this position of the prompt (KVGroups) or behind it."""
        groups = self.groups
        return sum(max(0, position - groups.first_visible(group, num_tokens - 1)) for group in range(groups.count))

    def max_tokens_in(self, num_blocks: int, step_tokens: int, max_tokens: int) -> int:
        """The length of the longest sequence, of at most `max_tokens`, that so many blocks hold while it is computed in
        steps of up to `step_tokens`.
        """
        return self.groups.max_tokens_in(num_blocks - self.state_blocks, step_tokens, max_tokens)

    def require_same(self, other: "KVLayout") -> None:
        """Raise LayoutMismatch, with both values of every differing field, unless `other` is equal."""
        differences = [
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(other, f.name)!r} there"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        if differences:
            raise LayoutMismatch("KV layouts differ: " + "; ".join(differences))


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel degrees of a worker: `tensor` divides the heads, `pipeline` the layers."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"{self.tensor}x{self.pipeline}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a transfer that rank `source` of one worker sends to rank `target` of another."""

    source: int
    target: int
    span: KVSpan


def kv_spans(num_layers: int, num_kv_heads: int, degrees: Degrees) -> tuple[KVSpan, ...]:
    """Return the span of each rank, by rank. Stages divide the layers, and tensor ranks the heads, unequally if they
    must. If there are more tensor ranks than heads, equally many hold each head. Raises ConfigurationError for
    impossible degrees.
    """
    if degrees.tensor < 1 or degrees.pipeline < 1:
        raise ConfigurationError(f"parallel degrees must be at least 1, got {degrees.tensor} and {degrees.pipeline}")
    if degrees.pipeline > num_layers:
        raise ConfigurationError(
            f"pipeline_parallel {degrees.pipeline} does not fit {num_layers} layers: use {num_layers} or fewer"
        )
    if degrees.tensor <= num_kv_heads:
        heads = equal_parts(num_kv_heads, degrees.tensor)
    elif degrees.tensor % num_kv_heads == 0:
        heads = [Span(rank * num_kv_heads // degrees.tensor, 1) for rank in range(degrees.tensor)]
    else:
        raise ConfigurationError(
            f"tensor_parallel {degrees.tensor} does not fit {num_kv_heads} KV heads: use {num_kv_heads} or fewer, or a "
            "multiple of it"
        )
    return tuple(KVSpan(stage, share) for stage in equal_parts(num_layers, degrees.pipeline) for share in heads)


def plan_shards(sources: Sequence[KVSpan], targets: Sequence[KVSpan]) -> tuple[Shard, ...]:
    """Plan the shards that bring every target all of its KV, each (layer, head) exactly once. Of several sources that
    hold the same, one sends to a target: each in turn.

    Raises LayoutMismatch if the sources lack KV that a target needs, or hold it twice in unequal spans.
    """
    holders: dict[KVSpan, list[int]] = {}
    for source, span in enumerate(sources):
        holders.setdefault(span, []).append(source)
    plan: list[Shard] = []
    for target, target_span in enumerate(targets):
        pieces = [
            Shard(of_span[target % len(of_span)], target, piece)
            for span, of_span in holders.items()
            if (piece := span.intersection(target_span)) is not None
        ]
        if sum(shard.span.num_layer_heads for shard in pieces) != target_span.num_layer_heads:
            raise LayoutMismatch(f"the sending ranks do not hold each of {target_span} exactly once")
        plan += pieces
    return tuple(plan)


def equal_parts(total: int, num_parts: int) -> list[Span]:
    """Divide [0, total) into parts whose lengths differ by one at most."""
    bounds = [part * total // num_parts for part in range(num_parts + 1)]
    return [Span(first, end - first) for first, end in pairwise(bounds)]
