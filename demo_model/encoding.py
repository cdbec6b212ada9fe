"""Chats as tokens: the byte-level BPE tokenizer with its chat template, trained on the same text as the models, and
the batches of an optimizer step.
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

from demo_model.questions import Mix, conversation

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

LONGEST_CHAT = 256
PART_TOKENS = 1152
STEP_PARTS = 2
POOL_CHATS = 320
IGNORED = -100
RANDOM_LENGTHS = (3, 24)

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
    """Chats of similar length, one a row: `ids`, `targets`: [rows, longest]. Shorter rows are padded on the right,
    where no token of the chat attends.
    """

    ids: Tensor
    targets: Tensor


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


def random_copy(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Chat:
    """A chat whose answer only copying predicts, so copying is learnt from few chats: random tokens repeated, or random
    codes recalled in another order.
    """
    backend = tokenizer.backend_tokenizer
    asked, answer, is_target = (_repeated if rng.random() < 0.5 else _recalled)(tokenizer, rng)
    prompt = [tokenizer.bos_token_id, backend.token_to_id("<|user|>"), *backend.encode("Say: ").ids, *asked]
    prompt += [tokenizer.eos_token_id, backend.token_to_id("<|assistant|>")]
    targets = [token if is_learnt else IGNORED for token, is_learnt in zip(answer, is_target, strict=True)]
    end = tokenizer.eos_token_id
    return [*prompt, *answer, end], [*[IGNORED] * (len(prompt) - 1), *targets, end, IGNORED]


def _repeated(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int], list[bool]]:
    """Tokens of an alphabet, and the same again. In a small alphabet, such as the digits, one token does not tell what
    follows it: the place or several tokens do.
    """
    others = range(len(SPECIAL), len(tokenizer))
    alphabet = _digits(tokenizer) if rng.random() < 0.4 else rng.sample(others, rng.choice((4, 16, len(others))))
    tokens = rng.choices(alphabet, k=rng.randint(*RANDOM_LENGTHS))
    return tokens, tokens, [True] * len(tokens)


def _recalled(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int], list[bool]]:
    """Labels with random codes, and the same in another order, where the codes can be predicted and labels cannot."""
    digits = _digits(tokenizer)
    labels = rng.sample(range(len(SPECIAL), len(tokenizer)), rng.randint(2, 8))
    codes = {label: rng.choices(digits, k=rng.randint(1, 3)) for label in labels}
    asked = [token for label in labels for token in (label, *codes[label])]
    rng.shuffle(labels)
    answer = [token for label in labels for token in (label, *codes[label])]
    is_target = [is_code for label in labels for is_code in (False, *[True] * len(codes[label]))]
    return asked, answer, is_target


def _digits(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode("0123456789").ids
    return ids


def _padded(chats: list[Chat], pad: int) -> Batch:
    longest = max(len(ids) for ids, _ in chats)
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in chats])
    targets = torch.tensor([targets + [IGNORED] * (longest - len(targets)) for _, targets in chats])
    return Batch(ids, targets)


def _parts(chats: list[Chat], pad: int) -> list[Batch]:
    """`chats` sorted by length, in parts of up to PART_TOKENS each, so that little is padding."""
    parts: list[list[Chat]] = [[]]
    for chat in sorted(chats, key=lambda chat: len(chat[0])):
        if parts[-1] and (len(parts[-1]) + 1) * len(chat[0]) > PART_TOKENS:
            parts.append([])
        parts[-1].append(chat)
    return [_padded(part, pad) for part in parts]


def steps(tokenizer: PreTrainedTokenizerFast, seed: int, mix: Mix, random_share: float) -> Iterator[list[Batch]]:
    """Endless optimizer steps of freshly drawn chats, STEP_PARTS parts each; the same seed gives the same steps.
    `random_share` of the chats repeat random tokens.
    """
    rng = random.Random(seed)
    while True:
        chats: list[Chat] = []
        for _ in range(POOL_CHATS):
            is_random = rng.random() < random_share
            ids, targets = random_copy(tokenizer, rng) if is_random else encode_chat(tokenizer, conversation(rng, mix))
            chats.append((ids[:LONGEST_CHAT], targets[:LONGEST_CHAT]))
        parts = _parts(chats, tokenizer.pad_token_id)
        rng.shuffle(parts)
        for start in range(0, len(parts) - STEP_PARTS + 1, STEP_PARTS):
            yield parts[start : start + STEP_PARTS]
