"""One transfer that comes in several flows. Pure, no I/O.

A prefill and a decode worker whose KV lies in several processes move it from process to process: a flow is the
conversation that brings one rectangle of layers and heads. A flow may come from any sender, as long as it overlaps no
other. The transfer is committed once the flows that are committed tile the whole. If one fails, all fail, and the
transfer has failed once none of them writes any more.

    missing ──open──▶ writing ──commit──▶ committed
                         └─────leave────▶ gone         after `fail`, of this flow or of the transfer
"""

from mesh.domain.errors import LayoutMismatch, MeshError, TransferCorrupt, TransferFailed
from mesh.domain.kv import KVSpan


class Assembly:
    """The flows that bring the KV of `whole`. `error`: why the transfer fails, if it does; the first reason counts."""

    def __init__(self, whole: KVSpan) -> None:
        self.error: MeshError | None = None
        self.first_token_id: int | None = None
        self._whole = whole
        self._writing: set[KVSpan] = set()
        self._committed: set[KVSpan] = set()

    @property
    def is_opened(self) -> bool:
        """True once flows have come for the whole."""
        return self._num_cells(self._writing | self._committed) == self._whole.num_cells

    @property
    def is_committed(self) -> bool:
        return self.error is None and self._num_cells(self._committed) == self._whole.num_cells

    @property
    def has_failed(self) -> bool:
        """True if the transfer fails and no flow writes any more."""
        return self.error is not None and not self._writing

    def require_free(self, span: KVSpan) -> None:
        """Raise TransferFailed if a flow of this span comes too late, or overlaps another."""
        if self.error is not None:
            raise TransferFailed(f"the transfer has failed: {self.error}")
        for other in self._writing | self._committed:
            if span.intersection(other) is not None:
                raise TransferFailed(f"the KV of {other} has a sender already")

    def open(self, span: KVSpan) -> None:
        """A flow begins, of a span that is free. Raises LayoutMismatch if it brings KV that has no place here."""
        self.require_free(span)
        if not span.is_inside(self._whole):
            raise LayoutMismatch(f"{self._whole} are expected here, the sender offers {span}")
        self._writing.add(span)

    def commit(self, span: KVSpan, first_token_id: int) -> None:
        """A flow is complete and verified. Raises TransferFailed if the transfer has failed meanwhile, and
        TransferCorrupt if flows disagree; the flow is still to `leave` then.
        """
        if self.error is not None:
            raise TransferFailed(f"the transfer has failed: {self.error}")
        if self.first_token_id not in (None, first_token_id):
            raise TransferCorrupt(f"flows bring first tokens {self.first_token_id} and {first_token_id}")
        self.first_token_id = first_token_id
        self._writing.remove(span)
        self._committed.add(span)

    def fail(self, error: MeshError) -> None:
        """The transfer fails, unless it is committed or has failed before."""
        if not self.is_committed and self.error is None:
            self.error = error

    def leave(self, span: KVSpan) -> None:
        """A flow that is not committed writes no more."""
        self._writing.discard(span)

    @staticmethod
    def _num_cells(spans: set[KVSpan]) -> int:
        return sum(span.num_cells for span in spans)
