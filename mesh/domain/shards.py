"""Which rank of a worker holds which part of a model's KV, and which parts move between two workers.

A worker is a group of ranks. With pipeline degree P and tensor degree T it has P * T ranks; rank `stage * T + t` holds
the layers of pipeline stage `stage` and the KV heads of tensor rank `t`: a rectangle, layers x heads. A prefill and a
decode worker may have different degrees: `flows` plans which rank sends which rectangle to which rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mesh.domain.errors import ConfigurationError, LayoutMismatch


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
    def num_cells(self) -> int:
        """The number of (layer, head) pairs."""
        return self.layers.count * self.heads.count

    def intersection(self, other: "KVSpan") -> "KVSpan | None":
        """Return the rectangle in both spans, None if there is none."""
        layers, heads = self.layers.intersection(other.layers), self.heads.intersection(other.heads)
        return KVSpan(layers, heads) if layers is not None and heads is not None else None

    def is_inside(self, other: "KVSpan") -> bool:
        """True if the span is not empty and `other` contains all of it."""
        return self.layers.is_inside(other.layers) and self.heads.is_inside(other.heads)

    def __str__(self) -> str:
        layers, heads = self.layers, self.heads
        return f"layers {layers.first}..{layers.end - 1}, KV heads {heads.first}..{heads.end - 1}"


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel degrees of a worker: `tensor` divides the heads, `pipeline` the layers."""

    tensor: int = 1
    pipeline: int = 1


@dataclass(frozen=True, slots=True)
class Flow:
    """Rank `source` of one worker sends `span` to rank `target` of another."""

    source: int
    target: int
    span: KVSpan


def kv_spans(
    num_layers: int, num_kv_heads: int, degrees: Degrees, stages: Sequence[Span] | None = None
) -> tuple[KVSpan, ...]:
    """Return the span of each rank, by rank. `stages` lists the layers of each pipeline stage; None divides equally.

    Up to `num_kv_heads` tensor ranks divide the heads, unequally if they must. A larger degree must be a multiple of
    `num_kv_heads`; then several ranks hold copies of one head. Raises ConfigurationError for impossible degrees.
    """
    if degrees.tensor < 1 or degrees.pipeline < 1:
        raise ConfigurationError(f"parallel degrees must be at least 1, got {degrees.tensor} and {degrees.pipeline}")
    if degrees.pipeline > num_layers:
        raise ConfigurationError(f"pipeline_parallel {degrees.pipeline} does not fit {num_layers} layers")
    heads = _heads_of(degrees.tensor, num_kv_heads)
    layers = stages if stages is not None else _equal_parts(num_layers, degrees.pipeline)
    if len(layers) != degrees.pipeline or not _tiles(layers, num_layers):
        raise ConfigurationError(f"the {degrees.pipeline} stages do not share out {num_layers} layers: {list(layers)}")
    return tuple(KVSpan(stage, share) for stage in layers for share in heads)


def flows(sources: Sequence[KVSpan], targets: Sequence[KVSpan]) -> tuple[Flow, ...]:
    """Plan the flows that bring every target all of its KV, each (layer, head) exactly once.

    If several sources hold copies, targets take turns among them. Raises LayoutMismatch if the sources lack KV that a
    target needs.
    """
    holders: dict[KVSpan, list[int]] = {}
    for rank, span in enumerate(sources):
        holders.setdefault(span, []).append(rank)
    plan: list[Flow] = []
    for target, target_span in enumerate(targets):
        pieces = [
            (ranks, piece) for span, ranks in holders.items() if (piece := span.intersection(target_span)) is not None
        ]
        if sum(piece.num_cells for _, piece in pieces) != target_span.num_cells:
            raise LayoutMismatch(f"the sending ranks do not hold each of {target_span} exactly once")
        plan += [Flow(ranks[target % len(ranks)], target, piece) for ranks, piece in pieces]
    return tuple(plan)


def _heads_of(tensor: int, num_kv_heads: int) -> list[Span]:
    if tensor <= num_kv_heads:
        return _equal_parts(num_kv_heads, tensor)
    if tensor % num_kv_heads:
        *degrees, last = [*range(1, num_kv_heads + 1), 2 * num_kv_heads, 3 * num_kv_heads]
        listing = ", ".join(map(str, degrees))
        raise ConfigurationError(
            f"tensor_parallel {tensor} does not fit {num_kv_heads} KV heads; {listing} and {last} do"
        )
    copies = tensor // num_kv_heads
    return [Span(rank // copies, 1) for rank in range(tensor)]


def _equal_parts(total: int, num_parts: int) -> list[Span]:
    """Divide [0, total) into parts whose lengths differ by one at most."""
    bounds = [part * total // num_parts for part in range(num_parts + 1)]
    return [Span(first, end - first) for first, end in pairwise(bounds)]


def _tiles(spans: Sequence[Span], total: int) -> bool:
    firsts = [span.first for span in spans]
    bounds = [span.end for span in spans]
    return [0, *bounds[:-1]] == firsts and bounds[-1] == total and all(span.count > 0 for span in spans)
