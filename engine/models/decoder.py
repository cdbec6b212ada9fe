"""Decoder: one eager decoder for all families: embedding, layers of attention and MLP, norm, output matrix.

ModelConfig selects the variants. The decoder does not know sequences, blocks or sampling: its input is tokens and
metadata, its output hidden states and logits.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata, attention_shape
from engine.attention.cpu import CpuAttention
from engine.attention.views import parts_of, seen_by, view_of_layer
from engine.kernels.cpu.recurrent.recurrence import mix, mix_address, multiply_address
from engine.model import DecoderMemory, Finish, LayerGroups
from engine.models.adapted_linear import Adapters
from engine.models.adapters import AdapterWeights
from engine.models.cpu_support import why_not_recurrent
from engine.models.encodings import LinearParameters, Parameters
from engine.models.expert_products import ExpertProducts, why_not_on_device
from engine.models.layer import run_layer, take_layer, take_norm
from engine.models.linear import LinearLayer, Ops, Rows, make_linear
from engine.models.model_config import ModelConfig
from engine.models.mtp import MtpInput
from engine.models.per_layer import LayerInputs, take_sized_layer
from engine.models.rank_group import SummingGroup
from engine.models.recurrent.for_kernels import KINDS
from engine.models.recurrent.mixer import RecurrentMixer
from engine.models.recurrent.state import Mixing, RecurrentStates
from engine.models.rope import rope_of_layer, ropes_of
from engine.models.share import rank_share
from engine.models.streams import JoinStreams, SplitStreams
from engine.sampling.host_rows import rows_for
from engine.sampling.row_math import Logits, RowMath
from mesh.domain.host import Cores


class Decoder:
    """A decoder-only transformer, or the share of it that one rank of `ranks` computes. The constructor takes all
    parameters. Only the ranks of stage 0 embed; only rank 0 has logits.
    """

    phase_cycles = None
    borrows_cores = False

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        memory: DecoderMemory,
        ranks: SummingGroup | None = None,
        adapter_shapes: Sequence[AdapterWeights] = (),
        mtp_input: MtpInput | None = None,
        shared: "Decoder | None" = None,
    ) -> None:
        """`shared`: the decoder whose embedding and output matrix are this one's, too."""
        self.config = config
        self._ranks = ranks
        self._mtp_input = mtp_input
        self._adapters = Adapters(adapter_shapes)
        self.num_torch_threads = torch.get_num_threads()
        self._cache, self._attentions, self._scales = memory
        self._attention = memory.attention
        share = rank_share(config) if ranks is None else rank_share(config, ranks.rank, ranks.degrees)
        self._heads = attention_shape(config).shard(share.heads, share.query_heads)
        self.layers = share.layers
        self._states = _states(config, memory)
        self.why_experts_on_host = _why_experts_on_host(config, parameters.encoding, memory)
        on_device = config.experts is not None and self.why_experts_on_host is None
        self._expert_products = ExpertProducts(memory.cache.tensor.device) if on_device else None
        self._embedding: Embedding | None = None
        self._output: Output | None = None
        if shared is not None:
            assert shared._output is not None
            self._embedding, self._output = shared._embedding, shared._output.with_norm(parameters)
        elif self.layers.first == 0:
            self._embedding = Embedding(parameters, config)
            self._output = Output(parameters, config, self._embedding.weight)
        numbers, linears = range(self.layers.first, self.layers.end), self._adapters
        self._layers = [take_layer(parameters, n, config, ranks, linears, self._expert_products) for n in numbers]
        numbered = enumerate(self._layers if config.per_layer is not None else ())
        self._sized_layers = [take_sized_layer(parameters, index, config, linears, layer) for index, layer in numbered]
        has_inputs = config.per_layer is not None and config.per_layer.input_width
        self._layer_inputs = LayerInputs(parameters, config) if has_inputs else None
        windows = self._cache.layout.windows
        self._views = [view_of_layer(config, layer, windows) for layer in range(config.num_layers)]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of a step, of `_read_later`
        self._read_later = set() if config.per_layer is None else config.per_layer.read_later
        self._like = self._layers[0].like
        self._ropes = ropes_of(config, self._like.device, self._like.dtype)

    @property
    def attention_backend(self) -> str:
        return self._attention.name

    @cached_property
    def row_math(self) -> RowMath:
        return rows_for(self._like.device)

    def use_cores(self, lent: Cores) -> None:
        """Ignores lent cores: OpenMP gives every thread the same share and waits for the slowest."""

    def put_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Replace the adapter in a slot, which no pass uses meanwhile."""
        self._adapters.put(slot, weights)

    def begin(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Finish:
        if self._ranks is not None:
            self._ranks.send_step(token_ids, metadata, layer_groups)
        residual = self.run_layers(token_ids, metadata, layer_groups.within(self.layers))
        if self._ranks is None:
            return lambda: residual
        return self._ranks.end_forward(residual, layer_groups)

    def run_layers(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Tensor:
        """Compute these layers on the tokens, or on the residual of the previous stage. The part of a pass that
        every rank does. Returns the residual [num_tokens, residual_width].
        """
        self._adapters.begin(metadata.adapters)
        if self._expert_products is not None:
            self._expert_products.begin(metadata)
        if self._states is not None:
            self._states.begin(metadata)
        if self._embedding is not None:
            residual = self._embedding(token_ids, metadata.positions)
            if self._mtp_input is not None and metadata.previous is not None:
                residual = self._mtp_input(residual, metadata.previous)
        else:
            assert self._ranks is not None
            residual = self._ranks.residual(self._like, len(metadata.positions))
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, residual)
        rotations = [rope.rotation(metadata.positions, metadata.rope_lengths) for rope in self._ropes]
        of_group = metadata.by_group()
        seen = {view: seen_by(of_group[view.group], view, self._cache.layout.block_size) for view in self._views}
        for first, stop in layer_groups:
            for index in range(first, stop):
                rotation = rotations[rope_of_layer(self.config, index)] if rotations else None
                attend = partial(self._attend, index, seen[self._views[index]])
                if self._sized_layers:
                    own_inputs = None if inputs is None else inputs[index]
                    residual = self._sized_layers[index](residual, rotation, attend, own_inputs)
                    continue
                layer, recur = self._layers[index - self.layers.first], partial(self._recur, index, metadata)
                residual = run_layer(layer, self._heads, residual, rotation, attend, recur)
        return residual

    def logits(self, hidden: Tensor) -> Logits:
        assert self._output is not None
        return Logits(self._output(hidden))

    def _attend(self, index: int, metadata: ForwardMetadata, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """-> [num_tokens, num_heads * head_dim]. Attention reads KV as it is stored, so queries and the result carry
        the scales: q (k / s) s = q k. `metadata` is what the layer's view shows.
        """
        view, attention = self._views[index], self._attention
        window = self.config.windows[index] if view.chunk is None else None
        layer_cache, scale = self._cache.layer(view.layer), self._scales.get(index)
        if self.config.per_layer is not None:
            heads, source = self._sized_layers[index].heads, self.config.per_layer.layers[index].kv_source
            attention, scale = self._attentions[heads], self._scales.get(source)
            layer_cache = parts_of(layer_cache, view.num_parts, heads)
            keys, values = self._own_or_kept(index, source, keys, values)
        sinks = self._layers[index - self.layers.first].sinks
        if scale is None:
            return attention.attend(queries, keys, values, layer_cache, window, metadata, sinks).flatten(1)
        of_values = scale.key if self._cache.layout.keys_are_values else scale.value
        scaled = (queries * scale.key, keys / scale.key, values / of_values)
        return attention.attend(*scaled, layer_cache, window, metadata, sinks).flatten(1) * of_values

    def _own_or_kept(self, index: int, source: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a step in the layer whose KV this one reads. Others write them to the cache again."""
        if source != index:
            return self._kept[source]
        if source in self._read_later:
            self._kept[source] = keys, values
        return keys, values

    def _recur(self, index: int, metadata: ForwardMetadata, recurrence: RecurrentMixer, rows: Tensor) -> Tensor:
        assert self._states is not None
        assert self.config.recurrent is not None
        return recurrence(rows, self._states.of_layer(self.config.recurrent.num_before(index)), metadata)


