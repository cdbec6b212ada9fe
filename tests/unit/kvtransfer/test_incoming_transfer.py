"""Several shards of one transfer: committed when they tile the whole, failed when none is written, and never both."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.incoming_transfer import IncomingShards
from mesh.domain.errors import LayoutMismatch, LeaseExpired, TransferCorrupt, TransferFailed
from mesh.domain.kv import Degrees, KVSpan, Span, kv_spans

WHOLE = KVSpan(Span(0, 4), Span(0, 4))
TOKEN = 7
SPANS = sorted({span for tensor in (1, 2, 4) for stages in (1, 2) for span in kv_spans(4, 4, Degrees(tensor, stages))})
BEYOND = KVSpan(Span(0, 4), Span(2, 4))


def cells(span: KVSpan) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer in range(span.layers.first, span.layers.end)
        for head in range(span.heads.first, span.heads.end)
    }


class Shards(RuleBasedStateMachine):
    """Shards of any degrees open, commit, fail and leave in any order, too late as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = IncomingShards(WHOLE)
        self.writing: set[KVSpan] = set()
        self.committed: set[KVSpan] = set()
        self.was_committed = False

    @rule(span=st.sampled_from([*SPANS, BEYOND]))
    def open(self, span: KVSpan) -> None:
        is_late = self.shards.error is not None
        is_taken = any(cells(span) & cells(other) for other in self.writing | self.committed)
        if is_late or is_taken or span == BEYOND:
            with pytest.raises(TransferFailed if is_late or is_taken else LayoutMismatch):
                self.shards.open(span)
        else:
            self.shards.open(span)
            self.writing.add(span)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), token=st.sampled_from([TOKEN, TOKEN, TOKEN, 8]))
    def commit(self, data: st.DataObject, token: int) -> None:
        span = data.draw(st.sampled_from(sorted(self.writing)))
        if self.shards.error is not None:
            with pytest.raises(TransferFailed, match="has failed"):
                self.shards.commit(span, token)
        elif self.shards.first_token_id not in (None, token):
            with pytest.raises(TransferCorrupt, match="first tokens"):
                self.shards.commit(span, token)
        else:
            self.shards.commit(span, token)
            self.writing.remove(span)
            self.committed.add(span)

    @rule()
    def fail(self) -> None:
        before = self.shards.error
        error = LeaseExpired("silent")
        self.shards.fail(error)
        assert self.shards.error is (None if self.was_committed else before or error)

    @precondition(lambda self: self.writing and self.shards.error is not None)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(sorted(self.writing)))
        self.shards.leave(span)
        self.writing.remove(span)

    @invariant()
    def ends_in_one_way(self) -> None:
        here = [cell for span in self.committed for cell in cells(span)]
        assert len(here) == len(set(here)), "nothing comes twice"
        is_complete = set(here) == cells(WHOLE)
        assert self.shards.is_committed == is_complete
        assert self.shards.has_failed == (self.shards.error is not None and not self.writing)
        assert not (self.shards.is_committed and self.shards.has_failed)
        assert self.shards.is_opened == (set().union(*map(cells, self.writing | self.committed)) == cells(WHOLE))
        assert not self.was_committed or is_complete, "a commit is for good"
        self.was_committed = is_complete


TestShards = Shards.TestCase
