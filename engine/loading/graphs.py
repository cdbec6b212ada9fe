"""Captures a model's decode steps at load, and says how much memory that takes: the KV cache is sized before."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.attention.triton_paged import FEW_QUERIES
from engine.decode_graphs import Capture, CudaCapture, DecodeBuffers, DecodeGraphs, StepShape, step_shapes
from engine.kv.budget import gib
from engine.kv.cache import KVCache
from engine.loading.activation_memory import row_numbers
from engine.memory import device_memory
from engine.model import LayerGroups
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

if TYPE_CHECKING:
    from engine.models.decoder import Decoder

log = structlog.get_logger(__name__)

# Attention that reads the lengths of sequences on the device, and no further than these.
_CAPTURED_ATTENTION = ("flash", "triton")
_CAPTURES: Mapping[str, Callable[[torch.device], Capture]] = MappingProxyType({"cuda": CudaCapture})
"""By type of device. On CPU the host adds up what gloo sums for ranks: no graph could repeat that."""
# Priors, not measured yet: what the driver keeps of a graph; workspaces of libraries, and partial results of attention.
_GRAPH_BYTES = 16 << 20
_WORKSPACE_BYTES = 128 << 20


def why_no_graphs(settings: RunnerSettings, config: AnyConfig) -> str | None:
    """The reason why decode steps are not captured, or None if they are, if attention allows it."""
    if torch.device(settings.device).type not in _CAPTURES:
        return f"graphs are for cuda, not {settings.device}"
    if not settings.graphs.sizes:
        return "cuda_graphs is 0, enforce_eager is set, or this worker computes prompts only"
    if settings.degrees.pipeline > 1:
        return "the host hands residuals over from stage to stage"
    if isinstance(config, EncoderDecoderConfig):
        return "encoder-decoder models read lengths on the host"
    if config.windows_are_chunks:
        return "chunks of attention are found on the host"
    return None if config.recurrent is None else "recurrent states are found on the host"


def graph_bytes(settings: RunnerSettings, config: AnyConfig, layout: KVLayout) -> int:
    """Memory that graphs will take, roughly, with the spare block; 0 without any. Activations of the largest step serve
    all others.
    """
    if why_no_graphs(settings, config) is not None or isinstance(config, EncoderDecoderConfig):
        return 0
    shapes = graph_shapes(settings)
    kept_numbers = sum(shape.num_rows for shape in shapes) * config.residual_width
    numbers = shapes[0].num_rows * row_numbers(config, experts_on_device=True) + kept_numbers
    tables = 2 * shapes[0].num_seqs * _max_blocks(settings) * layout.groups.count * torch.int32.itemsize
    activations = numbers * int(getattr(torch, settings.dtype).itemsize)
    return activations + tables + len(shapes) * _GRAPH_BYTES + _WORKSPACE_BYTES + layout.block_bytes


def load_graphs(settings: RunnerSettings, model: "Decoder", cache: KVCache) -> DecodeGraphs | None:
    """Capture the decode steps of a model that has one rank; None where they are not captured. The cache has a spare
    block. Raises ConfigurationError.
    """
    if not can_capture(settings, model):
        return None
    try:
        return capture_graphs(settings, model, cache, capture_for(cache.tensor.device))
    except RuntimeError as error:
        raise ConfigurationError(
            f"decode steps cannot be captured as CUDA graphs, set cuda_graphs=0: {error}"
        ) from error


def can_capture(settings: RunnerSettings, model: "Decoder") -> bool:
    """False if `why_not_captured` has a reason. It is logged where other models would be captured."""
    reason = why_not_captured(settings, model)
    if reason is not None and torch.device(settings.device).type in _CAPTURES:
        log.info("decode steps not captured", reason=reason)
    return reason is None


def why_not_captured(settings: RunnerSettings, model: "Decoder") -> str | None:
    """As `why_no_graphs`, once attention is known."""
    if reason := why_no_graphs(settings, model.config):
        return reason
    if model.attention_backend not in _CAPTURED_ATTENTION:
        return f"attention backend {model.attention_backend} reads lengths on the host"
    reason = model.why_experts_on_host
    return reason and f"experts are selected on the host: {reason}"


def capture_for(device: torch.device) -> Capture:
    return _CAPTURES[device.type](device)


def capture_graphs(settings: RunnerSettings, model: "Decoder", cache: KVCache, capture: Capture) -> DecodeGraphs:
    """Capture the model's decode steps; see DecodeGraphs. The cache has a spare block. Raises RuntimeError."""
    device, shapes, started_s = cache.tensor.device, graph_shapes(settings), time.monotonic()
    free_bytes = device_memory(device).free_bytes
    buffers = DecodeBuffers(shapes[0], _max_blocks(settings), cache.layout.groups, cache.num_blocks, device)
    sizes, max_drafts = settings.graphs.sizes, _max_drafts(settings)
    graphs = DecodeGraphs(partial(_all_layers, model), buffers, sizes, capture, max_drafts)
    log.info(
        "decode steps captured",
        sizes=sizes,
        drafts=max_drafts,
        seconds=round(time.monotonic() - started_s, 2),
        memory=gib(free_bytes - device_memory(device).free_bytes),
        counted=gib(graph_bytes(settings, model.config, cache.layout)),
    )
    return graphs


def graph_shapes(settings: RunnerSettings) -> list[StepShape]:
    """The steps that are captured, in this order."""
    return step_shapes(settings.graphs.sizes, _max_drafts(settings))


def _all_layers(model: "Decoder", token_ids: Tensor, metadata: ForwardMetadata) -> Tensor:
    num_layers = model.config.num_layers
    return model.run_layers(token_ids, metadata, LayerGroups(num_layers, num_layers))


def _max_drafts(settings: RunnerSettings) -> int:
    """Attention computes more of them in another way."""
    return min(settings.graphs.max_drafts, FEW_QUERIES - 1)


def _max_blocks(settings: RunnerSettings) -> int:
    """Blocks of the longest sequence."""
    return -(-settings.graphs.max_tokens // settings.block_size) + 1
