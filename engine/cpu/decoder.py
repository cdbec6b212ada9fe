"""CompiledDecoder: `engine.models.decoder.Decoder` as one compiled loop, for CPUs with AVX-512.

In int8, weights are scaled per output channel and activations per row; sums are exact integers.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import AttentionShape
from engine.attention.metadata import ForwardMetadata, one_token
from engine.cpu import chunk_amx
from engine.cpu.attention import Attending, Queries
from engine.cpu.batch import NO_WINDOW, Batch, head_shape, why_not_paged
from engine.cpu.buffers import Buffers
from engine.cpu.features import amx_shapes, has_amx, why_no_loops
from engine.cpu.matmul import TILE_ROWS, UNIT, Operand
from engine.cpu.normaliser import summarise
from engine.cpu.packing import MatrixShape, Packer
from engine.cpu.step import Activations, Model, Team, Work, output_rows, run_layers
from engine.cpu.team import Threads
from engine.cpu.tiles import PANEL
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.rope import RotaryEmbedding
from mesh.cores import Cores
from mesh.domain.kv import KVLayout

Floats = NDArray[np.float32]
_NO_AMX: NDArray[np.uint8] = np.empty(0, np.uint8)
_PART_NAMES = ("qkv", "o", "gate_up", "down")
_LOOP_DOES = {
    "activation": "silu",
    "norm": "rms",
    "block": "sequential",
    "positions": "rotary",
    "window_rope": None,
    "gated": True,
    "experts": None,
    "attention_scale": None,
    "attention_softcap": None,
    "embed_norm": False,
    "embed_scale": 1.0,
    "lm_head_bias": False,
    "logit_scale": 1.0,
    "logit_softcap": None,
}
"""Facts of a model that the loop is made for. What it can do either way is not here; nor is what loading has done."""


def why_not_compiled(config: ModelConfig, layout: KVLayout, *, int8: bool) -> str | None:
    """What keeps a model from being compiled here; None if nothing does."""
    if (missing := why_no_loops(int8=int8)) is not None:
        return missing
    for name, value in _LOOP_DOES.items():
        if getattr(config, name) != value:
            return f"{name} {getattr(config, name)}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % PANEL:
            return f"{name} {getattr(config, name)}, not a multiple of {PANEL}"
    return why_not_paged(layout)


class CompiledDecoder:
    """A decoder-only transformer on CPU. Takes the parameters over, emptying the dictionary."""

    def __init__(self, config: ModelConfig, parameters: dict[str, Tensor], cache: KVCache, *, int8: bool) -> None:
        self.config = config
        self.attention_backend = "compiled"
        self.threads = Threads(torch.get_num_threads())
        # The loop has threads of its own; OpenMP's would spin on their cores between torch's few operations.
        self.num_torch_threads = 1
        self._thread_buffers: list[Buffers] = []
        self._int8 = int8
        self._bf16 = int8 and has_amx() and config.head_dim % chunk_amx.DEPTH == 0
        self._embed = parameters.pop("embed")
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self._embed.device, torch.float32)
        self._cache = cache.elements
        self._model = self._build(parameters, cache)
        self._buffers = Buffers()
        self._compile()

    def use_cores(self, lent: Cores) -> None:
        """See Runner.use_cores."""
        self.threads.use(lent)

    def forward(self, token_ids: Tensor, metadata: ForwardMetadata, groups: Iterable[tuple[int, int]]) -> Tensor:
        """See Decoder.forward. The result is valid until the next call."""
        num_tokens = token_ids.shape[0]
        acts = self._activations(num_tokens)
        residual = torch.from_numpy(acts.residual)
        torch.index_select(self._embed, 0, token_ids, out=residual)
        model = self._model
        rotation = self._rope.cos_sin(metadata.positions, metadata.rope_lengths)
        batch = Batch.of(metadata, model.shape.block_size, rotation)
        operands, cache = self._operands(num_tokens), self._cache
        scratch = [buffers.attention(model.shape, metadata, bf16=self._bf16) for buffers in self._thread_buffers]
        work = [
            Work(acts, operand, Attending(acts.queries, model.shape, batch, own), cache)
            for operand, own in zip(operands, scratch, strict=False)
        ]
        for layers in groups:
            self.threads.run(partial(_run_layers, model, work, layers))
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result."""
        # Written in whole panels; what is beyond the vocabulary is cut off.
        logits = torch.empty(hidden.shape[0], -(-self.config.vocab_size // PANEL) * PANEL)
        rows, out = hidden.contiguous().numpy(), logits.numpy()
        operands = self._operands(hidden.shape[0])
        self.threads.run(partial(_output_rows, self._model, rows, out, operands))
        return logits[:, : self.config.vocab_size]

    def _compile(self) -> None:
        """Compile now, or read what was compiled before, rather than while the first request waits: a step of one token
        that goes through no layer.
        """
        hidden = self.forward(torch.zeros(1, dtype=torch.int64), one_token(), [(0, 0)])
        summarise(self.logits(hidden).numpy())

    def _build(self, parameters: dict[str, Tensor], cache: KVCache) -> Model:
        config = self.config
        packer = Packer(_matrix_shapes(config), int8=self._int8)
        layers = [f"layers.{layer}" for layer in range(config.num_layers)]
        for index, name in enumerate(f"{layer}.{part}" for layer in layers for part in _PART_NAMES):
            packer.put(index, parameters.pop(name), parameters.pop(f"{name}_bias", None))
        packer.put(len(layers) * len(_PART_NAMES), self._embed if config.tied else parameters.pop("lm_head"), None)
        head_norms = np.empty((config.num_layers, 2 if config.qk_norm else 0, config.head_dim), np.float32)
        if config.qk_norm:
            for i, layer in enumerate(layers):
                head_norms[i, 0], head_norms[i, 1] = (
                    parameters.pop(f"{layer}.q_norm"),
                    parameters.pop(f"{layer}.k_norm"),
                )
        return Model(
            weights=packer.weights,
            input_norms=np.stack([parameters.pop(f"{layer}.input_norm").numpy() for layer in layers]),
            post_norms=np.stack([parameters.pop(f"{layer}.post_norm").numpy() for layer in layers]),
            final_norm=parameters.pop("final_norm").numpy(),
            head_norms=head_norms,
            windows=np.array([NO_WINDOW if window is None else window for window in config.windows], np.int64),
            eps=np.float32(config.norm_eps),
            shape=head_shape(AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim), cache.layer(0)),
        )

    def _activations(self, rows: int) -> Activations:
        config = self.config
        q_width = config.num_heads * config.head_dim
        qkv_width = q_width + 2 * config.num_kv_heads * config.head_dim
        qkv = self._buffers.get("qkv", (rows + TILE_ROWS) * qkv_width)
        mixed = self._buffers.get("mixed", rows * q_width)[: rows * q_width]
        inner = self._buffers.get("inner", rows * config.intermediate_size)
        residual = self._buffers.get("residual", rows * config.hidden_size)
        return Activations(
            residual=residual[: rows * config.hidden_size].reshape(rows, -1),
            inner=inner[: rows * config.intermediate_size].reshape(rows, -1),
            mixed=mixed.reshape(rows, -1),
            qkv=qkv[: rows * qkv_width].reshape(rows, -1),
            queries=Queries(qkv, qkv_width, mixed),
        )

    def _operands(self, rows: int) -> list[Operand]:
        """One for each thread: the same rows, sums of their own."""
        depth = int(self._model.weights.matrices[:, 2].max())
        a = self._buffers.get("a", (rows + TILE_ROWS) * depth, np.uint8 if self._int8 else np.float32)
        factors, amx = self._buffers.get("factors", rows), amx_shapes() if self._int8 else _NO_AMX
        kind = np.int32 if self._int8 else np.float32
        while len(self._thread_buffers) < self.threads.count:
            self._thread_buffers.append(Buffers())
        own = self._thread_buffers[: self.threads.count]
        return [Operand(a, factors, buffers.get("sums", 2 * TILE_ROWS * UNIT, kind), amx) for buffers in own]


def _run_layers(model: Model, work: list[Work], layers: tuple[int, int], team: Team) -> None:
    run_layers(model, work[team.thread], team, layers)


def _output_rows(model: Model, rows: Floats, out: Floats, operands: list[Operand], team: Team) -> None:
    output_rows(model, rows, out, operands[team.thread], team)


def _matrix_shapes(config: ModelConfig) -> list[MatrixShape]:
    q_width = config.num_heads * config.head_dim
    layer = [
        MatrixShape(q_width + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        MatrixShape(config.hidden_size, q_width),
        MatrixShape(2 * config.intermediate_size, config.hidden_size, gated=True),
        MatrixShape(config.hidden_size, config.intermediate_size),
    ]
    return layer * config.num_layers + [MatrixShape(config.vocab_size, config.hidden_size)]
