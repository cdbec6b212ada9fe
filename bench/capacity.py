"""Capacity maths: what a model needs, what a device gives, and what follows. Pure: no clock, no tensors, no I/O.

The model of time is the roofline (Williams et al. 2009): an operation takes as long as its arithmetic or its memory
traffic does, whichever is longer. A pass has two operations, because they scale differently: the linear layers, whose
weights are read once for all rows of the batch, and attention, whose KV belongs to one sequence each. They run one
after the other, so their times add up. Activations, norms, sampling and all overhead are left out: predictions are
bounds.

FLOPs count a multiplication and an addition as two. docs/capacity.md derives the formulas with an example.
"""

from dataclasses import dataclass
from math import prod

from engine.models.config import ModelConfig
from engine.models.parameters import parameter_specs

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Of one weight of a linear layer, scales left out."""
QUANTIZED = ("int8", "fp8", "int4")
"""Those that only linear layers have."""
_OUTSIDE_LAYERS = ("embed", "positions", "lm_head")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a decoder-only model counts here. Numbers of parameters: of the linear layers without the output matrix;
    of the embedding, and as many of the output matrix (the same ones if `tied`); and of all vectors together, with
    learned positions. All experts of a mixture count."""

    linear_params: int
    vocabulary_params: int
    vector_params: int
    tied: bool
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def params(self) -> int:
        """All parameters, each counted once."""
        return self.linear_params + self.vector_params + self.vocabulary_params * (1 if self.tied else 2)

    @property
    def step_params(self) -> int:
        """Parameters that every decode step reads and multiplies with: the linear layers and the output matrix."""
        return self.linear_params + self.vocabulary_params

    def kv_bytes_per_token(self, kv_dtype_bytes: float) -> float:
        """2 (keys, values) x layers x KV heads x head_dim x bytes. "Efficient Memory Management for LLM Serving with
        PagedAttention" (Kwon et al. 2023), section 3."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * kv_dtype_bytes

    def attention_flops(self, num_queries: float, context_tokens: float) -> float:
        """Scores and weighted sum, all layers: 2 x 2 x layers x heads x head_dim x queries x context."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * num_queries * context_tokens


