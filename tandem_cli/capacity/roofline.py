"""Memory and time that a model needs on a device, by formula, and well-known devices. Pure: no clock, tensors or I/O.

The time model is the roofline (Williams et al. 2009): an operation takes as long as its arithmetic or its memory
traffic, whichever is longer. A pass consists of two operations that scale differently: the linear layers, whose
weights are read once for all rows of the batch, and attention, which reads the KV of every sequence. They run one
after the other, so their times add up. Activations, norms, sampling and overhead are ignored: predictions are lower
bounds of the time.

FLOPs count a multiplication and an addition as two. docs/capacity.md derives the formulas with an example. Memory,
bandwidth and dense arithmetic of devices are those that their vendors state. Rates with sparsity, which are twice as
high on paper, are not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from engine.settings import QUANTIZATIONS
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import SCALE_BYTES
from tandem_cli.capacity.model_size import ModelSize

BLOCK_SIZE = 16  # tokens of a KV block: the default of workers
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per weight of a linear layer, without scales."""
_PACKED_OUTPUT = {"int4": "int8"}
_GROUP, _GROUP_BYTES = 32, 3
"""In int4 each group of weights has a scale and a zero; a quantised checkpoint may have other groups."""
STEP_BYTES = 2
"""Bytes of a group's step of int8 and low end."""
QUANTIZED = (*(name for name in QUANTIZATIONS if name != "none"), "fp8")
"""Types that only the weights of linear layers can have: those of this engine, and those of others."""
_MAX_ITERATIONS = 50  # of a fixed-point iteration with shrinking steps
_SAME_RATE = {"float16": "bfloat16"}
_T = 1e12
_HOPPER = {"float32": 66.9 * _T, "bfloat16": 989.4 * _T, "fp8": 1978.9 * _T, "int8": 1978.9 * _T}
_A100 = {"float32": 19.5 * _T, "bfloat16": 312 * _T, "int8": 624 * _T}
_MI300 = {"float32": 163.4 * _T, "bfloat16": 1307.4 * _T, "fp8": 2614.9 * _T, "int8": 2614.9 * _T}
_A100_SHEET = "NVIDIA A100 datasheet"
_H100_SHEET = "NVIDIA H100 datasheet"
_HALF_OF_SPARSE = "half of its figures with sparsity"


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights` is the type of the linear layers; `other` is the type of vectors, and of KV and embedding unless `kv`
    and `embedding` are others; `inputs` is that of the table of layers' inputs, by default the embedding's.

    `is_packed`: as the compiled decoder of this engine has them. It holds a tied output matrix beside the embedding, in
    int8 if weights are int4, and these have `group_bytes` beside each group of `group` inputs. `output`: the type of
    the output matrix, if it is another.
    """

    weights: str
    other: str
    kv: str = ""
    embedding: str = ""
    is_packed: bool = False
    group: int = _GROUP
    group_bytes: float = _GROUP_BYTES
    inputs: str = ""
    output: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", self.kv or self.other)
        object.__setattr__(self, "embedding", self.embedding or self.other)
        object.__setattr__(self, "inputs", self.inputs or self.embedding)

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of a linear layer."""
        has_groups = self.is_packed and self.weights == "int4"
        return WEIGHT_BYTES[self.weights] + (self.group_bytes / self.group if has_groups else 0)

    @property
    def output_bytes(self) -> float:
        """Bytes per number of the output matrix."""
        if self.output:
            return WEIGHT_BYTES[self.output]
        return WEIGHT_BYTES[_PACKED_OUTPUT.get(self.weights, self.weights) if self.is_packed else self.weights]

    @property
    def other_bytes(self) -> float:
        """Bytes per number of vectors."""
        return WEIGHT_BYTES[self.other]

    @property
    def embedding_bytes(self) -> float:
        """Bytes per number of the embedding."""
        return WEIGHT_BYTES[self.embedding]

    @property
    def input_bytes(self) -> float:
        """Bytes per number of the table of layers' inputs."""
        return WEIGHT_BYTES[self.inputs]

    @property
    def kv_bytes(self) -> float:
        """Bytes per number of KV."""
        return WEIGHT_BYTES[self.kv]

    @property
    def kv_scale_bytes(self) -> int:
        """Bytes beside a row of KV, one head of one token."""
        return SCALE_BYTES if self.kv == "int8" else 0

    @property
    def attention(self) -> str:
        """The type that attention multiplies: that of KV, but KV in fp8 is widened."""
        return self.other if self.kv == "fp8" else self.kv


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Memory and speed of a device at one precision. `flops_per_s` is the dense rate of the linear layers;
    `attention_flops_per_s` is that of attention."""

    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A model in a precision on a device. `memory_share` is the share of the memory for weights and KV, and for LoRA
    adapters of `adapter_bytes`.
    """

    model: ModelSize
    precision: Precision
    device: DeviceRates
    memory_share: float = 0.9
    adapter_bytes: float = 0.0

    @property
    def weights_bytes(self) -> float:
        """Memory of all weights. A quantised model with a tied output matrix holds that matrix twice: in full precision
        for the embedding, and quantised for the logits."""
        model, precision = self.model, self.precision
        shared = model.tied and precision.weights == precision.embedding and not precision.is_packed
        tables_bytes = model.input_params * precision.input_bytes
        tables_bytes += 0 if shared else model.vocabulary_params * precision.embedding_bytes
        return self._matrices_bytes(model.step_params) + tables_bytes + model.vector_params * precision.other_bytes

    def _matrices_bytes(self, params: float) -> float:
        """Bytes of `params` parameters of matrices, which include the output matrix."""
        precision, of_output = self.precision, self.model.vocabulary_params
        return (params - of_output) * precision.weight_bytes + of_output * precision.output_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Memory of one token's keys and values in all layers."""
        return self.model.kv_bytes_per_token(self.precision.kv_bytes, self.precision.kv_scale_bytes)

    @property
    def state_blocks(self) -> int:
        """KV blocks of a sequence's recurrent state (engine/models/recurrent/rows.py, but for odd rows)."""
        return ceil(self.model.state_bytes / (BLOCK_SIZE * self.kv_bytes_per_token))

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks, of all layers or of groups of them, that fit beside weights and adapters."""
        share = self.model.kv_group_layers / self.model.num_kv_layers if self.model.kv_windows else 1
        return max(0, int(self._bytes_for_kv // (BLOCK_SIZE * self.kv_bytes_per_token * share)))

    @property
    def kv_tokens(self) -> int:
        """Tokens of one sequence whose KV fits beside weights and adapters; 0 if these, or its state, do not fit."""
        return max(0, int(self._bytes_for_kv // self.kv_bytes_per_token) - self.state_blocks * BLOCK_SIZE)

    def fits(self, num_sequences: int, tokens: int) -> bool:
        """True if the weights and the KV of `num_sequences` sequences of `tokens` tokens fit into memory."""
        return self._bytes_for_kv >= num_sequences * self.sequence_bytes(tokens)

    @property
    def _bytes_for_kv(self) -> float:
        return self.device.memory_bytes * self.memory_share - self.weights_bytes - self.adapter_bytes

    def users(self, context_tokens: int) -> int:
        """Number of sequences of `context_tokens` tokens whose KV fits at a time."""
        return max(0, int(self._bytes_for_kv // self.sequence_bytes(context_tokens)))

    def sequence_bytes(self, tokens: float) -> float:
        """Memory of a sequence of `tokens` tokens: its KV and its recurrent states."""
        held_tokens = self.model.held_tokens(tokens) + self.state_blocks * BLOCK_SIZE
        return held_tokens * self.kv_bytes_per_token

    @property
    def critical_batch(self) -> float:
        """The batch at which the arithmetic of the linear layers takes as long as reading their weights.

        2 x active params x batch / FLOPs = params read x bytes / bandwidth. Without experts, further rows below it cost
        no time, and with 2-byte weights it is FLOPs / bandwidth. With experts, a larger batch reads more experts.
        """
        model, device = self.model, self.device
        per_param = device.flops_per_s * self.precision.weight_bytes / (2 * device.bandwidth_bytes_per_s)
        batch = per_param * model.step_params / model.active_params
        for _ in range(_MAX_ITERATIONS):
            batch = per_param * model.read_params(batch) / model.active_params
        return batch

    def prefill_flops(self, input_tokens: int) -> float:
        """FLOPs of one prompt: linear layers for all tokens, causal attention, and one row of logits."""
        return self._prompt_linear_flops(input_tokens) + self._prompt_attention_flops(input_tokens)

    def prefill_bytes(self, input_tokens: int) -> float:
        """Bytes moved for one prompt: the weights once, and its KV written and read once."""
        weights_bytes = self._matrices_bytes(self.model.read_params(input_tokens))
        return weights_bytes + 2 * input_tokens * self.kv_bytes_per_token

    def prefill_s(self, input_tokens: int) -> float:
        """Seconds to compute one prompt alone."""
        linear_s = self._linear_s(self._prompt_linear_flops(input_tokens), input_tokens)
        kv_bytes = 2 * input_tokens * self.kv_bytes_per_token
        return linear_s + self._attention_s(self._prompt_attention_flops(input_tokens), kv_bytes)

    def prefill_tokens_per_s(self, input_tokens: int) -> float:
        """Prompt tokens per second, computed one prompt after the other."""
        return input_tokens / self.prefill_s(input_tokens)

    def decode_flops(self, batch: int, context_tokens: float) -> float:
        """FLOPs of one step for `batch` sequences with `context_tokens` tokens of KV each."""
        return 2 * self.model.active_params * batch + self.model.attention_flops(batch, context_tokens)

    def decode_bytes(self, batch: int, context_tokens: float) -> float:
        """Bytes moved in one step: the weights once, the KV of each sequence, and its recurrent states."""
        kv_bytes = batch * self._moved_bytes(context_tokens)
        return self._matrices_bytes(self.model.read_params(batch)) + kv_bytes

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        """Seconds of one step for `batch` sequences with `context_tokens` tokens of KV each."""
        linear_s = self._linear_s(2 * self.model.active_params * batch, batch)
        kv_bytes = batch * self._moved_bytes(context_tokens)
        return linear_s + self._attention_s(self.model.attention_flops(batch, context_tokens), kv_bytes)

    def _moved_bytes(self, context_tokens: float) -> float:
        """Bytes that a step moves for one sequence. A recurrent state is read and written."""
        return context_tokens * self.kv_bytes_per_token + 2 * self.model.state_bytes

    def decode_tokens_per_s(self, batch: int, context_tokens: float) -> float:
        """Tokens per second of all sequences together."""
        return batch / self.decode_step_s(batch, context_tokens)

    def prefill_intensity(self, input_tokens: int) -> float:
        """FLOPs per byte moved. Arithmetic is the limit above FLOPs / bandwidth of the device."""
        return self.prefill_flops(input_tokens) / self.prefill_bytes(input_tokens)

    def decode_intensity(self, batch: int, context_tokens: float) -> float:
        """FLOPs per byte moved in one step."""
        return self.decode_flops(batch, context_tokens) / self.decode_bytes(batch, context_tokens)

    def transfer_s(self, input_tokens: int, link_bytes_per_s: float) -> float:
        """Seconds to move the KV of a prompt over a link, without overlap with computing."""
        return self.sequence_bytes(input_tokens) / link_bytes_per_s

    def _prompt_linear_flops(self, input_tokens: int) -> float:
        """FLOPs of all layers for all tokens, as is usual. The compiled decoder leaves some out (result_rows.py)."""
        return 2 * (self.model.active_linear_params * input_tokens + self.model.vocabulary_params)

    def _prompt_attention_flops(self, input_tokens: int) -> float:
        """A token attends to the tokens before it, on average to half of the prompt."""
        return self.model.attention_flops(input_tokens, input_tokens / 2)

    def _linear_s(self, flops: float, num_rows: float) -> float:
        read_s = self._matrices_bytes(self.model.read_params(num_rows)) / self.device.bandwidth_bytes_per_s
        return max(flops / self.device.flops_per_s, read_s)

    def _attention_s(self, flops: float, kv_bytes: float) -> float:
        return max(flops / self.device.attention_flops_per_s, kv_bytes / self.device.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops_per_s` has the rate per type of the operands; `source` names the origin of the figures."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def rates(self, precision: Precision) -> DeviceRates:
        """The rates for `precision`. Weights of a type without arithmetic on this device (such as int4) are multiplied
        at the type of attention. Raises ConfigurationError if the rate of that type is unknown.
        """
        attention = self._rate(precision.attention)
        if attention is None:
            types = ", ".join(self.flops_per_s)
            raise ConfigurationError(f"no rate for {precision.attention} on {self.name}: choose a --dtype of {types}")
        weights = self._rate(precision.weights) or attention
        return DeviceRates(self.memory_bytes, self.bandwidth_bytes_per_s, weights, attention)

    def times(self, count: int) -> "Device":
        """`count` of these devices as one, without any loss between them."""
        rates = {dtype: count * rate for dtype, rate in self.flops_per_s.items()}
        memory_bytes, bandwidth = count * self.memory_bytes, count * self.bandwidth_bytes_per_s
        return Device(f"{count} x {self.name}", memory_bytes, bandwidth, rates, self.source)

    def _rate(self, dtype: str) -> float | None:
        return self.flops_per_s.get(dtype) or self.flops_per_s.get(_SAME_RATE.get(dtype, ""))


