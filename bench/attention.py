"""Measures decode attention on CPU: the paged kernel, gathered blocks, and contiguous memory.

    python -m bench.attention [--threads 1] [--seqs 8] [--context 320] [--layers 24]

The time is that of all layers of one decode step: the best of several runs, with cold caches.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import AttentionBackend, AttentionShape, ForwardMetadata
from engine.attention.cpu import CpuAttention
from engine.attention.torch_sdpa import TorchAttention
from mesh.interrupts import run_program

_BLOCK_SIZE = 16
_REPEATS = 10


def main() -> None:
    """Print one line per variant."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    shape = AttentionShape(arguments.heads, arguments.kv_heads, arguments.head_dim)
    cache, metadata = _random_inputs(arguments, shape)
    queries = torch.randn(arguments.seqs, shape.num_heads, shape.head_dim)
    contiguous = torch.randn(arguments.layers, 2, arguments.seqs, shape.num_kv_heads, arguments.context, shape.head_dim)
    variants: dict[str, Callable[[], None]] = {
        "paged kernel": lambda: _paged(CpuAttention(shape, arguments.threads), queries, cache, metadata),
        "gather + torch": lambda: _paged(TorchAttention(shape), queries, cache, metadata),
        "torch, contiguous": lambda: _contiguous(queries, contiguous),
        "reading the bytes": lambda: _read(contiguous),
    }
    print(f"{arguments.layers} layers, {arguments.seqs} sequences of {arguments.context} tokens, {shape}")
    with torch.inference_mode():
        for name, variant in variants.items():
            print(f"{name:20s} {_best_ms(variant):8.2f} ms")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"threads": 1, "layers": 24, "seqs": 8, "context": 320, "heads": 14, "kv_heads": 2, "head_dim": 64}
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def _random_inputs(arguments: argparse.Namespace, shape: AttentionShape) -> tuple[Tensor, ForwardMetadata]:
    blocks_per_seq = -(-arguments.context // _BLOCK_SIZE)
    num_blocks = arguments.seqs * blocks_per_seq
    cache = torch.randn(arguments.layers, 2, num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(arguments.seqs, -1)
    last = torch.full((arguments.seqs,), arguments.context - 1)
    metadata = ForwardMetadata(
        positions=last,
        rope_lengths=last + 1,
        slot_mapping=torch.from_numpy(tables)[:, -1] * _BLOCK_SIZE + last % _BLOCK_SIZE,
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        context_lens=(last + 1).to(torch.int32),
        prompt_lens=torch.ones(arguments.seqs, dtype=torch.int32),
        query_starts=torch.arange(arguments.seqs + 1, dtype=torch.int32),
        num_decodes=arguments.seqs,
        chunks=(),
        max_decode_context=arguments.context,
    )
    return cache, metadata


def _paged(backend: AttentionBackend, queries: Tensor, cache: Tensor, metadata: ForwardMetadata) -> None:
    keys = torch.zeros(queries.shape[0], *cache.shape[4:])
    for layer in cache.unbind(0):
        backend.attend(queries, keys, keys, layer, None, metadata)


def _contiguous(queries: Tensor, contiguous: Tensor) -> None:
    for keys, values in contiguous.unbind(0):
        scaled_dot_product_attention(queries[:, :, None], keys, values, enable_gqa=True)


def _read(contiguous: Tensor) -> None:
    contiguous.sum()


def _best_ms(variant: Callable[[], None]) -> float:
    variant()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        variant()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    run_program(main)
