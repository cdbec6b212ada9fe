"""A worker's entry in the ledger of memory: what its weights take, and how many KV blocks fit beside them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod

import torch

from checkpoint.partition_manifest import read_partition
from engine.kv.budget import KVMemoryShare
from engine.loading.resolve import keeps_output, kv_layout, why_eager
from engine.loading.stored_parameters import specs_of, stored_in_int4
from engine.loading.weights import WeightsTarget, target_of_table
from engine.models.encoder_decoder.config import AnyConfig
from engine.models.encodings import ALL_FLOAT, OUTPUT, OUTPUT_ENCODINGS, StoredMatrices
from engine.models.model_config import ModelConfig
from engine.models.parameters import ParameterSpec
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import KVLayout

_MATRIX_BYTES = {"int8": 1, "fp8": 2}
"""Bytes per number of a matrix, by encoding, at most: models in fp8 may have some matrices in bf16."""


def kept_in_int4(settings: RunnerSettings, specs: Sequence[ParameterSpec]) -> StoredMatrices:
    """How the matrices of a model in int4 are stored; ALL_FLOAT if they are rounded to it."""
    is_rounded = settings.encoding != "int4" or settings.load_format == "dummy"
    if is_rounded or read_partition(settings.model_dir) is not None:
        return ALL_FLOAT
    return stored_in_int4(settings.model_dir, specs) or ALL_FLOAT


def enter_ledger(settings: RunnerSettings, config: AnyConfig, later_bytes: int = 0) -> KVMemoryShare:
    """Announce a worker that loads the model and its adapters, and takes `later_bytes` after its KV."""
    device = torch.device(settings.device)
    if (partition := read_partition(settings.model_dir)) is not None:
        mapped_bytes = {partition.identity: partition.num_bytes}
        num_bytes = partition.num_bytes + settings.adapter_bytes
        return KVMemoryShare.enter(device, settings.kv_memory, num_bytes, mapped_bytes)
    is_packed = isinstance(config, ModelConfig) and why_eager(settings, config, kv_layout(config, settings)) is None
    num_bytes = weights_bytes(settings, specs_of(settings, config), config, is_packed=is_packed)
    num_bytes += settings.adapter_bytes
    return KVMemoryShare.enter(device, settings.kv_memory, num_bytes, later_bytes=later_bytes)


def kv_blocks(layout: KVLayout, settings: RunnerSettings, memory_share: KVMemoryShare) -> AbstractContextManager[int]:
    """Yields the number of KV blocks to allocate inside the `with` block; see KVMemoryShare.blocks."""
    block_bytes = layout.block_bytes + settings.companion_block_bytes
    return memory_share.blocks(block_bytes, num_blocks=settings.num_blocks, max_blocks=settings.max_blocks)


def weights_bytes(
    settings: RunnerSettings, specs: Sequence[ParameterSpec], config: AnyConfig, *, is_packed: bool = False
) -> int:
    """Memory of the parameters that are held, without scales of outputs. `is_packed`: for the compiled decoder, which
    stores a tied output matrix in addition to the embedding.
    """
    encoding = settings.encoding
    target = WeightsTarget(torch.device("cpu"), getattr(torch, settings.dtype), encoding, is_packed)
    output_encoding = OUTPUT_ENCODINGS.get(encoding, encoding)
    if keeps_output(settings):
        output_encoding = "fp8" if is_packed else "float"  # in bf16, or as it is computed
    stored = kept_in_int4(settings, specs)

    def itemsize(spec: ParameterSpec) -> float:
        if spec.is_matrix or spec.name == OUTPUT:
            own = output_encoding if spec.name == OUTPUT else encoding
            if own == "int4":
                return stored.int4_bytes(spec.name)  # steps of int8 and their low ends take less
            return _MATRIX_BYTES.get(own, target.dtype_of(spec).itemsize)
        return target_of_table(spec, getattr(torch, config.dtype), target).dtype_of(spec).itemsize

    num_bytes = sum(prod(spec.held_shape) * itemsize(spec) for spec in specs if spec.is_held)
    if is_packed and isinstance(config, ModelConfig) and config.tied:
        output = _MATRIX_BYTES.get(output_encoding, target.dtype.itemsize)
        num_bytes += config.vocab_size * config.embed_width * output
    return int(num_bytes)
