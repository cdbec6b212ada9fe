"""ModelRunner: executes scheduled batches: build the step's input, run the model, sample.

One thread calls it. Other threads may read the KV cache.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapter_slots import AdapterSlots
from engine.batch import HiddenStates, ScheduledBatch, ScheduledSequence
from engine.decode_graphs import DecodeGraphs
from engine.device_copies import DeviceCopies, copies_for
from engine.finite import items_not_finite, scores_are_finite, sum_of
from engine.kv.sharded_cache import AnyKVCache
from engine.model import Finish, LayerGroups, Model
from engine.models.encoder_decoder.config import AnyConfig
from engine.models.kv_groups import num_final_kv_layers
from engine.models.model_config import ModelConfig
from engine.models.norms import Norm
from engine.runner import FinishBatch, LayerHook, RunnerOutput
from engine.sampling.masks import TokenMasks
from engine.sampling.sampler import Sampler
from engine.sequence import SequenceState
from engine.step_input import StepInput, StepInputBuilder
from mesh.domain.errors import InvalidRequest, ModelFailed
from mesh.domain.host import Cores
from mesh.domain.kv import Span
from mesh.domain.tokens import PromptLogprob, SampledToken

_NOT_FINITE = "the model computed NaN or infinity for this request: its weights may be broken, or its dtype overflows"
# Prompt log-probs compute at most this many fp32 logits at once (64 MiB).
_MAX_LOGITS = 2**24


class ModelRunner:
    """Runs the model over a batch, then samples; implements `engine.runner.Runner`.

    Each call of the layer hook announces the KV of `layers_per_group` layers, or of more layers if these have fewer
    than `group_bytes`; the last group may be smaller. The number of threads is torch's setting at construction.
    Batches that `graphs` has captured are replayed.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: AnyKVCache,
        masks: TokenMasks,
        *,
        layers_per_group: int,
        group_bytes: int = 0,
        max_in_flight: int = 1,
        adapters: AdapterSlots | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._graphs = graphs
        self.model = model
        self._layers_per_group = layers_per_group
        self._group_bytes = group_bytes
        self._masks = masks
        device, windows = kv_cache.tensor.device, kv_cache.layout.windows
        self._copies = copies_for(device)
        self._sampler = Sampler(
            masks, encoded_prompts=model.config.whole_prompts, copies=self._copies, rows=model.row_math
        )
        self._adapters = adapters
        config = model.config
        # Only with windows: blocks have all layers without.
        self._num_final = num_final_kv_layers(config, windows) if windows and isinstance(config, ModelConfig) else []
        new_builder = partial(
            StepInputBuilder,
            kv_cache.layout.block_size,
            adapters={} if adapters is None else adapters.slots,
            state_blocks=kv_cache.layout.state_blocks,
            windows=windows,
            windows_are_chunks=kv_cache.layout.windows_are_chunks,
        )
        # A builder's arrays, and their copies, are in use until the step ends.
        self._builders = cycle([(new_builder(), copies_for(device)) for _ in range(max_in_flight)])
        self.result_norm: Norm | None = None
        """If set, outputs have the hidden states of sampled rows, normed by it."""
        self.on_close: Callable[[], None] | None = None
        """Ends the other ranks, if there are any."""
        self.rank_pids: tuple[int, ...] = ()
        """Process ids of ranks 1 and up."""

    @property
    def config(self) -> AnyConfig:
        return self.model.config

    @property
    def attention_backend(self) -> str:
        return self.model.attention_backend

    @property
    def phase_cycles(self) -> NDArray[np.int64] | None:
        return self.model.phase_cycles

    @torch.inference_mode()
    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        if not batch.items:
            return list  # list() is the output of an empty batch
        self._use_threads()
        builder, copies = next(self._builders)
        step = builder.build(batch)
        sequences = _sampled_sequences(batch)
        self._masks.begin(sequences)  # while the model computes
        if self.kv_cache.clears_new:
            self._clear_new(batch)
        announce = partial(self._announce, partial(on_layers, batch)) if on_layers is not None else None
        finish, sample_rows = self._forward(step, copies, announce, batch.previous)
        return partial(self._finish, batch, sequences, finish, step.query_starts.tolist(), sample_rows)

    @torch.inference_mode()
    def _finish(
        self,
        batch: ScheduledBatch,
        sequences: list[SequenceState],
        finish: Finish,
        starts: list[int],
        sample_rows: Tensor | None,
    ) -> list[RunnerOutput]:
        hidden = finish()
        for source, target in batch.saves:
            self.kv_cache.copy_block(source, target)
        self._use_threads()
        tokens, hidden_sum = self._sample(batch, hidden, sample_rows, sequences)
        broken = items_not_finite(hidden, starts, hidden_sum)
        outputs = [
            self._output(item, hidden, start, sampled, is_broken=i in broken)
            for i, (item, sampled, start) in enumerate(zip(batch.items, tokens, starts[:-1], strict=True))
        ]
        if self.result_norm is None:
            return outputs
        normed = self.result_norm((hidden if sample_rows is None else hidden[sample_rows]).float())
        rows = torch.split(normed, [1 + len(item.drafts) if item.needs_sampling else 0 for item in batch.items])
        return [replace(each, hidden=own[: len(each.tokens)]) for each, own in zip(outputs, rows, strict=True)]

    @torch.inference_mode()
    def prompt_logits(self, prompt: SequenceState, places: range) -> Tensor:
        """Compute a whole prompt in one step. Returns fp32 logits [places, vocab_size] after each of these of its
        tokens, which the caller may change. They are valid until the next call.
        """
        self._use_threads()
        builder, copies = next(self._builders)
        step = builder.build(ScheduledBatch((ScheduledSequence(prompt, 0, prompt.num_prompt_tokens),)))
        finish, _ = self._forward(replace(step, reads_all=True), copies, None)
        return self.model.logits(finish()[places.start : places.stop]).values

    def _use_threads(self) -> None:
        """Set torch's number of threads, which is kept per thread, and set by every model on it."""
        if torch.get_num_threads() != self.model.num_torch_threads:
            torch.set_num_threads(self.model.num_torch_threads)

    def _forward(
        self,
        step: StepInput,
        copies: DeviceCopies,
        announce: Callable[[Span], None] | None,
        previous: tuple[HiddenStates, ...] = (),
    ) -> tuple[Finish, Tensor | None]:
        """Begin to compute the hidden states of the step's tokens. Returns also the rows to sample; None: all."""
        for source, target in step.copies:
            self.kv_cache.copy_block(source, target)
        if self._graphs is not None and announce is None and self._graphs.can_run(step):
            hidden = self._graphs.run(step)
            return (lambda: hidden), None
        groups = LayerGroups(self.config.num_layers, self._group_size(len(step.token_ids)), announce)
        token_ids, sample_rows, metadata = step.on_device(copies)
        if previous:
            metadata = replace(metadata, previous=torch.cat(cast("tuple[Tensor, ...]", previous)))
        all_rows = len(sample_rows) == len(token_ids)
        return self.model.begin(token_ids, metadata, groups), None if all_rows else sample_rows

    def _announce(self, on_layers: Callable[[Span], None], computed: Span) -> None:
        layers = self._final_layers(computed)
        if layers.count:
            self.kv_cache.note_written(layers)
            on_layers(layers)

    def _final_layers(self, computed: Span) -> Span:
        """The layers of KV that are final once these layers of the model are computed."""
        if not self._num_final:
            return self.config.kv_layers(computed)
        first, end = self._num_final[computed.first], self._num_final[computed.end]
        return Span(first, end - first)

    def _clear_new(self, batch: ScheduledBatch) -> None:
        """Clear blocks that the step is the first to write to. Attention multiplies by 0 what follows a token in its
        block, which must be no NaN then. The step fills it later, or in another row share.
        """
        num_entries = self.kv_cache.layout.num_entries_for
        for item in batch.items:
            if blocks := item.sequence.block_table[num_entries(item.start) : num_entries(item.end)]:
                self.clear_blocks(blocks)

    def _output(
        self, item: ScheduledSequence, hidden: Tensor, start: int, tokens: tuple[SampledToken, ...], *, is_broken: bool
    ) -> RunnerOutput:
        """Output of one item, whose rows of `hidden` begin at `start`. KV of a step with NaN or infinity is cleared.
        Drafts may be the cause, and must not change the result.
        """
        scores: tuple[PromptLogprob, ...] = ()
        if item.sequence.spec.prompt_logprobs and not is_broken:
            scores = self._prompt_logprobs(item, hidden[start : start + item.num_tokens])
        is_broken = is_broken or not (scores_are_finite(tokens) and scores_are_finite(scores))
        if is_broken:
            self._clear(item)
        if reason := self._masks.failure(item.sequence):
            return RunnerOutput(failure=InvalidRequest(reason))
        if not is_broken:
            return RunnerOutput(tokens, scores)
        return RunnerOutput() if item.drafts else RunnerOutput(failure=ModelFailed(_NOT_FINITE))

    def _clear(self, item: ScheduledSequence) -> None:
        """Clear the blocks that the step wrote; with drafts, keep what is before the sequence's last token."""
        layout = self.kv_cache.layout
        first, offset = divmod(item.last_known if item.drafts else item.start, layout.block_size)
        states, table, count = layout.state_blocks, item.sequence.block_table, layout.groups.count
        blocks = table[states + first * count : layout.num_entries_for(item.end)]
        if item.drafts and offset:
            self.kv_cache.clear_blocks(blocks[:count], offset)
            del blocks[:count]
        self.clear_blocks(blocks if item.drafts else table[:states] + blocks)

    def clear_blocks(self, block_ids: list[int]) -> None:
        self.kv_cache.clear_blocks(block_ids)

    @property
    def borrows_cores(self) -> bool:
        return self.model.borrows_cores

    def prepare(self, choices: Sequence[SequenceState]) -> "list[Future[None]]":
        preparing = [self._masks.prepare(sequence) for sequence in choices]
        if self._adapters is not None:
            preparing.append(self._adapters.prepare(choices))
        return [future for future in preparing if future is not None]

    def use_cores(self, lent: Cores) -> None:
        self.model.use_cores(lent)

    def forget(self, sequence: SequenceState) -> None:
        self._sampler.forget(sequence)
        self._masks.forget(sequence)
        if self._adapters is not None:
            self._adapters.forget(sequence)

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    def _group_size(self, num_tokens: int) -> int:
        """Number of layers per announcement. An announcement has a fixed cost, so small KV is announced together."""
        layout = self.kv_cache.layout
        layer_bytes = num_tokens * layout.layer_block_bytes // layout.block_size
        return max(self._layers_per_group, -(-self._group_bytes // layer_bytes))

    def _sample(
        self, batch: ScheduledBatch, hidden: Tensor, sample_rows: Tensor | None, sequences: list[SequenceState]
    ) -> tuple[list[tuple[SampledToken, ...]], float]:
        """Sampled tokens of each item: none, one, or more where drafts were accepted; and a sum that is finite if the
        hidden states are.

        `sequences` has one entry per row to sample. This is where the host waits for the device, once.
        """
        # A row that is not finite has no finite log-prob, so where each item has one row, that tells enough.
        needs_sum = not len(batch.items) == len(sequences) == len(hidden)
        sums = [sum_of(hidden)] if needs_sum else []
        if not sequences:
            return [()] * len(batch.items), sums[0].item()
        chosen = hidden if sample_rows is None else hidden[sample_rows]
        drawn = self._sampler.draw(self.model.logits(chosen), sequences)
        sums_and_drawn = self._copies.to_host([*sums, *drawn.tensors])
        hidden_sum = sums_and_drawn[0].item() if needs_sum else 0.0
        sampled = iter(drawn.read(sums_and_drawn[len(sums) :]))
        tokens = [
            _verified(item.drafts, sampled)[: self._masks.num_rows(item.sequence)] if item.needs_sampling else ()
            for item in batch.items
        ]
        return tokens, hidden_sum

    def _prompt_logprobs(self, item: ScheduledSequence, hidden: Tensor) -> tuple[PromptLogprob, ...]:
        """Log-probs of the prompt tokens that follow the item's rows."""
        sequence = item.sequence
        targets = sequence.token_ids[item.start + 1 : min(item.end + 1, sequence.num_prompt_tokens)]
        rows_at_once = max(1, _MAX_LOGITS // self.config.vocab_size)
        scores: list[PromptLogprob] = []
        for start in range(0, len(targets), rows_at_once):
            token_ids = targets[start : start + rows_at_once]
            logits = self.model.logits(hidden[start : start + len(token_ids)])
            scored = self._sampler.score(logits, token_ids, [sequence.spec.top_logprobs] * len(token_ids))
            scores += map(PromptLogprob, scored.logprobs, scored.top)
        return tuple(scores)


def _sampled_sequences(batch: ScheduledBatch) -> list[SequenceState]:
    """The sequence state for each row of StepInput.sample_rows: at a sequence's end, then after each of its drafts."""
    sequences: list[SequenceState] = []
    for item in batch.items:
        if item.needs_sampling:
            sequences.append(item.sequence)
            sequences += [item.sequence.with_draft(item.drafts[:count]) for count in range(1, len(item.drafts) + 1)]
    return sequences


def _verified(drafts: tuple[int, ...], sampled: Iterator[SampledToken]) -> tuple[SampledToken, ...]:
    """Take the tokens sampled at a sequence's end and after its drafts; return those not preceded by a wrong draft."""
    if not drafts:
        return (next(sampled),)
    tokens = list(islice(sampled, 1 + len(drafts)))
    num_accepted = next((i for i, draft in enumerate(drafts) if tokens[i].id != draft), len(drafts))
    return tuple(tokens[: num_accepted + 1])
