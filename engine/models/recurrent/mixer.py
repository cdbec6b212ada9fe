"""RecurrentMixer: what a recurrent layer does between its two projections, for the sequences of a pass.

The kernel of the compiled loop computes it where it can. Elsewhere torch does: single tokens together, a step each, and
a chunk of a prompt at once. Both give the same numbers up to rounding, and those of a sequence depend on no other.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import Chunk, ForwardMetadata
from engine.kernels.cpu.buffers import round_up
from engine.kernels.cpu.machine import PANEL
from engine.kernels.cpu.recurrent.recurrent_arguments import STAGES, MixPart, RecurrentWeights, StepRows
from engine.models.encodings import LinearParameters, Parameters
from engine.models.model_config import ModelConfig
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.for_kernels import recurrent_layers
from engine.models.recurrent.kinds import Recurrence, take_recurrence
from engine.models.recurrent.state import LayerStates, Mixing

if TYPE_CHECKING:
    from engine.models.linear import LinearLayer, Rows

_SHARED_NUMBERS = 2**16
"""Numbers of states from which on several threads are faster than one."""


class RecurrentMixer:
    """One layer's recurrence over the states of sequences."""

    def __init__(self, recurrence: Recurrence, facts: RecurrentConfig, norm_eps: float) -> None:
        self._recurrence = recurrence
        self._facts = facts
        self._norm_eps = norm_eps

    def __call__(self, rows: Tensor, states: LayerStates, metadata: ForwardMetadata) -> Tensor:
        """[num_tokens, projected] -> [num_tokens, result_width]; updates the states. A sequence at its first token
        begins with a state of zeros, whatever its blocks hold.
        """
        assert metadata.states is not None
        out = torch.empty((len(rows), self._facts.result_width), dtype=torch.float32, device=rows.device)
        if states.mixing is not None:
            self._run_kernel(rows, out, states, states.mixing)
            return out
        repeated = metadata.states.num_repeated
        if num_steps := metadata.num_decodes:
            is_first = metadata.context_lens[:num_steps] == 1
            is_kept = [not each for each in repeated[:num_steps]]
            self._step(rows[:num_steps], out[:num_steps], states.of(0, num_steps), is_first, is_kept)
        for chunk in metadata.chunks:
            self._compute_chunk(chunk, rows, out, states.of(chunk.row, chunk.row + 1), repeated[chunk.row])
        return out

    def whole(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        """Whole sequences of these lengths, one behind the other, from states of zeros that are not kept."""
        parts = torch.split(rows, list(lengths))
        return torch.cat([self._recurrence.scan(part, torch.zeros(self._facts.state_numbers)) for part in parts])

    def _compute_chunk(self, chunk: Chunk, rows: Tensor, out: Tensor, states: LayerStates, num_repeated: int) -> None:
        state = states.read()
        if chunk.first_position == 0:
            state.zero_()
        end = chunk.query_end - num_repeated
        if end > chunk.query_start:
            out[chunk.query_start : end] = self._recurrence.scan(rows[chunk.query_start : end], state[0])
        states.write(state)
        if num_repeated == 1:  # as it is computed once more
            out[end : chunk.query_end] = self._recurrence.step(rows[end : chunk.query_end], state)
        elif num_repeated:
            out[end : chunk.query_end] = self._recurrence.scan(rows[end : chunk.query_end], state[0])

    def _step(self, rows: Tensor, out: Tensor, states: LayerStates, is_first: Tensor, is_kept: Sequence[bool]) -> None:
        """One token of each sequence. Where `is_first`, the state before it is of zeros; unless it `is_kept`, the state
        after it is not written.
        """
        current = states.read().masked_fill_(is_first[:, None], 0.0)
        out.copy_(self._recurrence.step(rows, current))
        if all(is_kept):
            states.write(current)
            return
        for row, kept in enumerate(is_kept):
            if kept:
                states.of(row, row + 1).write(current[row : row + 1])

    @cached_property
    def _weights(self) -> RecurrentWeights:
        return self._recurrence.for_kernels()

    def _run_kernel(self, rows: Tensor, out: Tensor, states: LayerStates, mixing: Mixing) -> None:
        layer = recurrent_layers(self._weights, self._facts, self._norm_eps, states.places, mixing.multiply)
        inputs, results, threads = rows.to(torch.float32).contiguous().numpy(), out.numpy(), mixing.threads
        inner = np.empty((len(rows), round_up(self._facts.inner_width, PANEL)), np.float32)
        step_rows = StepRows(inputs, inner, results)

        def run_part(stage: int, num_parts: int, number: int) -> None:
            mixing.mix(layer, 0, states.steps, step_rows, MixPart(stage, number, num_parts))

        for stage in STAGES[layer.kind]:
            if len(rows) * states.numbers < _SHARED_NUMBERS:
                run_part(stage, 1, 0)
            else:
                threads.run(partial(run_part, stage, threads.count))


def take_mixer(parameters: Parameters, prefix: str, config: ModelConfig, layer: int) -> RecurrentMixer | None:
    """Take the parameters of a layer between its projections; None if it has no recurrence."""
    facts = config.recurrent
    if facts is None or not facts.layers[layer]:
        return None
    return RecurrentMixer(take_recurrence(parameters, prefix, facts, config.norm_eps), facts, config.norm_eps)


Recur = Callable[[RecurrentMixer, Tensor], Tensor]
"""A layer's recurrence, and what it mixes: [num_tokens, projected] -> [num_tokens, result_width]."""


class RecurrentPart(NamedTuple):
    """A layer's recurrence, behind the projection of the layer's input rows and before that of its result."""

    into: "LinearLayer"
    mixer: RecurrentMixer
    out: "LinearLayer"

    def mix(self, x: "Rows", recur: Recur) -> "Rows":
        """The input rows of `out`."""
        return self.out.ops.rows(recur(self.mixer, self.into(x)))


def take_recurrent(
    parameters: Parameters,
    prefix: str,
    config: ModelConfig,
    layer: int,
    make_linear: "Callable[[str, LinearParameters], LinearLayer]",
) -> RecurrentPart | None:
    """Take the parameters of a layer's recurrence; None if it has none."""
    if (mixer := take_mixer(parameters, prefix, config, layer)) is None:
        return None
    names = (f"{prefix}recurrent_in", f"{prefix}recurrent_out")
    into, out = (make_linear(name, parameters.take_linear(name)) for name in names)
    return RecurrentPart(into, mixer, out)
