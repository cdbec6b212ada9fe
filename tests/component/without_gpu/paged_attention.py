"""Random KV in scattered blocks, and TritonAttention against torch on it; for the interpreter and for GPUs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, ForwardMetadata
from engine.attention.torch_sdpa import TorchAttention
from engine.attention.triton_paged import TritonAttention
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.device_copies import copies_for
from engine.kv.dtypes import as_stored
from engine.sequence import SequenceState
from engine.step_input import StepInputBuilder
from tests.fakes.requests import make_request

Work = Sequence[tuple[int, int]]
"""Tokens [start, end) that each sequence computes; sequences that compute one come first."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """One step of one layer. kv_dtype: None for that of the queries."""

    shape: AttentionShape
    work: Work
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Inputs:
    """The arguments of `attend`; queries, keys and values are views of one tensor, as a decoder has them."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    cache: Tensor
    metadata: ForwardMetadata


def scattered_step(work: Work, block_size: int, device: torch.device, num_blocks: int) -> ForwardMetadata:
    """The metadata of a step whose sequences have blocks anywhere in the cache but 0, which pads tables."""
    free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
    items = []
    for start, end in work:
        sequence = SequenceState(make_request("r", range(end)))
        sequence.block_table += [free.pop() for _ in range(0, end, block_size)]
        items.append(ScheduledSequence(sequence, start, end - start))
    step = StepInputBuilder(block_size).build(ScheduledBatch(tuple(items)))
    return step.on_device(copies_for(device)).metadata


def random_inputs(case: Case, device: torch.device) -> Inputs:
    """Blocks that no sequence has are NaN: whoever reads one shows it."""
    torch.manual_seed(0)
    shape, kv_dtype = case.shape, case.kv_dtype or case.dtype
    num_blocks = 3 + sum(-(-end // case.block_size) for _, end in case.work)
    metadata = scattered_step(case.work, case.block_size, device, num_blocks)
    num_tokens, num_heads = metadata.positions.shape[0], shape.num_heads
    heads = torch.randn(num_tokens, num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device).to(case.dtype)
    heads[:, :num_heads] *= 2  # some keys matter more than others
    cache = torch.randn(2, num_blocks, case.block_size, shape.num_kv_heads, shape.head_dim, device=device)
    used = torch.zeros(num_blocks, dtype=torch.bool, device=device)
    for row, (_, end) in enumerate(case.work):
        used[metadata.block_tables[row, : -(-end // case.block_size)].long()] = True
    cache[:, ~used] = torch.nan
    first_value = num_heads + shape.num_kv_heads
    queries, keys, values = heads[:, :num_heads], heads[:, num_heads:first_value], heads[:, first_value:]
    return Inputs(queries, keys, values, cache.to(kv_dtype), metadata)


def attend(case: Case, given: Inputs, device: torch.device) -> Tensor:
    """What TritonAttention computes."""
    backend = TritonAttention(case.shape, device)
    arguments = (given.queries, given.keys, given.values, given.cache, case.window, given.metadata)
    return backend.attend(*arguments, sinks_of(case.shape, device))


def sinks_of(shape: AttentionShape, device: torch.device) -> Tensor | None:
    return torch.linspace(-3, 6, shape.num_heads, device=device) if shape.has_sinks else None


def change_beside_others(case: Case, num_drafts: int, device: torch.device) -> float:
    """How far the last token of the case's only sequence, computed after so many drafts, is from the same token
    computed without drafts, but beside others.
    """
    [(_, end)] = case.work
    beside = replace(case, work=[(2 * end, 2 * end + 1), (end - 1, end), (0, 40)])
    whole = random_inputs(beside, device)
    together = attend(beside, whole, device)[1]
    work = [(end - 1 - num_drafts, end)]
    metadata = scattered_step(work, case.block_size, device, whole.cache.shape[1])
    metadata.block_tables[0] = whole.metadata.block_tables[1, : metadata.block_tables.shape[1]]
    positions = metadata.positions
    slots = metadata.block_tables[0, positions // case.block_size].long() * case.block_size
    metadata.slot_mapping.copy_(slots + positions % case.block_size)
    keys, values = whole.cache.flatten(1, 2)[:, metadata.slot_mapping]
    queries = torch.randn(len(positions), *whole.queries.shape[1:], device=device).to(case.dtype)
    queries[-1] = whole.queries[1]
    alone = attend(case, Inputs(queries, keys, values, whole.cache, metadata), device)[-1]
    return float((alone.float() - together.float()).abs().max())


def difference(case: Case, device: torch.device) -> float:
    """The largest difference to torch in fp32 on the same numbers. AssertionError if the cache differs afterwards."""
    given = random_inputs(case, device)
    wide = given.cache.float()
    ours = attend(case, given, device)
    # What is read back has the type of the cache.
    keys, values = (as_stored(rows, given.cache.dtype).float() for rows in (given.keys, given.values))
    theirs = TorchAttention(case.shape).attend(
        *(given.queries.float(), keys, values, wide.nan_to_num(), case.window, given.metadata),
        sinks_of(case.shape, device),
    )
    written = wide.flatten(1, 2)
    written[0, given.metadata.slot_mapping], written[1, given.metadata.slot_mapping] = keys, values
    assert torch.equal(given.cache.float().nan_to_num(nan=1e3), wide.nan_to_num(nan=1e3)), "the cache differs"
    return float((ours.float() - theirs).abs().nan_to_num(nan=torch.inf).max())


def require_near(case: Case, device: torch.device) -> None:
    found = difference(case, device)
    assert found <= TOLERANCES[case.dtype], f"{case}: differs by {found}"