def _states(config: ModelConfig, memory: DecoderMemory) -> RecurrentStates | None:
    """The kernel computes recurrent layers where kernels compute attention. It is compiled now, so that the first
    request need not wait.
    """
    if config.recurrent is None:
        return None
    attention, mixing = memory.attention, None
    if isinstance(attention, CpuAttention) and why_not_recurrent(config.recurrent) is None:
        mixing = Mixing(mix, attention.threads, multiply_address(KINDS[config.recurrent.kind]))
        mix_address()
    return RecurrentStates(config.recurrent, memory.cache, mixing)


def _why_experts_on_host(config: ModelConfig, encoding: str, memory: DecoderMemory) -> str | None:
    """The reason why the host selects experts; None if kernels can, or if there are no experts."""
    if config.experts is None:
        return None
    if encoding != "float":
        return f"the kernels multiply in floating point, not in {encoding}"
    if config.experts.scales_inputs:
        return "the kernels weight the results of experts, not their inputs"
    return why_not_on_device(memory.attention.name, memory.cache.tensor.device)


class Embedding:
    """The residual before the first layer: rows of the embedding, projected if they are narrower than the layers, and
    split if there are several residuals.
    """

    def __init__(self, parameters: Parameters, config: ModelConfig) -> None:
        self.weight = parameters.take("embed")
        self._positions = parameters.take_optional("positions")
        self._norm = take_norm(parameters, "embed_norm", config) if config.embed_norm else None
        self._project = None if config.embed_size is None else make_linear(parameters.take_linear("project_in"))
        self._split = SplitStreams(_of_streams(parameters, "split", config)) if config.num_streams > 1 else None
        # In the dtype of the rows, as transformers rounds it. A step that is captured must not make it of a number.
        self._scale = torch.tensor(config.embed_scale, dtype=self.weight.dtype, device=self.weight.device)
        self._is_scaled = config.embed_scale != 1.0

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        # -> [num_tokens, residual_width]
        x = self.weight[token_ids]
        if self._is_scaled:
            x = x * self._scale
        if self._project is not None:
            x = self._project(self._project.ops.rows(x))
        if self._positions is not None:
            x = x + self._positions[positions]
        if self._norm is not None:
            x = self._norm(x)
        return x if self._split is None else self._split(x)


