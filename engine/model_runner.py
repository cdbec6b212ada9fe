"""ModelRunner: executes scheduled batches on the model. One thread calls it; the KV cache may be read by others."""

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import LayerHook, RunnerOutput, ScheduledBatch, ScheduledSequence
from engine.batch_inputs import build_inputs
from engine.cpu.decoder import CompiledDecoder
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.masks import TokenMasks
from engine.models.config import AnyConfig
from engine.models.decoder import Decoder
from engine.models.encoder_decoder.model import EncoderDecoder
from engine.sampler import Sampler, score
from engine.sequence import Sequence
from mesh.cores import Cores
from mesh.domain.tokens import PromptLogprob, SampledToken

Model = Decoder | CompiledDecoder | EncoderDecoder

# Prompt log-probs compute so many fp32 logits at a time (64 MiB).
_MAX_LOGITS = 2**24


class ModelRunner:
    """Runs the model over a batch, then samples; implements `engine.batch.Runner`.

    `layers_per_group` is how many layers' KV each call of the layer hook announces, or more, if so many do not have
    `group_bytes`; the last group may be smaller. It computes with as many threads as torch was set to when it was made.
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, masks: TokenMasks, *, layers_per_group: int = 4, group_bytes: int = 0
    ) -> None:
        self.kv_cache = kv_cache
        self._model = model
        self._layers_per_group = layers_per_group
        self._group_bytes = group_bytes
        self._masks = masks
        self._sampler = Sampler(masks, encoded_prompts=model.config.whole_prompts)
        self._device = kv_cache.tensor.device
        self._num_torch_threads = model.num_torch_threads

    @property
    def config(self) -> AnyConfig:
        """Facts of the model."""
        return self._model.config

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend in use."""
        return self._model.attention_backend

    @property
    def laps(self) -> NDArray[np.int64] | None:
        """Cycles of each phase of the compiled loop so far (engine.cpu.laps); None if the decoder is not compiled."""
        return self._model.threads.laps if isinstance(self._model, CompiledDecoder) else None

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> list[RunnerOutput]:
        """See Runner.run."""
        if not batch.items:
            return []
        for source, target in batch.copies:
            self.kv_cache.copy_block(source, target)
        sequences = _sampled_sequences(batch)
        self._masks.begin(sequences)
        inputs = build_inputs(batch, self.kv_cache.layout.block_size, self._device)
        announce = partial(on_layers, batch) if on_layers is not None else None
        groups = LayerGroups(self.config.num_layers, self._group_size(batch.num_tokens), announce)
        hidden = self._model.forward(inputs.token_ids, inputs.metadata, groups)
        tokens = self._sample(batch, sequences, hidden, inputs.starts)
        return [
            RunnerOutput(
                sampled,
                self._prompt_logprobs(item, hidden[start : start + item.num_tokens]),
                self._masks.failure(item.sequence),
            )
            for item, sampled, start in zip(batch.items, tokens, inputs.starts, strict=False)
        ]

    def prepare_thread(self) -> None:
        """See Runner.prepare_thread. OpenMP keeps the number of threads for each calling thread on its own."""
        torch.set_num_threads(self._num_torch_threads)

    def prepare(self, sequence: Sequence) -> "Future[None] | None":
        """See Runner.prepare."""
        return self._masks.prepare(sequence)

    def use_cores(self, lent: Cores) -> None:
        """See Runner.use_cores."""
        self._model.use_cores(lent)

    def forget(self, sequence: Sequence) -> None:
        """See Runner.forget."""
        self._sampler.forget(sequence)
        self._masks.forget(sequence)

    def _group_size(self, num_tokens: int) -> int:
        """Layers announced together: an announcement costs the same, however little KV it is about."""
        layout = self.kv_cache.layout
        layer_bytes = num_tokens * layout.layer_block_bytes // layout.block_size
        return max(self._layers_per_group, -(-self._group_bytes // layer_bytes))

    def _sample(
        self, batch: ScheduledBatch, sequences: list[Sequence], hidden: Tensor, starts: list[int]
    ) -> list[tuple[SampledToken, ...]]:
        """`sequences`: what _sampled_sequences says of the batch."""
        rows: list[int] = []
        for item, end in zip(batch.items, starts[1:], strict=True):
            if item.samples:
                rows += range(end - 1 - len(item.drafts), end)
        if not rows:
            return [()] * len(batch.items)
        chosen = hidden if len(rows) == hidden.shape[0] else hidden[rows]
        sampled = iter(self._sampler.sample(self._model.logits(chosen), sequences))
        return [_holding(item.drafts, sampled) if item.samples else () for item in batch.items]

    def _prompt_logprobs(self, item: ScheduledSequence, hidden: Tensor) -> tuple[PromptLogprob, ...]:
        """Scores of the prompt tokens that follow each of the item's rows."""
        sequence = item.sequence
        if not sequence.request.prompt_logprobs:
            return ()
        targets = sequence.token_ids[item.start + 1 : min(item.end + 1, sequence.num_prompt_tokens)]
        rows_at_once = max(1, _MAX_LOGITS // self.config.vocab_size)
        scores: list[PromptLogprob] = []
        for start in range(0, len(targets), rows_at_once):
            piece = targets[start : start + rows_at_once]
            logits = self._model.logits(hidden[start : start + len(piece)])
            tokens = torch.tensor(piece, device=self._device)
            scored = score(logits, tokens, [sequence.request.top_logprobs] * len(piece))
            scores += map(PromptLogprob, scored.logprobs, scored.top)
        return tuple(scores)


def _sampled_sequences(batch: ScheduledBatch) -> list[Sequence]:
    """Each sequence that samples, at its end and after each of its drafts."""
    sequences: list[Sequence] = []
    for item in batch.items:
        if item.samples:
            sequences.append(item.sequence)
            sequences += [item.sequence.guessing(item.drafts[:known]) for known in range(1, len(item.drafts) + 1)]
    return sequences


def _holding(drafts: tuple[int, ...], sampled: Iterator[SampledToken]) -> tuple[SampledToken, ...]:
    """Of the tokens sampled at a sequence's end and after each draft, those that had nothing wrong before them."""
    tokens = list(islice(sampled, 1 + len(drafts)))
    num_right = next((i for i, draft in enumerate(drafts) if tokens[i].id != draft), len(drafts))
    return tuple(tokens[: num_right + 1])
