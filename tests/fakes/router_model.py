"""A tiny checkpoint folder: byte-level BPE tokenizer, config and chat template, no weights."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
_TEXT = ["hello world, the quick brown fox jumps over the lazy dog 😀😂🤗 für Äpfel 日本語 STOP here"] * 8
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@functools.cache
def byte_level_tokenizer_json() -> str:
    """The trained tokenizer, as tokenizer.json."""
    return _train().to_str()


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token; frequent runs are too. Some tokens hold parts of characters."""
    return Tokenizer.from_str(byte_level_tokenizer_json())


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def write_checkpoint(
    folder: Path, *, max_positions: int = 512, chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = False
) -> Path:
    """Write the folder's files and return it. `adds_bos`: the tokenizer begins each text with BOS, as Llama's does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_positions,
        "eos_token_id": EOS_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": BOS, "eos_token": {"content": EOS}}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
