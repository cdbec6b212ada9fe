"""CompiledDecoder: `engine.models.decoder.Decoder` as one compiled loop, for CPUs with AVX2.

In int8, weights have a scale per output channel and activations a scale per row. Sums are exact integers. In int4 of a
checkpoint, both have a scale per group of inputs: sums of a group are exact, and added up in fp32; weights that are
rounded to int4 become int8 as they are multiplied. Weights in fp16 or bf16 are widened
as they are multiplied: activations, sums and results are those of the same numbers in fp32.
The loop runs in several threads together: the caller, helpers on the worker's cores, helpers on lent cores.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AdapterRows, ForwardMetadata, one_token
from engine.attention.cpu import kernel_batch
from engine.kernels.cpu.arguments import NUMBERS, Batch, Floats, Int64s, Range, Weights
from engine.kernels.cpu.compilation.stored import Stored
from engine.kernels.cpu.layer_kernels import LAYER_KERNELS, needed_by
from engine.kernels.cpu.machine import AMX_DEPTH, has_amx, knows_amx, multiplies_bf16
from engine.kernels.cpu.products.matmul import product_code
from engine.kernels.cpu.products.nibble_numbers import KINDS_IN_GROUPS
from engine.kernels.cpu.products.packing import as_tensor, operand_dtypes
from engine.kernels.cpu.recurrent.recurrent_arguments import StateSteps
from engine.kernels.cpu.step import output_rows, run_layers
from engine.kv.cache import KVCache
from engine.model import Finish, LayerGroups, finish_with
from engine.models.adapters import AdapterWeights
from engine.models.loop_constants import head_shapes, model_constants, parts_of_blocks
from engine.models.loop_memory import AMX_OPERANDS, LoopMemory
from engine.models.loop_threads import LoopThreads
from engine.models.model_config import ModelConfig
from engine.models.mtp import MtpInput
from engine.models.norms import Norm
from engine.models.packed_adapters import PackedAdapters
from engine.models.packed_decoder import Tables
from engine.models.packed_weights import PackedDecoder
from engine.models.rank_group import Alone, RankGroup
from engine.models.recurrent.state import RecurrentStates, state_steps
from engine.models.result_rows import adapters_of_results, batch_of_results, largest_kv, last_writing_layer
from engine.models.rope import ropes_of
from engine.models.rotation_table import RotationTable
from engine.models.row_shares import RowCut, costs_of_rows, cut_rows, max_row_shares
from engine.models.share import rank_share
from engine.sampling.host_rows import HostRows, host_summary
from engine.sampling.row_math import Logits, RowMath
from mesh.domain.host import Cores

_LEAST_LEFT = 16
"""The fewest rows that are worth leaving after the last layer that writes KV: another run of the loop takes time, too.
"""


@dataclass(slots=True)
class _Rows:
    """Rows of a step that go through layers together, and the kernels' arguments for `num_threads` threads."""

    batch: Batch
    states: StateSteps
    adapters: tuple[AdapterRows, ...]
    are_results: bool = False
    num_threads: int = 0
    arguments: Sequence[tuple[Stored, ...]] = ()
    needed: tuple[int, ...] = ()


