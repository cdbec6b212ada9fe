"""LoopMemory: the buffers of the compiled decoder's loop, and its kernels' arguments, which point to them.

If a step has as many tokens and threads as the one before, as most decode steps do, no buffer has moved, and only the
batch of the arguments changes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.attention.backend import AdapterRows
from engine.kernels.cpu.adapters import AdapterPieces, StepAdapters
from engine.kernels.cpu.arguments import (
    SILU,
    Batch,
    Bytes,
    Floats,
    HeadShape,
    Int64s,
    Operand,
    Queries,
    Range,
    RoutedRows,
    Splits,
    Weights,
)
from engine.kernels.cpu.attention.latent import LatentRows
from engine.kernels.cpu.buffers import Buffers, round_up
from engine.kernels.cpu.compilation.stored import Stored, stored
from engine.kernels.cpu.machine import FLOAT_BYTES, PANEL, TILE_ROWS, UNIT, amx_shapes
from engine.kernels.cpu.products.matmul import product_code
from engine.kernels.cpu.products.packing import operand_dtypes, wide_size
from engine.kernels.cpu.products.panels import MAX_PANEL_ROWS
from engine.kernels.cpu.recurrent.recurrent_arguments import StateSteps
from engine.kernels.cpu.sampling.logits import Summaries
from engine.kernels.cpu.step_arguments import (
    Activations,
    ModelConstants,
    OutputRows,
    StepBatch,
    ThreadMemory,
    in_bytes,
)
from engine.kernels.cpu.step_facts import StepFacts, facts_of
from engine.models.model_config import ModelConfig
from engine.models.packed_weights import qkv_width
from engine.models.rank_group import RankGroup
from engine.models.row_shares import adapters_of, batch_of, states_of
from engine.models.share import rank_share

AMX_OPERANDS = (np.uint8, np.int16)
"""Types of the left operand whose products use AMX: int8, and bf16 rounded to it."""
_RESULTS = "result_"
"""Prefix of the names of buffers that hold result rows (result_rows.py)."""
_NO_AMX: Bytes = np.empty(0, np.uint8)
_NO_ROWS: Floats = np.empty((0, 0), np.float32)
_NO_CHOICES, _NO_NUMBERS = np.empty((0, 0), np.int64), _NO_ROWS.reshape(0)
_NO_ROUTED_ROWS = RoutedRows(_NO_ROWS, _NO_ROWS, _NO_CHOICES, _NO_ROWS, _NO_NUMBERS, _NO_NUMBERS, _NO_ROWS)
_NO_LATENT_ROWS = LatentRows(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, step=0, query_step=0)


class _StepSize(NamedTuple):
    """Everything that the layout of a step's memory depends on."""

    num_tokens: int
    num_threads: int
    shares: tuple[Range, ...]  # of rows; each has as many threads
    have_prompts: tuple[bool, ...]
    adapters: tuple[AdapterRows, ...]
    are_results: bool


class _CachedArguments(NamedTuple):
    """The arguments of each thread that steps of the same size share, and the size and buffers they were made for."""

    made_for: object
    arguments: list[tuple[Stored, ...]]


