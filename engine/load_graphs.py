"""Captures a model's decode steps at load, and says how much memory that takes: the KV cache is sized before."""

import time

import structlog
import torch

from engine.attention.triton_paged import FEW_QUERIES
from engine.decode_graphs import Capture, CudaCapture, DecodeBuffers, DecodeGraphs, step_shapes
from engine.kv_cache import KVCache
from engine.kv_memory import gib
from engine.model import Model
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.runner_settings import RunnerSettings
from engine.step_memory import row_numbers
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

log = structlog.get_logger(__name__)

# Attention that reads the lengths of sequences on the device, and no further than these.
_CAPTURED_ATTENTION = ("flash", "triton")
# Priors, not measured yet: what the driver keeps of a graph; workspaces of libraries, and partial results of attention.
_GRAPH_BYTES = 16 << 20
_WORKSPACE_BYTES = 128 << 20


def why_no_graphs(settings: RunnerSettings, config: AnyConfig) -> str | None:
    """The reason why decode steps are not captured, or None if they are, if attention allows it."""
    if torch.device(settings.device).type != "cuda":
        return f"graphs are for cuda, not {settings.device}"
    if settings.enforce_eager:
        return "enforce_eager is set"
    if not settings.graphs.sizes:
        return "cuda_graphs is 0, or this worker computes prompts only"
    if settings.degrees.num_ranks > 1:
        return f"{settings.degrees} ranks"
    if isinstance(config, EncoderDecoderConfig):
        return "encoder-decoder models read lengths on the host"
    return None if config.experts is None else "experts are selected on the host"


def graph_bytes(settings: RunnerSettings, config: AnyConfig, layout: KVLayout) -> int:
    """Memory that graphs will take, roughly, with the spare block; 0 without any. Activations of the largest step serve
    all others.
    """
    if why_no_graphs(settings, config) is not None or isinstance(config, EncoderDecoderConfig):
        return 0
    shapes = step_shapes(settings.graphs.sizes, _max_drafts(settings))
    kept_numbers = sum(shape.num_rows for shape in shapes) * config.hidden_size
    numbers = shapes[0].num_rows * row_numbers(config) + kept_numbers
    tables = 2 * shapes[0].num_seqs * _max_blocks(settings) * torch.int32.itemsize
    activations = numbers * int(getattr(torch, settings.dtype).itemsize)
    return activations + tables + len(shapes) * _GRAPH_BYTES + _WORKSPACE_BYTES + layout.block_bytes


def load_graphs(settings: RunnerSettings, model: Model, cache: KVCache) -> DecodeGraphs | None:
    """Capture the model's decode steps on a GPU; None where they are not captured. The cache has a spare block.
    Raises ConfigurationError.
    """
    reason = why_no_graphs(settings, model.config)
    if reason is None and model.attention_backend not in _CAPTURED_ATTENTION:
        reason = f"attention backend {model.attention_backend} reads lengths on the host"
    if reason is not None:
        if torch.device(settings.device).type == "cuda":
            log.info("decode steps not captured", reason=reason)
        return None
    device, started_s = cache.tensor.device, time.monotonic()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    try:
        graphs = capture_graphs(settings, model, cache, CudaCapture(device))
    except RuntimeError as error:
        raise ConfigurationError(
            f"decode steps cannot be captured as CUDA graphs, set cuda_graphs=0: {error}"
        ) from error
    taken = free_bytes - torch.cuda.mem_get_info(device)[0]
    log.info(
        "decode steps captured",
        sizes=settings.graphs.sizes,
        drafts=_max_drafts(settings),
        seconds=round(time.monotonic() - started_s, 2),
        memory=gib(taken),
        counted=gib(graph_bytes(settings, model.config, cache.layout)),
    )
    return graphs


def capture_graphs(settings: RunnerSettings, model: Model, cache: KVCache, capture: Capture) -> DecodeGraphs:
    """The model's decode steps on a cache with a spare block, captured."""
    sizes, max_drafts = settings.graphs.sizes, _max_drafts(settings)
    largest, block_size = step_shapes(sizes, max_drafts)[0], cache.layout.block_size
    buffers = DecodeBuffers(largest, _max_blocks(settings), block_size, cache.num_blocks, cache.tensor.device)
    return DecodeGraphs(model, buffers, sizes, capture, max_drafts)


def _max_drafts(settings: RunnerSettings) -> int:
    """Attention computes more of them in another way."""
    return min(settings.graphs.max_drafts, FEW_QUERIES - 1)


def _max_blocks(settings: RunnerSettings) -> int:
    """Blocks of the longest sequence."""
    return -(-settings.graphs.max_tokens // settings.block_size) + 1