class CompiledDecoder:
    """A decoder-only transformer on CPU, or the share of it that one rank of `ranks` computes. `compile_all`: compile
    kernels of layers that the model has not, too.
    """

    def __init__(
        self,
        config: ModelConfig,
        packed: PackedDecoder,
        cache: KVCache,
        ranks: RankGroup | None = None,
        adapter_shapes: Sequence[AdapterWeights] = (),
        num_adapter_slots: int = 0,
        *,
        compile_all: bool = False,
        mtp_input: MtpInput | None = None,
    ) -> None:
        self.config, self._mtp_input = config, mtp_input
        self.attention_backend = "compiled"
        self._ranks = ranks or Alone()
        self._share = rank_share(config, self._ranks.rank, self._ranks.degrees)
        self.layers = self._share.layers
        self.threads = LoopThreads(torch.get_num_threads(), self._ranks)
        # The loop has its own threads. OpenMP threads would spin on their cores between the few torch operations.
        self.num_torch_threads = 1
        # Prompts attend in bf16 where products round activations anyway. AMX is set up for products that use it.
        operands, _ = operand_dtypes(packed.weights)
        is_rounded = operands in AMX_OPERANDS if knows_amx() else operands != np.float32
        self._has_amx = operands in AMX_OPERANDS and has_amx()
        layers = range(self.layers.first, self.layers.end)
        shapes = head_shapes(config, cache, layers)
        self._block_size, self._parts = shapes[0].block_size, parts_of_blocks(config, cache.layout.windows)
        bf16 = is_rounded and multiplies_bf16() and not any(each.head_dim % AMX_DEPTH for each in shapes)
        self._embed, self._layer_inputs = as_tensor(packed.embed), as_tensor(packed.layer_inputs)
        self._adapters = PackedAdapters(config, adapter_shapes, num_adapter_slots, self._share)
        self._positions, self._embed_norm = torch.from_numpy(packed.positions), _norm_of(packed.embed_norm, config)
        self._rotations = RotationTable(ropes_of(config, self._embed.device, torch.float32), config.max_model_len)
        self._row_costs = costs_of_rows(config, np.dtype(operands).itemsize)
        places = None if config.recurrent is None else RecurrentStates(config.recurrent, cache).places
        self._num_groups = cache.layout.groups.count
        self._written = 2 * last_writing_layer(config) + 1  # halves of layers after which all KV is written
        self._largest_kv = largest_kv(cache.tensor.dtype)
        self._model = model_constants(config, packed, layers, shapes, cache, places)
        self._unlinked = _all_kernels(packed.weights) if compile_all else needed_by(self._model)
        self._memory = LoopMemory(
            config,
            self._model,
            self._ranks,
            sorted(set(shapes)),
            self._adapters.pieces,
            shrunk_width=self._adapters.shrunk_width,
            bf16=bf16,
        )
        if self._ranks.rank == 0:
            self._compile()

    def tables(self, dtype: torch.dtype) -> Tables | None:
        """Embedding and output matrix, for layers in `dtype`; None where ranks divide the output matrix."""
        has_all = self._share.vocab.count == self.config.vocab_size
        return Tables(self._embed, self._model.output, dtype) if has_all else None

    @property
    def phase_cycles(self) -> Int64s:
        """See engine.model.Model.phase_cycles. Counts the thread that calls `begin`."""
        return self.threads.phase_cycles

    @cached_property
    def row_math(self) -> RowMath:
        return HostRows(self.threads)

    @property
    def borrows_cores(self) -> bool:
        return self.threads.borrows

    def use_cores(self, lent: Cores) -> None:
        self.threads.use(lent)

    def put_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Replace the adapter in a slot, which no pass uses meanwhile."""
        self._adapters.put(slot, weights)

    def begin(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Finish:
        residual = self._embedded(token_ids, metadata.positions)
        if self._mtp_input is not None and metadata.previous is not None:
            residual.copy_(self._mtp_input(residual, metadata.previous))
        self._ranks.begin_forward(metadata, layer_groups)
        self.run_layers(metadata, layer_groups.within(self.layers))
        return finish_with(self._ranks.end_forward(layer_groups), residual)

    def run_layers(self, metadata: ForwardMetadata, layer_groups: Iterable[tuple[int, int]]) -> None:
        """Compute these layers on the residual in the ranks' buffers. The part of a pass that every rank does."""
        batch = kernel_batch(metadata, self._block_size, self._rotations.of_step(metadata), self._parts)
        rows = all_rows = _Rows(batch, state_steps(metadata), metadata.adapters)
        results = self._result_rows(metadata)
        for first, end in layer_groups:
            halves = Range(2 * (first - self.layers.first), 2 * (end - self.layers.first))
            if results is not None and halves.first < self._written < halves.end:
                self._run(rows, Range(halves.first, self._written))
                halves = Range(self._written, halves.end)
                rows = self._drop_other_rows(all_rows, results)
            self._run(rows, halves)
        if rows is not all_rows and results is not None:
            self._memory.put_results(len(batch.slots), results)

    def _result_rows(self, metadata: ForwardMetadata) -> Int64s | None:
        """The rows that go through the layers after the last one that writes KV; None: all."""
        rows = metadata.result_rows
        has_halves = self._ranks.degrees.num_ranks == 1 and not self._model.latent.rank
        if rows is None or not has_halves or len(metadata.positions) - len(rows) < _LEAST_LEFT:
            return None
        return rows.numpy()

    def _drop_other_rows(self, rows: "_Rows", results: Int64s) -> "_Rows":
        """The `results` of `rows`, which go through the remaining layers. All rows do if KV is not finite, because
        their hidden states must show that.
        """
        if not self._memory.is_finite(len(rows.batch.slots), self._written // 2, self._largest_kv):
            return rows
        self._memory.take_results(len(rows.batch.slots), results)
        adapters = adapters_of_results(rows.adapters, results)
        return _Rows(batch_of_results(rows.batch, results), rows.states, adapters, are_results=True)

    def _run(self, rows: "_Rows", halves: Range) -> None:
        """Compute halves of layers, see `run_layers` of the kernels."""
        if rows.are_results and not len(rows.batch.slots):
            return  # a chunk in the middle of a prompt
        if self.threads.count != rows.num_threads:  # lent cores are given back between groups
            rows.num_threads, batch = self.threads.count, rows.batch
            shares = self._row_shares(batch, rows.states)
            of_shares = [share.rows for share in shares]
            rows.arguments = self._memory.layer_arguments(
                batch, rows.states, rows.adapters, of_shares, rows.num_threads, are_results=rows.are_results
            )
            rows.needed = tuple(share.first_needed for share in shares)
            self._link(rows.arguments[0])
        # Behind the last layer that writes KV, no share waits for the KV of another.
        needed = rows.needed if halves.first < self._written else tuple(range(len(rows.needed)))
        self.threads.run(run_layers, rows.arguments, halves, needed)

    def _link(self, arguments: Sequence[Stored]) -> None:
        """Before the first run, give the loop the addresses of the kernels of layers that it calls."""
        for number in self._unlinked:
            self._model.layer_code[number] = self.threads.address_for(LAYER_KERNELS[number], arguments)
        self._unlinked = []

    def _row_shares(self, batch: Batch, states: StateSteps) -> list[RowCut]:
        """The shares in which the rows of a step are computed. In a single share, threads divide the columns."""
        if self._ranks.degrees.num_ranks > 1 or self._model.experts.num_experts or self._model.latent.rank:
            count = 1
        elif max(states.num_repeated, default=0) > 1:
            count = 1  # a later share would begin with a state that has not been kept
        else:
            count = max_row_shares(len(batch.slots), self.threads.count, has_amx=self._has_amx)
        return cut_rows(batch, count, self._row_costs)

    def logits(self, hidden: Tensor) -> Logits:
        num_rows = len(hidden)
        rows = self._memory.output_rows(num_rows)
        rows.hidden[:] = hidden.numpy()
        self._ranks.begin_logits(num_rows)
        self.run_output(num_rows)
        # Columns are padded to whole panels; those past the vocabulary are cut off.
        return Logits(torch.from_numpy(rows.logits[:, : rows.num_columns]), host_summary(rows.summaries))

    def run_output(self, num_rows: int) -> None:
        """Compute logits of the rows in the ranks' buffers. The part of `logits` that all ranks of stage 0 do."""
        self.threads.run(output_rows, self._memory.output_arguments(num_rows, self.threads.count))

    def _compile(self) -> None:
        """Compile the loops, or load them from disk, so that the first request need not wait. Runs a step of one token,
        through no layer if there is one rank: the others run all layers whenever they are called.
        """
        token_ids, num_layers = torch.zeros(1, dtype=torch.int64), self.config.num_layers
        if self._ranks.degrees.num_ranks == 1:
            hidden = self._embedded(token_ids, token_ids)
            self.run_layers(one_token(self._num_groups), [(0, 0)])
        else:
            hidden = self.begin(token_ids, one_token(self._num_groups), LayerGroups(num_layers, num_layers))()
        self.logits(hidden)

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The residual of the step, [num_tokens, hidden_size]."""
        residual = torch.from_numpy(self._memory.rows("residual", token_ids.shape[0], self.config.hidden_size))
        residual.copy_(self._embed.index_select(0, token_ids))
        if self.config.embed_scale != 1.0:
            residual.mul_(self.config.embed_scale)
        if len(self._positions):
            residual.add_(self._positions[positions])
        if self._embed_norm is not None:
            residual.copy_(self._embed_norm(residual))
        if (width := self._layer_inputs.shape[1]) > 0:
            of_tokens = torch.from_numpy(self._memory.rows("token_inputs", len(token_ids), width))
            of_tokens.copy_(self._layer_inputs[token_ids]).mul_(self._model.inputs.width**0.5)
        return residual


def _all_kernels(weights: Weights) -> list[int]:
    """The numbers of all kernels. Products of all kinds of checkpoints in 4 bits, which no dummy weights are, are
    compiled now.
    """
    if weights.packed.dtype in (np.int64, np.uint8):
        matrices = np.zeros((len(KINDS_IN_GROUPS), weights.matrices.shape[1]), np.int64)
        matrices[:, NUMBERS] = KINDS_IN_GROUPS
        product_code(weights._replace(packed=np.empty(0, np.uint8), matrices=matrices))
    return list(LAYER_KERNELS)


def _norm_of(rows: Floats, config: ModelConfig) -> Norm | None:
    """The norm with these weights and, for a layer norm, biases; None without any."""
    if not len(rows):
        return None
    weight, *biases = torch.from_numpy(rows)
    return Norm(weight, next(iter(biases), None), config.norm_eps, config.norm == "layer")