class LoopMemory:
    """For one rank. `shapes`: of the heads of its layers, the widest last; `bf16`: prompts attend in bf16."""

    def __init__(
        self,
        config: ModelConfig,
        model: ModelConstants,
        ranks: RankGroup,
        shapes: Sequence[HeadShape],
        adapters: AdapterPieces,
        *,
        shrunk_width: int,
        bf16: bool,
    ) -> None:
        self._config, self._model = config, model
        self._ranks, self._share = ranks, rank_share(config, ranks.rank, ranks.degrees)
        self._shapes, self._adapters, self._bf16 = shapes, adapters, bf16
        self._qkv_width, self._shrunk_width = max(qkv_width(each, config) for each in shapes), shrunk_width
        self._constants = stored(in_bytes(model))
        self._buffers = Buffers()
        self._thread_buffers: list[Buffers] = []
        nothing = _CachedArguments(None, [])
        self._layers, self._output = {False: nothing, True: nothing}, nothing
        self._rows: tuple[object, OutputRows | None] = (None, None)  # and what they were made for

    def layer_arguments(
        self,
        batch: Batch,
        states: StateSteps,
        adapters: tuple[AdapterRows, ...],
        shares: Sequence[Range],
        num_threads: int,
        *,
        are_results: bool,
    ) -> list[tuple[Stored, ...]]:
        """The arguments of each thread for `run_layers`. Each share of rows has as many threads. With `are_results` the
        rows are those of `take_results`.
        """
        batches, of_shares = [batch], [states]
        if len(shares) > 1:
            batches = [batch_of(batch, rows) for rows in shares]
            of_shares = [states_of(states, *each) for each in zip(shares, batches, strict=True)]
        while len(self._thread_buffers) < num_threads:
            self._thread_buffers.append(Buffers())
        facts = list(map(facts_of, batches))
        splits = [self._splits(*each) for each in zip(self._thread_buffers, facts, strict=False)]
        have_prompts = tuple(each.has_prompt for each in facts)
        size = _StepSize(len(batch.slots), num_threads, tuple(shares), have_prompts, adapters, are_results)
        cached = self._layers[are_results]
        if cached.made_for != (size, self._versions()):
            memories = self._new_memories(size, splits)
            cached = _CachedArguments((size, self._versions()), [(self._constants, memory) for memory in memories])
            self._layers[are_results] = cached
        steps = [stored(StepBatch(*each)) for each in zip(batches, of_shares, strict=True)]
        each_step = (step for step in steps for _ in range(num_threads // len(shares)))
        return [(*own, step) for own, step in zip(cached.arguments, each_step, strict=True)]

    def output_arguments(self, num_rows: int, num_threads: int) -> list[tuple[Stored, ...]]:
        """The arguments of each thread for `output_rows`, which computes logits of the rows in the ranks' buffers."""
        rows = self.output_rows(num_rows)
        if self._output.made_for != (num_rows, num_threads, self._versions()):
            operands = self._operands(num_rows, self._model.output, [Range(0, num_rows)], num_threads)
            places = stored(rows)
            arguments: list[tuple[Stored, ...]] = [(self._constants, stored(operand), places) for operand in operands]
            self._output = _CachedArguments((num_rows, num_threads, self._versions()), arguments)
        return self._output.arguments

    def output_rows(self, num_rows: int) -> OutputRows:
        """The places of `num_rows` rows and their logits."""
        config, buffers, (made_for, rows) = self._config, self._ranks.buffers, self._rows
        if rows is None or made_for != (num_rows, buffers.version):
            width = round_up(config.vocab_size, PANEL)
            rows = OutputRows(
                hidden=self.rows("output_rows", num_rows, config.hidden_size),
                logits=self.rows("logits", num_rows, width),
                own_logits=self.rows("logits", num_rows, width, self._share.vocab.first),
                num_columns=config.vocab_size,
                scale=np.float32(config.logit_scale),
                softcap=np.float32(config.logit_softcap or 0.0),
                summaries=Summaries(
                    buffers.get("largest", num_rows, np.int64)[:num_rows],
                    *buffers.get("scores", 2 * num_rows)[: 2 * num_rows].reshape(2, num_rows),
                ),
            )
            self._rows = (num_rows, buffers.version), rows
        return rows

    def _versions(self) -> tuple[int, ...]:
        return (self._ranks.buffers.version, self._buffers.version, *(each.version for each in self._thread_buffers))

    def _splits(self, buffers: Buffers, facts: StepFacts) -> Splits:
        for shape in self._shapes:  # the last arrays are large enough for all
            splits = buffers.splits(shape, facts.num_split)
        return splits

    def _new_memories(self, size: _StepSize, splits: Sequence[Splits]) -> list[Stored]:
        num_tokens, num_threads, shares, have_prompts, adapters, are_results = size
        acts = self._activations(num_tokens, is_adapted=bool(adapters), prefix=_RESULTS if are_results else "")
        num_rows, own_buffers = max(num_tokens, self._num_copies(num_tokens)), self._thread_buffers[:num_threads]
        operands = self._operands(num_rows, self._model.weights, shares, num_threads)
        adapted = self._adapted(adapters, num_tokens, own_buffers)
        memories = []
        for thread, buffers in enumerate(own_buffers):
            number = thread * len(shares) // num_threads
            rows, own_acts, own_adapted = shares[number], acts, adapted[thread]
            if len(shares) > 1:
                own_acts, own_adapted = _activations_of(acts, rows), adapters_of(own_adapted, rows)
            facts = {"has_prompt": have_prompts[number], "bf16": self._bf16}
            for shape in self._shapes:  # the last arrays are large enough for all
                scratch = buffers.attention(shape, rows.end - rows.first, **facts)
            memories.append(stored(ThreadMemory(own_acts, operands[thread], scratch, splits[number], own_adapted)))
        return memories

    def _adapted(self, rows: Sequence[AdapterRows], num_tokens: int, own: Sequence[Buffers]) -> list[StepAdapters]:
        """The adapters of each thread's step; ranks share all rows. Without `rows` the buffers are empty."""
        normed, shrunk = _NO_ROWS, _NO_ROWS
        if rows:
            normed = self.rows("normed", num_tokens, self._config.hidden_size)
            shrunk = self.rows("shrunk", num_tokens, self._shrunk_width)
        runs = np.array(rows, np.int64).reshape(-1, len(AdapterRows._fields))
        tiles = [buffers.get("adapter_tile", MAX_PANEL_ROWS * PANEL) for buffers in own]
        return [StepAdapters(self._adapters, runs, normed, shrunk, tile) for tile in tiles]

    def is_finite(self, num_tokens: int, layer: int, largest: float) -> bool:
        """True if what the first half of a layer has written is finite: keys and values, stored as numbers up to
        `largest`, and the results of a recurrence.
        """
        written, facts = [], self._config.recurrent
        if self._model.have_attention[layer]:
            num_kv_heads, head_dim = self._model.heads[layer, :2].tolist()
            first, width = self._model.shape.num_heads * head_dim, self._qkv_width
            qkv = self._buffers.get("qkv", num_tokens * width)[: num_tokens * width].reshape(-1, width)
            written.append(qkv[:, first : first + 2 * num_kv_heads * head_dim])
        if facts is not None and self._model.are_recurrent[layer]:
            written.append(self.rows("recurred", num_tokens, facts.result_width))
        # NaN is not less.
        return all(max(values.max(), -values.min()) <= largest for values in written)

    def take_results(self, num_tokens: int, rows: Int64s) -> None:
        """Copy what the second half of a layer reads of these rows to where the loop computes results."""
        facts, of_inputs = self._config.recurrent, self._config.num_layers * self._model.inputs.width
        widths = {"residual": self._config.hidden_size, "inputs": of_inputs}
        widths["recurred"] = 0 if facts is None else facts.result_width
        for name, width in widths.items():
            if width:
                self.rows(_RESULTS + name, len(rows), width)[:] = self.rows(name, num_tokens, width)[rows]
        size, width = (len(rows) + TILE_ROWS) * self._qkv_width, self._qkv_width
        results, qkv = self._buffers.get(_RESULTS + "qkv", size), self._buffers.get("qkv", num_tokens * width)
        results[: len(rows) * width].reshape(-1, width)[:] = qkv[: num_tokens * width].reshape(-1, width)[rows]

    def put_results(self, num_tokens: int, rows: Int64s) -> None:
        """Copy the residual of the results to these rows."""
        width = self._config.hidden_size
        self.rows("residual", num_tokens, width)[rows] = self.rows(_RESULTS + "residual", len(rows), width)

    def rows(self, name: str, rows: int, width: int, first_column: int = 0) -> Floats:
        """The buffer `name` as [rows, width]. With `first_column` the view begins there and ends as far into a row that
        is not used, so that a product can write to the columns from there on.
        """
        buffer: Floats = self._ranks.buffers.get(name, (rows + 1) * width)
        return buffer[first_column : first_column + rows * width].reshape(rows, width)

    def _activations(self, rows: int, *, is_adapted: bool, prefix: str) -> Activations:
        config, share, family = self._config, self._share, self._model.family
        branch_rows = rows if family.sandwich else 0
        is_plain = family.activation == SILU and config.activation_factors == (1.0, 1.0) and not is_adapted
        gate_up_rows = rows if family.gated and not is_plain else 0
        q_width, inner = config.num_heads * self._model.shape.head_dim, int(self._model.widths[:, 1].max())
        latent, (inputs, token_inputs, input_gates) = self._latent_rows(rows), self._input_rows(rows, prefix)
        width = q_width if config.latent else self._qkv_width
        qkv = self._buffers.get(prefix + "qkv", (rows + TILE_ROWS) * width)
        first_query = share.heads.first * config.queries_per_kv_head * config.head_dim
        own_attended = self.rows("latents" if config.latent else "attended", rows, q_width, first_query)
        return Activations(
            residual=self.rows(prefix + "residual", rows, config.hidden_size),
            own_residual=self.rows(prefix + "residual", rows, config.hidden_size, share.hidden.first),
            branch=self.rows("branch", branch_rows, config.hidden_size),
            own_branch=self.rows("branch", branch_rows, config.hidden_size, share.hidden.first),
            inner=self.rows("inner", rows, inner),
            own_inner=self.rows("inner", rows, inner, share.inner.first),
            gate_up=self.rows("gate_up", gate_up_rows, 2 * inner),
            own_gate_up=self.rows("gate_up", gate_up_rows, 2 * inner, 2 * share.inner.first),
            attended=latent.results.reshape(rows, -1) if config.latent else self.rows("attended", rows, q_width),
            qkv=qkv[: rows * width].reshape(rows, -1),
            queries=Queries(qkv, width, own_attended.reshape(-1), q_width),
            squares=self._squares(rows),
            own_squares=self._squares(rows, share.heads.first),
            routed=self._routed_rows(rows),
            latent=latent,
            **self._recurrent_rows(rows, prefix),
            inputs=inputs,
            token_inputs=token_inputs,
            input_gates=input_gates,
        )

    def _input_rows(self, rows: int, prefix: str) -> tuple[Floats, Floats, Floats]:
        width = self._model.inputs.width
        if not width:
            return _NO_ROWS, _NO_ROWS, _NO_ROWS
        of_layers = self._config.num_layers * width
        inputs, of_tokens = (self.rows(name, rows, of_layers) for name in (prefix + "inputs", "token_inputs"))
        return inputs, of_tokens, self.rows("input_gates", rows, width)

    def _recurrent_rows(self, rows: int, prefix: str) -> dict[str, Floats]:
        facts = self._config.recurrent
        if facts is None:
            return dict.fromkeys(("projected", "inner_recurrent", "recurred"), _NO_ROWS)
        return {
            "projected": self.rows("projected", rows, round_up(facts.projected, PANEL)),
            "inner_recurrent": self.rows("inner_recurrent", rows, round_up(facts.inner_width, PANEL)),
            "recurred": self.rows(prefix + "recurred", rows, facts.result_width),
        }

    def _latent_rows(self, rows: int) -> LatentRows:
        config, facts = self._config, self._model.latent
        if not facts.rank:
            return _NO_LATENT_ROWS
        query_step = config.num_heads * (facts.rotated + facts.plain)
        step = (facts.query_rank or query_step) + config.head_dim
        sizes = {"projected": step, "latent_queries": query_step, "results": config.num_heads * facts.width}
        flat = {name: self.rows(name, rows, width).reshape(-1) for name, width in sizes.items()}
        queries = (flat["latent_queries"], query_step) if facts.query_rank else (flat["projected"], step)
        return LatentRows(flat["projected"], queries[0], flat["results"], step, queries[1])

    def _squares(self, rows: int, first_kv_head: int = 0) -> Floats:
        config = self._config
        of_kv_head, rows = config.queries_per_kv_head + 1, rows if config.qk_norm_of == "all" else 0
        return self.rows("squares", rows, config.num_kv_heads * of_kv_head, first_kv_head * of_kv_head)

    def _routed_rows(self, rows: int) -> RoutedRows:
        experts, hidden = self._model.experts, self._config.hidden_size
        if not experts.num_experts:
            return _NO_ROUTED_ROWS
        num_inner, num_chosen = (
            rows * (experts.routing.top_k * experts.width + experts.shared_width),
            rows * experts.routing.top_k,
        )
        is_plain = not experts.gated or experts.activation == SILU
        buffers, num_gated = self._ranks.buffers, 0 if is_plain else 2 * num_inner
        return RoutedRows(
            normed=self.rows("normed_copies", rows, hidden),
            scores=self.rows("router_scores", rows, round_up(experts.num_experts, PANEL)),
            chosen=buffers.get("chosen", num_chosen, np.int64)[:num_chosen].reshape(rows, -1),
            weights=self.rows("expert_weights", rows, experts.routing.top_k + 1),
            gate_up=buffers.get("expert_gate_up", num_gated)[:num_gated],
            inner=buffers.get("expert_inner", num_inner)[:num_inner],
            results=self.rows("expert_results", self._num_copies(rows), hidden),
        )

    def _num_copies(self, rows: int) -> int:
        """Rows of all experts together."""
        experts = self._model.experts
        return rows * (experts.routing.top_k + (1 if experts.shared_width else 0))

    def _operands(self, rows: int, weights: Weights, shares: Sequence[Range], num_threads: int) -> list[Operand]:
        """One operand for each thread. All threads of a row share have its rows, and separate sums."""
        (kind, _), code = operand_dtypes(weights), product_code(weights)
        shared, row_bytes = self._ranks.buffers, int(weights.matrices[:, 2].max()) * code.operand_bytes
        a = shared.get("a", (rows + len(shares) * TILE_ROWS) * row_bytes, np.uint8)
        factors, amx = shared.get("factors", rows), amx_shapes() if kind in AMX_OPERANDS else _NO_AMX
        size = 2 * TILE_ROWS * UNIT * FLOAT_BYTES
        operands = []
        for thread, buffers in enumerate(self._thread_buffers[:num_threads]):
            number = thread * len(shares) // num_threads
            first = shares[number].first
            own_a, sums = a[(first + number * TILE_ROWS) * row_bytes :], buffers.get("sums", size, np.uint8)
            operands.append(Operand(own_a, factors[first:], sums, amx, code, buffers.get("wide", wide_size(weights))))
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
        attended=acts.attended[own],
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
        inner_recurrent=acts.inner_recurrent[own],
        recurred=acts.recurred[own],
        inputs=acts.inputs[own],
        token_inputs=acts.token_inputs[own],
        input_gates=acts.input_gates[own],
    )
