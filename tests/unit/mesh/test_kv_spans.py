"""Which rank holds what, and what moves between workers of different degrees."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mesh.domain.errors import ConfigurationError, LayoutMismatch
from mesh.domain.kv import Degrees, KVSpan, Shard, Span, kv_spans, plan_shards

MODELS = st.tuples(st.integers(1, 40), st.integers(1, 16))
DEGREES = st.builds(Degrees, st.integers(1, 16), st.integers(1, 4))


def cells(span: KVSpan) -> set[tuple[int, int]]:
    return set(product(range(span.layers.first, span.layers.end), range(span.heads.first, span.heads.end)))


def spans_or_nothing(model: tuple[int, int], degrees: Degrees) -> tuple[KVSpan, ...]:
    try:
        return kv_spans(*model, degrees)
    except ConfigurationError:
        return ()


@given(MODELS, DEGREES)
def test_ranks_hold_everything_equally_often(model: tuple[int, int], degrees: Degrees) -> None:
    """Once, unless there are more tensor ranks than heads."""
    held = spans_or_nothing(model, degrees)
    assume(held)
    counts = Counter(cell for span in held for cell in cells(span))
    assert counts.keys() == set(product(range(model[0]), range(model[1])))
    assert set(counts.values()) == {max(1, degrees.tensor // model[1])}
    assert len(held) == degrees.tensor * degrees.pipeline


@given(MODELS, DEGREES, DEGREES)
def test_flows_bring_each_target_all_it_holds_once(model: tuple[int, int], ours: Degrees, theirs: Degrees) -> None:
    sources, targets = spans_or_nothing(model, ours), spans_or_nothing(model, theirs)
    assume(sources and targets)
    found = plan_shards(sources, targets)
    for rank, target in enumerate(targets):
        arrived = Counter(cell for shard in found if shard.target == rank for cell in cells(shard.span))
        assert arrived.keys() == cells(target)
        assert set(arrived.values()) == {1}
    assert all(shard.span.is_inside(sources[shard.source]) for shard in found)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_ranks_with_copies_take_turns(num_heads: int, num_copies: int, num_others: int) -> None:
    """To as many ranks, each sends its own; to several that need the same, no copy sends two more than another."""
    holders = kv_spans(2, num_heads, Degrees(num_heads * num_copies))
    assert [(shard.source, shard.target) for shard in plan_shards(holders, holders)] == [
        (i, i) for i in range(len(holders))
    ]
    for targets in (kv_spans(2, num_heads, Degrees(num_heads * num_others)), kv_spans(2, num_heads, Degrees())):
        sent = Counter(shard.source for shard in plan_shards(holders, targets))
        for head in range(num_heads):
            of_head = [sent[rank] for rank, span in enumerate(holders) if span.heads.first == head]
            assert max(of_head) - min(of_head) <= 1


def test_one_rank_sends_all_it_has_to_one() -> None:
    [span] = kv_spans(30, 3, Degrees())
    assert span == KVSpan(Span(0, 30), Span(0, 3))
    assert plan_shards([span], [span]) == (Shard(0, 0, span),)


def test_heads_are_shared_out_unequally_if_they_must() -> None:
    assert [span.heads for span in kv_spans(1, 3, Degrees(2))] == [Span(0, 1), Span(1, 2)]


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        (Degrees(4), "tensor_parallel 4 does not fit 3 KV heads: use 3 or fewer, or a multiple of it"),
        (Degrees(1, 5), "pipeline_parallel 5 does not fit 4 layers: use 4 or fewer"),
        (Degrees(0), "at least 1"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_those_that_can(degrees: Degrees, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        kv_spans(4, 3, degrees)


def test_missing_kv_is_refused() -> None:
    whole = KVSpan(Span(0, 4), Span(0, 2))
    with pytest.raises(LayoutMismatch, match=r"layers 0\.\.3, KV heads 0\.\.1 exactly once"):
        plan_shards([KVSpan(Span(0, 3), Span(0, 2))], [whole])


def test_heads_have_copies_if_there_are_more_ranks() -> None:
    assert [span.heads.first for span in kv_spans(1, 2, Degrees(4))] == [0, 0, 1, 1]


def test_kv_that_two_ranks_hold_in_unequal_parts_is_refused() -> None:
    whole, part = KVSpan(Span(0, 4), Span(0, 2)), KVSpan(Span(0, 4), Span(0, 1))
    assert plan_shards([whole, whole], [whole]) == (Shard(0, 0, whole),)
    with pytest.raises(LayoutMismatch, match="exactly once"):
        plan_shards([whole, part], [whole])
