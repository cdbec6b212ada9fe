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
POOL_CHATS = 24

Chat = tuple[list[int], list[int]]  # token ids, and what to learn at each


@dataclass(frozen=True)
class Batch:
    """`ids`, `targets`: [rows, ROW_TOKENS]; `mask`: [rows, 1, ROW_TOKENS, ROW_TOKENS], true where seen."""

    ids: Tensor
    targets: Tensor
    mask: Tensor


def encode_chat(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> Chat:
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


def _row(chats: Iterator[Chat], pool: list[Chat], pad: int) -> tuple[list[int], list[int], list[int]]:
    """Fill one row with the oldest chat of `pool`, then with whatever still fits.

    Returns ids, targets and segments; only a chat longer than a whole row is cut.
    """
    ids: list[int] = []
    targets: list[int] = []
    segment: list[int] = []
    number = 0
    while True:
        pool += [next(chats) for _ in range(POOL_CHATS - len(pool))]
        room = ROW_TOKENS - len(ids)
        fitting = (index for index, chat in enumerate(pool) if not ids or len(chat[0]) <= room)
        index = next(fitting, None)
        if index is None:
            break
        chat_ids, chat_targets = pool.pop(index)
        ids += chat_ids[:room]
        targets += chat_targets[:room]
        segment += [number] * len(chat_ids[:room])
        number += 1
    gap = ROW_TOKENS - len(ids)
    return ids + [pad] * gap, targets + [IGNORED] * gap, segment + [-1] * gap


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, rows: int, late: bool = False) -> Iterator[Batch]:
    """Endless batches of freshly drawn chats; the same seed gives the same batches."""
    rng = random.Random(seed)
    chats = (encode_chat(tokenizer, conversation(rng, late)) for _ in iter(int, 1))
    pool: list[Chat] = []
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
    while True:
        columns = zip(*(_row(chats, pool, tokenizer.pad_token_id) for _ in range(rows)), strict=True)
        ids, targets, segment = (torch.tensor(column) for column in columns)
        same = segment[:, :, None] == segment[:, None, :]
        yield Batch(ids, targets, (same & causal)[:, None])