def model_size(config: ModelConfig) -> ModelSize:
    """Count the parameters that the engine would load."""
    shapes = {spec.name: spec.shape for spec in parameter_specs(config)}
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    linear = sum(size for name, size in matrices.items() if name not in _OUTSIDE_LAYERS)
    vectors = sum(prod(shape) for shape in shapes.values() if len(shape) == 1) + matrices.get("positions", 0)
    return ModelSize(
        linear_params=linear,
        vocabulary_params=config.vocab_size * config.hidden_size,
        vector_params=vectors,
        tied=config.tied,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


@dataclass(frozen=True, slots=True)
class Precision:
    """What linear layers' weights are stored and multiplied in, and what everything else is: embedding, vectors, KV."""

    weights: str
    other: str

    @property
    def weight_bytes(self) -> float:
        """Of one weight of a linear layer."""
        return WEIGHT_BYTES[self.weights]

    @property
    def other_bytes(self) -> float:
        """Of one number of embedding, vectors and KV."""
        return WEIGHT_BYTES[self.other]


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device gives. `flops_per_s` is dense, at the precision in question; attention runs at
    `attention_flops_per_s`, which is that of the other numbers."""

    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A model in a precision on a device. `memory_share` is how much of the memory weights and KV may take together."""

    model: ModelSize
    precision: Precision
    device: DeviceRates
    memory_share: float = 0.9

    @property
    def weights_bytes(self) -> float:
        """Memory of all weights. A quantised model with a tied output matrix holds it twice: the embedding is looked up
        in full precision, and multiplied with as quantised."""
        model, precision = self.model, self.precision
        shared = model.tied and precision.weights == precision.other
        embedding = 0 if shared else model.vocabulary_params
        return model.step_params * precision.weight_bytes + (embedding + model.vector_params) * precision.other_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Memory of one token's keys and values in all layers."""
        return self.model.kv_bytes_per_token(self.precision.other_bytes)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; 0 if the weights alone do not fit."""
        free_bytes = self.device.memory_bytes * self.memory_share - self.weights_bytes
        return max(0, int(free_bytes // self.kv_bytes_per_token))

    def users(self, context_tokens: int) -> int:
        """Sequences of this length whose KV fits at a time."""
        return self.kv_tokens // context_tokens

    @property
    def critical_batch(self) -> float:
        """Rows at which the linear layers' arithmetic takes as long as reading their weights: below, rows are free.

        2 x params x batch / FLOPs = params x bytes / bandwidth. With 2-byte weights it is FLOPs / bandwidth.
        """
        device = self.device
        return device.flops_per_s * self.precision.weight_bytes / (2 * device.bandwidth_bytes_per_s)

    def prefill_flops(self, input_tokens: int) -> float:
        """Of one prompt: its tokens through the linear layers, causal attention, and one row of logits."""
        return self._prompt_linear_flops(input_tokens) + self._prompt_attention_flops(input_tokens)

    def prefill_bytes(self, input_tokens: int) -> float:
        """Of one prompt: the weights once, its KV written and read once."""
        return self.model.step_params * self.precision.weight_bytes + 2 * input_tokens * self.kv_bytes_per_token

    def prefill_s(self, input_tokens: int) -> float:
        """To compute one prompt alone."""
        linear_s = self._linear_s(self._prompt_linear_flops(input_tokens))
        kv_bytes = 2 * input_tokens * self.kv_bytes_per_token
        return linear_s + self._attention_s(self._prompt_attention_flops(input_tokens), kv_bytes)

    def prefill_tokens_per_s(self, input_tokens: int) -> float:
        """Prompt tokens computed each second, prompt after prompt."""
        return input_tokens / self.prefill_s(input_tokens)

    def decode_flops(self, batch: int, context_tokens: float) -> float:
        """Of one step."""
        return 2 * self.model.step_params * batch + self.model.attention_flops(batch, context_tokens)

    def decode_bytes(self, batch: int, context_tokens: float) -> float:
        """Of one step: the weights once, and each sequence's KV."""
        kv_bytes = batch * context_tokens * self.kv_bytes_per_token
        return self.model.step_params * self.precision.weight_bytes + kv_bytes

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        """One token for each of `batch` sequences that have `context_tokens` tokens of KV."""
        linear_s = self._linear_s(2 * self.model.step_params * batch)
        kv_bytes = batch * context_tokens * self.kv_bytes_per_token
        return linear_s + self._attention_s(self.model.attention_flops(batch, context_tokens), kv_bytes)

    def decode_tokens_per_s(self, batch: int, context_tokens: float) -> float:
        """Of all sequences together."""
        return batch / self.decode_step_s(batch, context_tokens)

    def prefill_intensity(self, input_tokens: int) -> float:
        """FLOPs for each byte moved: above FLOPs / bandwidth of the device, arithmetic is the bound."""
        return self.prefill_flops(input_tokens) / self.prefill_bytes(input_tokens)

    def decode_intensity(self, batch: int, context_tokens: float) -> float:
        """FLOPs for each byte moved in one step."""
        return self.decode_flops(batch, context_tokens) / self.decode_bytes(batch, context_tokens)

    def transfer_s(self, input_tokens: int, link_bytes_per_s: float) -> float:
        """To move a prompt's KV over a link, nothing hidden behind computing."""
        return input_tokens * self.kv_bytes_per_token / link_bytes_per_s

    def _prompt_linear_flops(self, input_tokens: int) -> float:
        return 2 * (self.model.linear_params * input_tokens + self.model.vocabulary_params)

    def _prompt_attention_flops(self, input_tokens: int) -> float:
        """A token attends to those before it: on average to half of them."""
        return self.model.attention_flops(input_tokens, input_tokens / 2)

    def _linear_s(self, flops: float) -> float:
        read_s = self.model.step_params * self.precision.weight_bytes / self.device.bandwidth_bytes_per_s
        return max(flops / self.device.flops_per_s, read_s)

    def _attention_s(self, flops: float, kv_bytes: float) -> float:
        return max(flops / self.device.attention_flops_per_s, kv_bytes / self.device.bandwidth_bytes_per_s)
