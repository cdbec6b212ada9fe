"""Memory and cores of each rank of a worker (docs/parallel.md), by formula.

A rank holds what `engine.models.share` gives it: in each stage of a pipeline some layers, of them some heads and a part
of every matrix. Embedding and output matrix belong to the first stage. Scales and padding are left out, as in
`roofline.py`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from engine.loading.memory_needs import kept_in_int4
from engine.loading.resolve import is_in_steps, keeps_output, kv_layout, resolve, why_eager
from engine.models.cpu_support import why_not_compiled
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encodings import OUTPUT
from engine.models.model_config import ModelConfig
from engine.models.parameters import ParameterSpec, parameter_specs
from engine.models.read_config import load_config
from engine.models.share import Cut, RankShare, rank_share, require_own_heads, share_specs
from engine.quantized_formats.config import read_quantization
from engine.runner_settings import RunnerSettings
from engine.settings import MATRIX_ENCODINGS
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees, KVLayout, Span
from tandem_cli.capacity.roofline import BLOCK_SIZE, QUANTIZED, STEP_BYTES, WEIGHT_BYTES, Precision


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank. `cores`: its own ones; 0 if all ranks share fewer cores than ranks, None on a GPU."""

    rank: int
    layers: Span
    heads: Span
    weights_bytes: float
    kv_bytes_per_token: float
    cores: int | None
    adapter_bytes: float

    def to_json(self) -> dict[str, Any]:
        """All members for JSON. Layers and KV heads are [first, end)."""
        spans = {name: [span.first, span.end] for name, span in (("layers", self.layers), ("heads", self.heads))}
        return asdict(self) | spans


def rank_memory(
    config: ModelConfig, precision: Precision, degrees: Degrees, num_cores: int | None, adapter_bytes: float = 0.0
) -> list[RankMemory]:
    """The memory of each rank of a worker with `num_cores` cores; None: each rank has a GPU. Its adapters take
    `adapter_bytes` in all ranks. Raises ConfigurationError for degrees that the engine refuses.
    """
    if num_cores is not None:
        require_own_heads(config, degrees)
    cut: Cut = "inputs" if num_cores is None else _cut(config, precision, degrees)
    specs = parameter_specs(config)
    ranks: list[RankMemory] = []
    for rank in range(degrees.num_ranks):
        share = rank_share(config, rank, degrees)
        kv_layers = config.num_kv_layers_before(share.layers.end) - config.num_kv_layers_before(share.layers.first)
        row_bytes = config.head_dim * precision.kv_bytes + precision.kv_scale_bytes
        kv_bytes = config.kv_planes * kv_layers * share.heads.count * row_bytes
        cores = None if num_cores is None else _cores(rank, degrees.num_ranks, num_cores)
        weights_bytes = _weights_bytes(share_specs(specs, config, share, cut), config, share, precision, cut)
        of_adapters = adapter_bytes / degrees.tensor * share.layers.count / config.num_layers
        ranks.append(RankMemory(rank, share.layers, share.heads, weights_bytes, kv_bytes, cores, of_adapters))
    return ranks


def precision_of(settings: RunnerSettings, config: AnyConfig) -> Precision:
    """The precision of a runner whose settings are resolved (`engine.loading.resolve.resolve`)."""
    layout = kv_layout(config, settings)
    is_compiled = isinstance(config, ModelConfig) and why_eager(settings, config, layout) is None
    inputs = "" if is_compiled else config.dtype  # the eager decoder has that table as the checkpoint
    if settings.quantize == "none":
        return Precision(settings.dtype, settings.dtype, layout.dtype, is_packed=is_compiled, inputs=inputs)
    # The compiled decoder keeps an embedding of two bytes a number beside quantised matrices.
    embedding = config.dtype if is_compiled else ""
    precision = Precision(settings.quantize, settings.dtype, layout.dtype, embedding, is_compiled, inputs=inputs)
    if keeps_output(settings):
        precision = replace(precision, output=embedding or settings.dtype)
    has_steps = settings.quantize == "int4" and is_in_steps(settings, config)
    group_bytes = STEP_BYTES if has_steps else precision.group_bytes
    if settings.quantize == "int4" and not has_steps and isinstance(config, ModelConfig):
        group_bytes = _group_bytes(settings, config, precision.group)
    return replace(precision, group_bytes=group_bytes)