def _rates(float32: float, bfloat16: float, int8: float, fp8: float | None = None) -> Mapping[str, float]:
    """Rates by type; the arguments are in TFLOP/s."""
    rates = {"float32": float32 * _T, "bfloat16": bfloat16 * _T, "int8": int8 * _T}
    return rates if fp8 is None else rates | {"fp8": fp8 * _T}


DEVICES: Mapping[str, Device] = {
    "h100-sxm": Device("H100 SXM", 80e9, 3.35e12, _HOPPER, _H100_SHEET),
    "h100-pcie": Device("H100 PCIe", 80e9, 2.0e12, _rates(51, 756, 1513, 1513), _H100_SHEET),
    "h100-nvl": Device("H100 NVL", 94e9, 3.9e12, _rates(60, 835, 1671, 1671), f"{_H100_SHEET} ({_HALF_OF_SPARSE})"),
    "h200": Device("H200", 141e9, 4.8e12, _HOPPER, "NVIDIA H200 datasheet"),
    "b200": Device(
        "B200", 180e9, 8e12, _rates(75, 2250, 4500, 4500), f"NVIDIA HGX B200 datasheet, an eighth ({_HALF_OF_SPARSE})"
    ),
    "a100-80gb": Device("A100 80GB SXM", 80e9, 2.039e12, _A100, _A100_SHEET),
    "a100-80gb-pcie": Device("A100 80GB PCIe", 80e9, 1.935e12, _A100, _A100_SHEET),
    "a100-40gb": Device("A100 40GB", 40e9, 1.555e12, _A100, _A100_SHEET),
    "a10": Device("A10", 24e9, 0.6e12, _rates(31.2, 125, 250), "NVIDIA A10 datasheet"),
    "a10g": Device("A10G", 24e9, 0.6e12, _rates(35, 70, 140), "NVIDIA A10G datasheet"),
    "l4": Device("L4", 24e9, 0.3e12, _rates(30.3, 121, 242.5, 242.5), f"NVIDIA L4 datasheet ({_HALF_OF_SPARSE})"),
    "l40s": Device("L40S", 48e9, 0.864e12, _rates(91.6, 362.05, 733, 733), "NVIDIA L40S datasheet"),
    "t4": Device(
        "T4", 16e9, 0.32e12, {"float32": 8.1 * _T, "float16": 65 * _T, "int8": 130 * _T}, "NVIDIA T4 datasheet"
    ),
    "v100": Device(
        "V100 SXM2 32GB", 32e9, 0.9e12, {"float32": 15.7 * _T, "float16": 125 * _T}, "NVIDIA V100 datasheet"
    ),
    "rtx-4090": Device(
        "RTX 4090", 24e9, 1.008e12, _rates(82.6, 165.2, 660.6, 330.3), "NVIDIA Ada architecture whitepaper"
    ),
    "mi300x": Device("MI300X", 192e9, 5.3e12, _MI300, "AMD Instinct MI300X data sheet"),
    "mi325x": Device("MI325X", 256e9, 6e12, _MI300, "AMD Instinct MI325X data sheet"),
}


def find_device(name: str) -> Device:
    """Look up a device by name. Raises ConfigurationError with a list of the known devices."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    if key not in DEVICES:
        close = [device for device in DEVICES if device.startswith(key)]
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigurationError(f"unknown device {name!r}{hint}; known devices: here, {', '.join(DEVICES)}")
    return DEVICES[key]
