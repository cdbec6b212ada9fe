"""CompiledDecoder: `engine.models.decoder.Decoder` as one compiled loop, for CPUs with AVX2.

In int8, weights have a scale per output channel and activations a scale per row. Sums are exact integers. In int4, both
have a scale per group of inputs: sums of a group are exact, and added up in fp32. Weights in fp16 or bf16 are widened
as they are multiplied: activations, sums and results are those of the same numbers in fp32.
The loop runs in several threads together: the caller, helpers on the worker's cores, helpers on lent cores.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from engine.attention.backend import ForwardMetadata, attention_shape, one_token
from engine.attention.cpu import kernel_batch, kernel_slopes
from engine.kernels.cpu.arguments import (
    SILU,
    Attending,
    Batch,
    Bytes,
    Floats,
    Int64s,
    Operand,
    Queries,
    Range,
    RoutedRows,
    Weights,
)
from engine.kernels.cpu.barrier import Team
from engine.kernels.cpu.buffers import Buffers, round_up
from engine.kernels.cpu.latent import LatentRows
from engine.kernels.cpu.machine import (
    AMX_DEPTH,
    FLOAT_BYTES,
    LOG2_E,
    PANEL,
    TILE_ROWS,
    UNIT,
    amx_shapes,
    has_amx,
    knows_amx,
    multiplies_bf16,
)
from engine.kernels.cpu.packing import as_tensor, operand_dtypes, wide_size
from engine.kernels.cpu.row_kernels import summarise
from engine.kernels.cpu.step import output_rows, run_layers
from engine.kernels.cpu.step_arguments import Activations, ModelConstants, Work
from engine.kv_cache import KVCache
from engine.model import Finish, LayerGroups, finish_with
from engine.models.adapters import AdapterWeights
from engine.models.loop_constants import head_shapes, model_constants, parts_of_blocks
from engine.models.loop_threads import LoopThreads
from engine.models.model_config import ModelConfig
from engine.models.packed_adapters import PackedAdapters
from engine.models.packed_decoder import qkv_width
from engine.models.packed_weights import PackedDecoder
from engine.models.rank_group import Alone, RankGroup
from engine.models.recurrent.state import RecurrentStates, state_steps
from engine.models.rope import ropes_of
from engine.models.row_shares import (
    RowCosts,
    RowCut,
    adapters_of,
    batch_of,
    cut_rows,
    most_shares,
    states_of,
)
from engine.models.share import rank_share
from mesh.domain.host import Cores

_AMX_OPERANDS = (np.uint8, np.int16)
"""Types of the left operand whose products use AMX: int8, and bf16 rounded to it."""
_NO_AMX: Bytes = np.empty(0, np.uint8)
_NO_ROWS: Floats = np.empty((0, 0), np.float32)
_NO_CHOICES, _NO_NUMBERS = np.empty((0, 0), np.int64), _NO_ROWS.reshape(0)
_NO_ROUTED_ROWS = RoutedRows(_NO_ROWS, _NO_ROWS, _NO_CHOICES, _NO_ROWS, _NO_NUMBERS, _NO_NUMBERS, _NO_ROWS)
_NO_LATENT_ROWS = LatentRows(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, step=0, query_step=0)


class CompiledDecoder:
    """A decoder-only transformer on CPU, or the share of it that one rank of `ranks` computes."""

    def __init__(
        self,
        config: ModelConfig,
        packed: PackedDecoder,
        cache: KVCache,
        ranks: RankGroup | None = None,
        adapter_shapes: Sequence[AdapterWeights] = (),
        num_adapter_slots: int = 0,
    ) -> None:
        self.config = config
        self.attention_backend = "compiled"
        self._ranks = ranks or Alone()
        self._share = rank_share(config, self._ranks.rank, self._ranks.degrees)
        self.layers = self._share.layers
        self.threads = LoopThreads(torch.get_num_threads(), self._ranks)
        # The loop has its own threads. OpenMP threads would spin on their cores between the few torch operations.
        self.num_torch_threads = 1
        self._thread_buffers: list[Buffers] = []
        # Prompts attend in bf16 where products round activations anyway. AMX is set up for products that use it.
        operands, _ = operand_dtypes(packed.weights)
        is_rounded = operands in _AMX_OPERANDS if knows_amx() else operands != np.float32
        self._has_amx = operands in _AMX_OPERANDS and has_amx()
        layers = range(self.layers.first, self.layers.end)
        shapes = head_shapes(config, cache, layers)
        self._shapes, self._parts = sorted(set(shapes)), parts_of_blocks(config, cache.layout.windows)
        self._bf16 = is_rounded and multiplies_bf16() and not any(each.head_dim % AMX_DEPTH for each in shapes)
        self._heads = attention_shape(config).shard(cache.span.heads)
        self._embed, self._layer_inputs = as_tensor(packed.embed), as_tensor(packed.layer_inputs)
        self._adapters = PackedAdapters(config, adapter_shapes, num_adapter_slots, self._share)
        self._positions, self._embed_norm = torch.from_numpy(packed.positions), torch.from_numpy(packed.embed_norm)
        self._ropes = ropes_of(config, self._embed.device, torch.float32)
        self._slopes, self._sinks = kernel_slopes(self._heads), packed.sinks * np.float32(LOG2_E)
        self._row_costs = RowCosts.of_model(config, np.dtype(operands).itemsize)
        self._cache = cache.elements
        places = None if config.recurrent is None else RecurrentStates(config.recurrent, cache).places
        self._num_groups = cache.layout.groups.count
        self._model = model_constants(config, packed, layers, shapes, places, cache.layout.windows)
        self._buffers = Buffers()
        if self._ranks.rank == 0:
            self._compile()

    @property
    def phase_cycles(self) -> Int64s:
        """See engine.model.Model.phase_cycles. Counts the thread that calls `begin`."""
        return self.threads.phase_cycles

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
        self._ranks.begin_forward(metadata, layer_groups)
        self.run_layers(metadata, layer_groups.within(self.layers))
        return finish_with(self._ranks.end_forward(layer_groups), residual)

    def run_layers(self, metadata: ForwardMetadata, layer_groups: Iterable[tuple[int, int]]) -> None:
        """Compute these layers on the residual in the ranks' buffers. The part of a pass that every rank does."""
        rotations = [rope.rotation(metadata.positions, metadata.rope_lengths) for rope in self._ropes]
        batch, num_threads = kernel_batch(metadata, self._shapes[0].block_size, rotations, self._parts), 0
        for first, end in layer_groups:
            if self.threads.count != num_threads:  # lent cores are given back between groups
                num_threads = self.threads.count
                shares = self._row_shares(batch)
                work = self._work(batch, metadata, [share.rows for share in shares])
            held = Range(first - self.layers.first, end - self.layers.first)
            needed = [share.first_needed for share in shares]
            self.threads.run(partial(_run_layers, self._model, work, held), needed)

    def _row_shares(self, batch: Batch) -> list[RowCut]:
        """The shares in which the rows of a step are computed: one, of which threads share out the columns, or some."""
        if self._ranks.degrees.num_ranks > 1 or self._model.experts.num_experts or self._model.latent.rank:
            count = 1
        else:
            count = most_shares(len(batch.slots), self.threads.count, has_amx=self._has_amx)
        return cut_rows(batch, count, self._row_costs)

    def _work(self, batch: Batch, metadata: ForwardMetadata, shares: list[Range]) -> list[Work]:
        """The arguments of each thread; each share has as many threads."""
        num_tokens, adapter_rows = len(batch.slots), metadata.adapters
        acts, states = self._activations(num_tokens, is_adapted=bool(adapter_rows)), state_steps(metadata)
        operands = self._operands(max(num_tokens, self._num_copies(num_tokens)), self._model.weights, shares)
        adapted = self._adapters.step(adapter_rows, num_tokens, self._ranks.buffers, self._thread_buffers)
        size, work = len(operands) // len(shares), []
        for number, rows in enumerate(shares):
            first, end = number * size, (number + 1) * size
            of_share, own_acts, own_adapted, own_states = batch, acts, adapted[first:end], states
            if len(shares) > 1:
                of_share, own_acts = batch_of(batch, rows), _activations_of(acts, rows)
                own_adapted = [adapters_of(thread, rows) for thread in own_adapted]
                own_states = states_of(states, rows, of_share) if len(states.tables) else states
            for shape in self._shapes:  # the last arrays are large enough for all
                splits = self._thread_buffers[first].splits(shape, of_share)
            for thread in range(size):
                for shape in self._shapes:
                    scratch = self._thread_buffers[first + thread].attention(shape, of_share, bf16=self._bf16)
                attending = Attending(own_acts.queries, shape, of_share, scratch, splits, self._slopes, self._sinks)
                own = operands[first + thread], attending, self._cache, own_adapted[thread], own_states
                work.append(Work(own_acts, *own))
        return work

    def logits(self, hidden: Tensor) -> Tensor:
        num_rows, width = hidden.shape
        torch.from_numpy(self._rows("output_rows", num_rows, width)).copy_(hidden)
        self._ranks.begin_logits(num_rows)
        self.run_output(num_rows)
        # Columns are padded to whole panels; those past the vocabulary are cut off.
        logits = torch.from_numpy(self._rows("logits", num_rows, self._logits_width))[:, : self.config.vocab_size]
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if (cap := self.config.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def run_output(self, num_rows: int) -> None:
        """Compute logits of the rows in the ranks' buffers. The part of `logits` that all ranks of stage 0 do."""
        rows = self._rows("output_rows", num_rows, self.config.hidden_size)
        own_logits = self._rows("logits", num_rows, self._logits_width, self._share.vocab.first)
        operands = self._operands(num_rows, self._model.output, [Range(0, num_rows)])
        self.threads.run(partial(_output_rows, self._model, rows, own_logits, operands))

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
        summarise(self.logits(hidden).numpy())

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The residual of the step, [num_tokens, hidden_size]."""
        residual = torch.from_numpy(self._rows("residual", token_ids.shape[0], self.config.hidden_size))
        residual.copy_(self._embed[token_ids])
        if self.config.embed_scale != 1.0:
            residual.mul_(self.config.embed_scale)
        if len(self._positions):
            residual.add_(self._positions[positions])
        if len(self._embed_norm):
            weight, bias = self._embed_norm
            residual.copy_(layer_norm(residual, weight.shape, weight, bias, self.config.norm_eps))
        if (width := self._layer_inputs.shape[1]) > 0:
            of_tokens = torch.from_numpy(self._rows("token_inputs", len(token_ids), width))
            of_tokens.copy_(self._layer_inputs[token_ids]).mul_(self._model.inputs.width**0.5)
        return residual

    @property
    def _logits_width(self) -> int:
        return round_up(self.config.vocab_size, PANEL)

    def _rows(self, name: str, rows: int, width: int, first_column: int = 0) -> Floats:
        """The buffer `name` as [rows, width]. With `first_column` the view begins there and ends as far into a row that
        is not used, so that a product can write to the columns from there on.
        """
        buffer: Floats = self._ranks.buffers.get(name, (rows + 1) * width)
        return buffer[first_column : first_column + rows * width].reshape(rows, width)

    def _activations(self, rows: int, *, is_adapted: bool) -> Activations:
        config, share, kind = self.config, self._share, self._model.kind
        branch_rows = rows if kind.sandwich else 0
        is_plain = kind.activation == SILU and config.activation_factors == (1.0, 1.0) and not is_adapted
        gate_up_rows = rows if kind.gated and not is_plain else 0
        q_width, inner = config.num_heads * self._model.shape.head_dim, int(self._model.widths[:, 1].max())
        latent, (inputs, token_inputs, input_gates) = self._latent_rows(rows), self._input_rows(rows)
        width = q_width if config.latent else max(qkv_width(each, config) for each in self._shapes)
        projected, recurred = self._recurrent_rows(rows)
        qkv = self._buffers.get("qkv", (rows + TILE_ROWS) * width)
        first_query = share.heads.first * config.queries_per_kv_head * config.head_dim
        own_mixed = self._rows("latents" if config.latent else "mixed", rows, q_width, first_query)
        return Activations(
            residual=self._rows("residual", rows, config.hidden_size),
            own_residual=self._rows("residual", rows, config.hidden_size, share.hidden.first),
            branch=self._rows("branch", branch_rows, config.hidden_size),
            own_branch=self._rows("branch", branch_rows, config.hidden_size, share.hidden.first),
            inner=self._rows("inner", rows, inner),
            own_inner=self._rows("inner", rows, inner, share.inner.first),
            gate_up=self._rows("gate_up", gate_up_rows, 2 * inner),
            own_gate_up=self._rows("gate_up", gate_up_rows, 2 * inner, 2 * share.inner.first),
            mixed=latent.results.reshape(rows, -1) if config.latent else self._rows("mixed", rows, q_width),
            qkv=qkv[: rows * width].reshape(rows, -1),
            queries=Queries(qkv, width, own_mixed.reshape(-1), q_width),
            squares=self._squares(rows),
            own_squares=self._squares(rows, share.heads.first),
            routed=self._routed_rows(rows),
            latent=latent,
            projected=projected,
            recurred=recurred,
            inputs=inputs,
            token_inputs=token_inputs,
            input_gates=input_gates,
        )

    def _input_rows(self, rows: int) -> tuple[Floats, Floats, Floats]:
        if not self._model.inputs.width:
            return _NO_ROWS, _NO_ROWS, _NO_ROWS
        inputs, of_tokens = (self._rows(name, rows, self._layer_inputs.shape[1]) for name in ("inputs", "token_inputs"))
        return inputs, of_tokens, self._rows("input_gates", rows, self._model.inputs.width)

    def _recurrent_rows(self, rows: int) -> tuple[Floats, Floats]:
        facts = self.config.recurrent
        if facts is None:
            return _NO_ROWS, _NO_ROWS
        return self._rows("projected", rows, round_up(facts.projected, PANEL)), self._rows(
            "recurred", rows, facts.result_width
        )

    def _latent_rows(self, rows: int) -> LatentRows:
        config, facts = self.config, self._model.latent
        if not facts.rank:
            return _NO_LATENT_ROWS
        query_step = config.num_heads * (facts.rotated + facts.plain)
        step = (facts.query_rank or query_step) + config.head_dim
        sizes = {"projected": step, "latent_queries": query_step, "mixed": config.num_heads * facts.width}
        flat = {name: self._rows(name, rows, width).reshape(-1) for name, width in sizes.items()}
        queries = (flat["latent_queries"], query_step) if facts.query_rank else (flat["projected"], step)
        return LatentRows(flat["projected"], queries[0], flat["mixed"], step, queries[1])

    def _squares(self, rows: int, first_kv_head: int = 0) -> Floats:
        config = self.config
        of_kv_head, rows = config.queries_per_kv_head + 1, rows if config.qk_norm_of == "all" else 0
        return self._rows("squares", rows, config.num_kv_heads * of_kv_head, first_kv_head * of_kv_head)

    def _routed_rows(self, rows: int) -> RoutedRows:
        experts, hidden = self._model.experts, self.config.hidden_size
        if not experts.num_experts:
            return _NO_ROUTED_ROWS
        num_inner, num_chosen = (
            rows * (experts.routing.top_k * experts.width + experts.shared_width),
            rows * experts.routing.top_k,
        )
        is_plain = not experts.gated or experts.activation == SILU
        buffers, num_gated = self._ranks.buffers, 0 if is_plain else 2 * num_inner
        return RoutedRows(
            normed=self._rows("normed_copies", rows, hidden),
            scores=self._rows("router_scores", rows, round_up(experts.num_experts, PANEL)),
            chosen=buffers.get("chosen", num_chosen, np.int64)[:num_chosen].reshape(rows, -1),
            weights=self._rows("expert_weights", rows, experts.routing.top_k + 1),
            gate_up=buffers.get("expert_gate_up", num_gated)[:num_gated],
            inner=buffers.get("expert_inner", num_inner)[:num_inner],
            results=self._rows("expert_results", self._num_copies(rows), hidden),
        )

    def _num_copies(self, rows: int) -> int:
        """Rows of all experts together."""
        experts = self._model.experts
        return rows * (experts.routing.top_k + (1 if experts.shared_width else 0))

    def _operands(self, rows: int, weights: Weights, shares: Sequence[Range]) -> list[Operand]:
        """One operand for each thread. All threads of a row share have its rows, and separate sums."""
        kind, sums_dtype = operand_dtypes(weights)
        shared, width = self._ranks.buffers, int(weights.matrices[:, 2].max())
        a = shared.get("a", (rows + len(shares) * TILE_ROWS) * width * np.dtype(kind).itemsize, np.uint8)
        factors, amx = shared.get("factors", rows), amx_shapes() if kind in _AMX_OPERANDS else _NO_AMX
        while len(self._thread_buffers) < self.threads.count:
            self._thread_buffers.append(Buffers())
        size, num_threads = 2 * TILE_ROWS * UNIT * FLOAT_BYTES, self.threads.count
        operands = []
        for thread, buffers in enumerate(self._thread_buffers[:num_threads]):
            number = thread * len(shares) // num_threads
            first = shares[number].first
            own_a = a[(first + number * TILE_ROWS) * width * np.dtype(kind).itemsize :].view(kind)
            sums = buffers.get("sums", size, np.uint8)[:size].view(sums_dtype)
            operands.append(Operand(own_a, factors[first:], sums, amx, buffers.get("wide", wide_size(weights))))
        return operands


def _activations_of(acts: Activations, rows: Range) -> Activations:
    """Some rows of a layer's intermediate results. Experts and latent attention do not share out rows."""
    queries, own = acts.queries, slice(rows.first, rows.end)
    return Activations(
        residual=acts.residual[own],
        own_residual=acts.own_residual[own],
        branch=acts.branch[own],
        own_branch=acts.own_branch[own],
        inner=acts.inner[own],
        own_inner=acts.own_inner[own],
        gate_up=acts.gate_up[own],
        own_gate_up=acts.own_gate_up[own],
        mixed=acts.mixed[own],
        squares=acts.squares[own],
        own_squares=acts.own_squares[own],
        qkv=acts.qkv[own],
        queries=Queries(
            queries.rows[rows.first * queries.step :],
            queries.step,
            queries.out[rows.first * queries.out_step :],
            queries.out_step,
        ),
        routed=acts.routed,
        latent=acts.latent,
        projected=acts.projected[own],
        recurred=acts.recurred[own],
        inputs=acts.inputs[own],
        token_inputs=acts.token_inputs[own],
        input_gates=acts.input_gates[own],
    )


def _run_layers(model: ModelConstants, work: list[Work], layers: Range, team: Team) -> None:
    run_layers(model, work[team.share.number * team.num_threads + team.thread], team, layers)


def _output_rows(model: ModelConstants, rows: Floats, out: Floats, operands: list[Operand], team: Team) -> None:
    output_rows(model, rows, out, operands[team.thread], team)