def _group_bytes(settings: RunnerSettings, config: ModelConfig, group: int) -> float:
    """Bytes of so many weights beside their 4 bits, on the average: a checkpoint may have matrices of more bits."""
    matrices = [spec for spec in parameter_specs(config) if spec.is_matrix and spec.name != OUTPUT]
    stored = kept_in_int4(settings, matrices)
    sizes = {spec.name: prod(spec.shape) for spec in matrices}
    num_bytes = sum(stored.int4_bytes(name) * size for name, size in sizes.items())
    return (num_bytes / sum(sizes.values()) - WEIGHT_BYTES["int4"]) * group


def precisions_here(settings: RunnerSettings) -> tuple[list[Precision], dict[str, str]]:
    """The precisions that a worker of this machine could have, and the types of weights that it refuses, with the
    reasons. `settings`: those of a worker that quantises nothing.
    """
    found: list[Precision] = []
    refused: dict[str, str] = {}
    dtypes = [replace(settings, dtype=dtype) for dtype in ("float32", "bfloat16")]
    for wanted in (*dtypes, *(replace(settings, dtype="auto", quantize=name) for name in QUANTIZED)):
        try:
            found.append(precision_of(*resolve(wanted)))
        except ConfigurationError as error:
            refused[wanted.dtype if wanted.quantize == "none" else wanted.quantize] = str(error)
    return found, refused


def fitting_degrees(model_dir: Path, quantize: str, num_cores: int) -> list[int]:
    """Degrees above 1 to compare on `num_cores` cores: powers of two, and the largest that fits. Raises
    ConfigurationError if none fits.
    """
    config = load_config(model_dir)
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError("tensor_parallel 2 does not fit an encoder-decoder model: use 1")
    max_ranks = min(num_cores, config.num_kv_heads)
    if max_ranks < 2:
        raise ConfigurationError(
            f"no tensor_parallel above 1 fits {num_cores} cores and {config.num_kv_heads} KV heads of the model"
        )
    quantization = read_quantization(model_dir)
    encoding = "int8" if quantization is not None and quantization.is_w8a8 else quantize
    weights, embedding = ("float32", "") if encoding == "none" else (encoding, config.dtype)
    precision = Precision(weights, "float32", embedding=embedding)
    rank_memory(config, precision, Degrees(max_ranks), num_cores)
    powers = itertools.takewhile(lambda degree: degree <= max_ranks, (2**exponent for exponent in itertools.count(1)))
    return sorted({*powers, max_ranks})


def _cut(config: ModelConfig, precision: Precision, degrees: Degrees) -> Cut:
    """How the ranks of this machine cut matrices. Raises ConfigurationError if they cannot."""
    layout = KVLayout("", config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, precision.kv)
    encoding = precision.weights if precision.weights in MATRIX_ENCODINGS else None
    reason = f"{precision.other} beside {encoding}" if encoding is not None and precision.other != "float32" else None
    reason = reason or why_not_compiled(config, layout, degrees.num_ranks)
    if reason is None:
        return "outputs"
    if encoding is not None and degrees.tensor > 1:
        raise ConfigurationError(
            f"tensor_parallel {degrees.tensor} in {encoding} needs the compiled decoder, which cannot run here "
            f"({reason}): use 1"
        )
    return "inputs"


def total(ranks: Sequence[RankMemory]) -> tuple[float, float]:
    """Bytes of the weights, and of KV per token, of all ranks together."""
    return sum(rank.weights_bytes for rank in ranks), sum(rank.kv_bytes_per_token for rank in ranks)


def _weights_bytes(
    specs: Sequence[ParameterSpec], config: ModelConfig, share: RankShare, precision: Precision, cut: Cut
) -> float:
    num_bytes = 0.0
    for spec in (spec for spec in specs if spec.is_held):
        # Other ranks than 0 hold their rows of a tied embedding as a part of the output matrix.
        is_output = spec.name == "embed" and cut == "outputs" and share.rank > 0
        tables = {"embed": precision.embedding_bytes, "layer_inputs": precision.input_bytes}
        itemsize = tables.get(spec.name, precision.other_bytes)
        if is_output or spec.name == OUTPUT:
            itemsize = precision.output_bytes
        elif spec.is_matrix:
            itemsize = precision.weight_bytes
        num_bytes += prod(spec.held_shape) * itemsize
    if cut == "outputs" and share.rank == 0 and config.tied:
        num_bytes += share.vocab.count * config.embed_width * precision.output_bytes
    return num_bytes


def _cores(rank: int, num_ranks: int, num_cores: int) -> int:
    """The cores of one rank, as engine.ranks.launch divides them."""
    if num_cores < num_ranks:
        return 0
    return num_cores * (rank + 1) // num_ranks - num_cores * rank // num_ranks
