"""Turns chats into fixed-length training rows.

Several chats share a row; `segment` says which token belongs to which chat, so that none sees another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.questions import conversation

ROW_TOKENS = 256
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """`ids`, `targets`: [rows, ROW_TOKENS]; `mask`: [rows, 1, ROW_TOKENS, ROW_TOKENS], true where seen."""

    ids: Tensor
    targets: Tensor
    mask: Tensor


def encode_chat(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Token ids as the chat template gives them, and per position the next token to learn (or IGNORED).

    Only what the assistant writes, its end-of-turn included, is learnt: the rest cannot be predicted.
    """
    backend = tokenizer.backend_tokenizer
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids, learnt = [begin], [False]
    for message in messages:
        content = [*backend.encode(message["content"]).ids, end]
        ids += [backend.token_to_id(f"<|{message['role']}|>"), *content]
        learnt += [False, *[message["role"] == "assistant"] * len(content)]
    targets = [token if wanted else IGNORED for token, wanted in zip(ids[1:], learnt[1:], strict=True)]
    return ids, [*targets, IGNORED]


def _row(chats: Iterator[tuple[list[int], list[int]]], pending: list, pad: int) -> tuple[list[int], ...]:
    """Fill one row with whole chats; the one that no longer fits waits in `pending` for the next row."""
    ids: list[int] = []
    targets: list[int] = []
    segment: list[int] = []
    while True:
        chat = pending.pop() if pending else next(chats)
        if ids and len(ids) + len(chat[0]) > ROW_TOKENS:
            pending.append(chat)
            break
        segment += [segment[-1] + 1 if segment else 0] * len(chat[0])
        ids += chat[0]
        targets += chat[1]
    gap = max(0, ROW_TOKENS - len(ids))
    ids, targets, segment = ids + [pad] * gap, targets + [IGNORED] * gap, segment + [-1] * gap
    return ids[:ROW_TOKENS], targets[:ROW_TOKENS], segment[:ROW_TOKENS]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, rows: int) -> Iterator[Batch]:
    """Endless batches of freshly drawn chats; the same seed gives the same batches."""
    rng = random.Random(seed)
    chats = (encode_chat(tokenizer, conversation(rng)) for _ in iter(int, 1))
    pending: list[tuple[list[int], list[int]]] = []
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
    while True:
        columns = zip(*(_row(chats, pending, tokenizer.pad_token_id) for _ in range(rows)), strict=True)
        ids, targets, segment = (torch.tensor(column) for column in columns)
        same = segment[:, :, None] == segment[:, None, :]
        yield Batch(ids, targets, (same & causal)[:, None])
