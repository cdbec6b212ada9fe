"""A runner that needs no model but does need its KV: the next token is a function of what is in the cache.

If a block is missing, misplaced or stale, the tokens come out wrong, so tests that compare tokens also test the
transfer.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.runner import FinishBatch, LayerHook, RunnerOutput
from engine.sequence import SequenceState
from mesh.domain.errors import InvalidRequest, MeshError, ModelFailed
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.domain.tokens import PromptLogprob, SampledToken, TokenLogprob
from tests.fakes.kv_store import TwoPassCopies

VOCAB = 211
_OF_GROUP = 1000  # between the values of a token in one group of layers and in the next
FAKE_LAYOUT = KVLayout("fake", num_layers=4, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")


def fake_token(token_ids: Iterable[int]) -> int:
    """The token that FakeRunner generates after `token_ids`; never 0, so that 0 can be end of sequence."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % (VOCAB - 1) + 1


def fake_continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens FakeRunner generates after `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(fake_token(ids))
    return ids[len(prompt) :]


class FakeKVStore(TwoPassCopies):
    """KV in numpy, `[num_layers, 2, num_blocks, block_size, heads, head_dim]`; implements kvtransfer's KVStore."""

    def __init__(self, num_blocks: int, layout: KVLayout = FAKE_LAYOUT) -> None:
        self.layout = layout
        self.span = layout.whole
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.data = np.full(shape, -1, dtype=np.float32)

    def read_blocks(self, block_ids: Sequence[int], span: KVSpan, out: memoryview) -> None:
        """Copy blocks out."""
        taken = self.data[span.layers.first : span.layers.end][:, :, list(block_ids)]
        np.frombuffer(out, dtype=np.float32)[:] = taken.ravel()

    def write_blocks(self, block_ids: Sequence[int], span: KVSpan, data: memoryview | bytes) -> None:
        """Copy blocks in."""
        layers = self.data[span.layers.first : span.layers.end]
        shape = (span.layers.count, 2, len(block_ids), *self.data.shape[3:])
        layers[:, :, list(block_ids)] = np.frombuffer(data, dtype=np.float32).reshape(shape)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Pins nothing."""
        return lambda: None


class FakeRunner:
    """Implements engine.runner.Runner over a FakeKVStore. `gate`, when closed, stops the engine in a step."""

    borrows_cores = True

    def __init__(self, store: FakeKVStore, layers_per_group: int = 2) -> None:
        self.store = store
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        """Set once a first step has begun."""
        self.is_closed = False
        self.fail_with: Exception | None = None
        self.refused: dict[str, str] = {}
        """Requests that cannot go on, and why; "early": before they begin; "not finite": the model fails."""
        self.num_steps = 0
        self.close_gate_after: int | None = None
        """Close the gate by itself once this many steps are done."""
        self.step_s = 0.0
        """How long each step takes."""
        self.lent_cores: list[tuple[int, ...]] = []
        """Cores lent for each step."""
        self._layers_per_group = layers_per_group

    def prepare(self, choices: Sequence[SequenceState]) -> "list[Future[None]]":
        """Nothing is needed."""
        ready: Future[None] = Future()
        if any(self.refused.get(choice.spec.request_id) == "early" for choice in choices):
            ready.set_exception(InvalidRequest("early"))
        else:
            ready.set_result(None)
        return [ready]

    def close(self) -> None:
        self.is_closed = True

    def use_cores(self, lent: tuple[int, ...]) -> None:
        self.lent_cores.append(lent)

    def clear_blocks(self, block_ids: list[int]) -> None:
        self.store.data[:, :, block_ids] = 0

    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        """Write KV of the step's tokens, layer group by layer group. Then tokens are derived from all KV so far."""
        self.in_step.set()
        self.gate.wait()
        if self.fail_with is not None:
            raise self.fail_with
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.num_steps == self.close_gate_after:
            self.gate.clear()
        for source, target in batch.copies:
            self.store.data[:, :, target] = self.store.data[:, :, source]
        is_lost = [not self._update_state(item) for item in batch.items]
        for first in range(0, self.store.layout.num_layers, self._layers_per_group):
            for item in batch.items:
                for position, token_id in enumerate(item.token_ids(), item.start):
                    for group, slot in enumerate(self._slots(item.sequence, position, first)):
                        slot[:] = token_id + group * _OF_GROUP
            if on_layers is not None:
                on_layers(batch, Span(first, self._layers_per_group))
        for source, target in batch.saves:
            self.store.data[:, :, target] = self.store.data[:, :, source]
        return lambda: [self._output(item, is_lost=lost) for item, lost in zip(batch.items, is_lost, strict=True)]

    def forget(self, sequence: SequenceState) -> None:
        """Nothing is kept."""

    def _slots(self, sequence: SequenceState, position: int, first_layer: int) -> list[np.ndarray]:
        """A token's KV in each group of layers."""
        layout = self.store.layout
        size, count = layout.block_size, layout.groups.count
        first = layout.state_blocks + position // size * count
        layers = self.store.data[first_layer : first_layer + self._layers_per_group]
        return [layers[:, :, block_id, position % size] for block_id in sequence.block_table[first : first + count]]

    def _seen(self, sequence: SequenceState, position: int, first_seen: list[int]) -> int:
        """The token that its KV tells, in all groups that see it; -99 if they do not agree."""
        values = set()
        for first in (0, 2):
            for group, slot in enumerate(self._slots(sequence, position, first)):
                if position >= first_seen[group]:
                    values |= {int(value) - group * _OF_GROUP for value in slot.ravel()}
        return values.pop() if len(values) == 1 else -99

    def _update_state(self, item: ScheduledSequence) -> bool:
        """Write the recurrent state, if the layout has one, as it is after the step's tokens. False if it was not as it
        must be before them.
        """
        blocks = item.sequence.block_table[: self.store.layout.state_blocks]
        before, end = self.store.data[:, :, blocks], item.end - item.num_repeated
        expected = fake_token(item.sequence.token_ids[: item.start])
        self.store.data[:, :, blocks] = fake_token(item.sequence.token_ids[:end])
        return item.start == 0 or bool((before == expected).all())

    def _output(self, item: ScheduledSequence, *, is_lost: bool = False) -> RunnerOutput:
        sequence = item.sequence
        prompt_logprobs = ()
        if sequence.spec.prompt_logprobs:
            last = min(item.end, sequence.num_prompt_tokens - 1)
            prompt_logprobs = tuple(PromptLogprob(-0.25) for _ in range(item.start, last))
        if not item.needs_sampling:
            return RunnerOutput((), prompt_logprobs)
        windows = self.store.layout.windows or (0,)
        first_seen = [max(0, item.start - window + 1) if window else 0 for window in windows]
        seen = [self._seen(sequence, position, first_seen) for position in range(item.end)]
        seen[0] = -99 if is_lost else seen[0]
        top = tuple(TokenLogprob(i, -0.5 - i) for i in range(sequence.spec.top_logprobs))
        tokens = []
        for end in range(item.end - len(item.drafts), item.end + 1):
            tokens.append(SampledToken(fake_token(seen[:end]), -0.5, top))
            if end < item.end and tokens[-1].id != seen[end]:
                break
        if (failure := self._failure(sequence.spec.request_id)) is not None:
            return RunnerOutput(failure=failure)
        return RunnerOutput(tuple(tokens), prompt_logprobs)

    def _failure(self, request_id: str) -> MeshError | None:
        reason = self.refused.get(request_id)
        if reason is None:
            return None
        return ModelFailed(reason) if reason == "not finite" else InvalidRequest(reason)
