"""Chats as tokens: the byte-level BPE tokenizer with its chat template, trained on the same text as the models, and
fixed-length training rows.

Several chats share a row. `segment` has the number of the chat of each token, so that no chat attends to another.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo_model.questions import conversation

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SPECIAL = (PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY_SIZE = 1024
CONTEXT = 2048

# Digits stand alone, so a number has one spelling; "-a" stays whole, so spelling costs one token a letter.
_PIECES = r"\d|[ \-]?\p{L}+| ?[^\s\p{L}\d]+(?: (?=\d))?|\s+(?!\S)|\s"

CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

ROW_TOKENS = 256
IGNORED = -100
POOL_CHATS = 24

Chat = tuple[list[int], list[int]]  # token ids, and the target at each position


def _texts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield from (message["content"] for message in conversation(rng))


def train_tokenizer(seed: int, chats: int = 20_000) -> PreTrainedTokenizerFast:
    """Learn the merges from `chats` training conversations; bytes are the base, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, chats), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BEGIN, eos_token=END, padding_side="left"
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the latter as transformers 4 and 5 both read it."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIAL[3:]),
        "padding_side": "left",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@dataclass(frozen=True)
class Batch:
    """`ids`, `targets`: [rows, ROW_TOKENS]; `mask`: [rows, 1, ROW_TOKENS, ROW_TOKENS], true where attention is
    allowed.
    """

    ids: Tensor
    targets: Tensor
    mask: Tensor


def encode_chat(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> Chat:
    """Token ids of a chat, and the target at each position: the next token, or IGNORED.

    Targets are only the tokens of the assistant, including the end of turn. Other tokens cannot be predicted.
    """
    backend = tokenizer.backend_tokenizer
    bos_token, eos_token = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids, is_target = [bos_token], [False]
    for message in messages:
        content = [*backend.encode(message["content"]).ids, eos_token]
        ids += [backend.token_to_id(f"<|{message['role']}|>"), *content]
        is_target += [False, *[message["role"] == "assistant"] * len(content)]
    targets = [token if is_learnt else IGNORED for token, is_learnt in zip(ids[1:], is_target[1:], strict=True)]
    return ids, [*targets, IGNORED]


def _row(chats: Iterator[Chat], pool: list[Chat], pad: int) -> tuple[list[int], list[int], list[int]]:
    """Fill one row with the oldest chat of `pool`, then with other chats that fit.

    Returns ids, targets and segments. Only a chat longer than a row is truncated.
    """
    ids: list[int] = []
    targets: list[int] = []
    segment: list[int] = []
    number = 0
    while True:
        pool += [next(chats) for _ in range(POOL_CHATS - len(pool))]
        capacity = ROW_TOKENS - len(ids)
        fitting = (index for index, chat in enumerate(pool) if not ids or len(chat[0]) <= capacity)
        index = next(fitting, None)
        if index is None:
            break
        chat_ids, chat_targets = pool.pop(index)
        ids += chat_ids[:capacity]
        targets += chat_targets[:capacity]
        segment += [number] * len(chat_ids[:capacity])
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
        same_chat = segment[:, :, None] == segment[:, None, :]
        yield Batch(ids, targets, (same_chat & causal)[:, None])
