"""A batch as plain arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.device_copies import NoCopies
from engine.sequence import SequenceState
from engine.step_input import StepInputBuilder
from tests.fakes.requests import make_request

BLOCK_SIZE = 4


@st.composite
def batches(draw: st.DrawFn) -> ScheduledBatch:
    """Sequences of random lengths, at random places, with drafts; those of one token first."""
    items = []
    for number in range(draw(st.integers(1, 5))):
        num_tokens, num_drafts = draw(st.integers(1, 20)), draw(st.integers(0, 3))
        start = draw(st.integers(0, num_tokens - 1))
        sequence = SequenceState(
            make_request(f"r{number}", draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens)))
        )
        sequence.block_table += draw(st.lists(st.integers(0, 50), min_size=6, max_size=8))
        end = draw(st.integers(start + 1, num_tokens))
        drafts = tuple(range(num_drafts)) if end == num_tokens else ()
        items.append(ScheduledSequence(sequence, start, end - start + len(drafts), drafts))
    items.sort(key=lambda item: item.num_tokens > 1)
    return ScheduledBatch(tuple(items), copies=((1, 2), (3, 4)), number=7)


@given(st.lists(batches(), min_size=1, max_size=3))
def test_every_token_is_where_its_sequence_says(several: list[ScheduledBatch]) -> None:
    builder = StepInputBuilder(BLOCK_SIZE)  # its buffers are used again
    for batch in several:
        step = builder.build(batch)
        metadata = step.on_device(NoCopies()).metadata
        assert step.copies == ((1, 2), (3, 4))
        sampled = []
        for row, item in enumerate(batch.items):
            first, end = step.query_starts[row : row + 2].tolist()
            assert step.token_ids[first:end].tolist() == item.token_ids()
            assert step.positions[first:end].tolist() == list(range(item.start, item.end))
            table = item.sequence.block_table
            assert step.block_tables[row, : len(table)].tolist() == table
            expected = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(item.start, item.end)]
            assert step.slot_mapping[first:end].tolist() == expected
            assert step.context_lens[row] == item.end
            if item.needs_sampling:
                sampled += range(end - 1 - len(item.drafts), end)
        assert step.sample_rows.tolist() == sampled
        assert [chunk.row for chunk in metadata.chunks] == list(range(batch.num_decodes, len(batch.items)))
        assert metadata.slot_mapping.numpy().ctypes.data == step.slot_mapping.ctypes.data


def test_arrays_stay_where_they_are() -> None:
    builder, sequence = StepInputBuilder(BLOCK_SIZE), SequenceState(make_request("r", range(8)))
    sequence.block_table += [0, 1]

    def build(num_tokens: int) -> int:
        return builder.build(ScheduledBatch((ScheduledSequence(sequence, 0, num_tokens),))).token_ids.ctypes.data

    assert build(8) == build(3) == build(8)
    assert builder.build(ScheduledBatch(())).token_ids.dtype == np.int64