def _of_streams(parameters: Parameters, name: str, config: ModelConfig) -> list[LinearLayer]:
    """The projections of all residuals but the first."""
    return [make_linear(parameters.take_linear(f"{name}.{number}")) for number in range(1, config.num_streams)]


class Output:
    """Logits of the residual after the last layer: the final norm, and the output matrix, which may be `embedding`."""

    def __init__(
        self,
        parameters: Parameters,
        config: ModelConfig,
        embedding: Tensor,
        make_output: Callable[[LinearParameters], LinearLayer] = make_linear,
    ) -> None:
        self._config = config
        self._join = JoinStreams(_of_streams(parameters, "join", config)) if config.num_streams > 1 else None
        self._norm = take_norm(parameters, "final_norm", config) if config.final_norm else None
        self._project = None if config.embed_size is None else make_linear(parameters.take_linear("project_out"))
        self._lm_head = make_output(parameters.take_output(embedding))

    def with_norm(self, parameters: Parameters) -> Self:
        """This output matrix behind another final norm."""
        other = copy(self)
        other._norm = take_norm(parameters, "final_norm", self._config)
        return other

    def __call__(self, hidden: Tensor) -> Tensor:
        # [num_rows, residual_width] -> [num_rows, vocab_size], fp32
        if self._join is not None:
            hidden = self._join(hidden)
        config, lm_head, project = self._config, self._lm_head, self._project
        if project is None:
            rows = self._normed(lm_head.ops, hidden)
        else:
            rows = lm_head.ops.rows(project(self._normed(project.ops, hidden)))
        logits = lm_head(rows).to(torch.float32)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def _normed(self, ops: Ops, hidden: Tensor) -> Rows:
        return ops.rows(hidden) if self._norm is None else ops.norm(hidden, self._norm)
