"""Parts of the decoder that the small checkpoints do not reach: large weights, long decodes, wide groups of heads."""

import pytest
import torch
from torch.nn import functional as F

from engine.attention.backend import AttentionShape
from engine.attention.cpu import CpuAttention
from engine.attention.metadata import ForwardMetadata
from engine.attention.torch_sdpa import TorchAttention
from engine.models.layers import Linear, rms_norm

BLOCK_SIZE = 16


@pytest.mark.parametrize("rows", [1, 2, 8, 33, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_large_weights(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(1024, 520), torch.randn(1024), torch.randn(rows, 520)
    expected = F.linear(x, weight, bias if biased else None)
    torch.testing.assert_close(Linear(weight, bias if biased else None)(x), expected, atol=1e-3, rtol=1e-4)


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 64), torch.randn(64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))


@pytest.mark.parametrize(
    "shape", [AttentionShape(14, 2, 64), AttentionShape(8, 8, 80), AttentionShape(6, 1, 6)], ids=str
)
@pytest.mark.parametrize("window", [None, 1, 16, 37, 1000])
def test_decode_kernel_against_torch(shape: AttentionShape, window: int | None) -> None:
    torch.manual_seed(0)
    lens = [1, 15, 16, 17, 100, 640]
    num_seqs, max_blocks = len(lens), 40
    cache = torch.randn(2, num_seqs * max_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    tables = torch.randperm(num_seqs * max_blocks).view(num_seqs, max_blocks).to(torch.int32)
    context_lens = torch.tensor(lens, dtype=torch.int32)
    last = context_lens.long() - 1
    metadata = ForwardMetadata(
        positions=last,
        rope_lengths=last + 1,
        slot_mapping=tables[torch.arange(num_seqs), last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables=tables,
        context_lens=context_lens,
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        num_decodes=num_seqs,
        chunks=(),
        max_decode_context=max(lens),
    )
    queries = 3 * torch.randn(num_seqs, shape.num_heads, shape.head_dim)
    keys, values = torch.randn(2, num_seqs, shape.num_kv_heads, shape.head_dim)
    backends = (CpuAttention(shape, 1), TorchAttention(shape))
    ours, theirs = (b.attend(queries, keys, values, cache, window, metadata) for b in backends)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
