"""RecurrentMixer: what a recurrent layer does between its two projections, for the sequences of a pass.

Single tokens are computed together, a step each. A chunk of a prompt is computed at once. Both give the same numbers up
to rounding, and those of a sequence depend on no other.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.attention.backend import Chunk, ForwardMetadata
from engine.models.encodings import Parameters
from engine.models.model_config import ModelConfig
from engine.models.recurrent.delta import GatedDelta
from engine.models.recurrent.short_conv import ShortConv
from engine.models.recurrent.state import LayerStates


class Recurrence(Protocol):
    """Plug point: ShortConv, GatedDelta. Rows are what the layer's first projection gives for a token; results and
    states are fp32.
    """

    def step(self, rows: Tensor, states: Tensor) -> Tensor:
        """One token of each sequence: rows [num_seqs, projected], states [num_seqs, state_numbers], which are updated
        in place -> [num_seqs, result_width].
        """
        ...

    def scan(self, rows: Tensor, state: Tensor) -> Tensor:
        """Tokens of one sequence, one after the other: rows [num_tokens, projected], state [state_numbers], which is
        updated in place -> [num_tokens, result_width].
        """
        ...


class RecurrentMixer:
    """One layer's recurrence over the states of sequences."""

    def __init__(self, recurrence: Recurrence, result_width: int) -> None:
        self._recurrence = recurrence
        self._width = result_width

    def __call__(self, rows: Tensor, states: LayerStates, metadata: ForwardMetadata) -> Tensor:
        """[num_tokens, projected] -> [num_tokens, result_width]; updates the states. A sequence at its first token
        begins with a state of zeros, whatever its blocks hold.
        """
        assert metadata.states is not None
        out = torch.empty((len(rows), self._width), dtype=torch.float32, device=rows.device)
        repeated = metadata.states.is_repeated
        if num_steps := metadata.num_decodes:
            current = states.read(0, num_steps)
            current.masked_fill_(metadata.context_lens[:num_steps, None] == 1, 0.0)
            out[:num_steps] = self._recurrence.step(rows[:num_steps], current)
            if not any(repeated[:num_steps]):
                states.write(0, current)
            else:
                for row in range(num_steps):
                    if not repeated[row]:
                        states.write(row, current[row : row + 1])
        for chunk in metadata.chunks:
            self._compute_chunk(chunk, rows, out, states, is_repeated=repeated[chunk.row])
        return out

    def _compute_chunk(
        self, chunk: Chunk, rows: Tensor, out: Tensor, states: LayerStates, *, is_repeated: bool
    ) -> None:
        state = states.read(chunk.row, chunk.row + 1)
        if chunk.first_position == 0:
            state.zero_()
        end = chunk.query_end - is_repeated
        out[chunk.query_start : end] = self._recurrence.scan(rows[chunk.query_start : end], state[0])
        states.write(chunk.row, state)
        if is_repeated:
            out[end : chunk.query_end] = self._recurrence.step(rows[end : chunk.query_end], state)


def take_mixer(parameters: Parameters, prefix: str, config: ModelConfig, layer: int) -> RecurrentMixer | None:
    """Take the parameters of a layer between its projections; None if it has attention."""
    facts = config.recurrent
    if facts is None or not facts.layers[layer]:
        return None
    if facts.kind == "conv":
        return RecurrentMixer(ShortConv(parameters, prefix, facts), facts.result_width)
    return RecurrentMixer(GatedDelta(parameters, prefix, facts, config.norm_eps), facts.result_width)
