"""Small tokenizers in the files that older checkpoints have, trained here."""

import base64
import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello tokens; 123 + 456 = 579!",
    "Ein Löwe läuft über die Straße. L'été dernier, à Orléans. 日本語の文章です。 Привет, мир! 😀😂",
    "def f(x):\n    return x  # two  spaces\n\tand a tab",
] * 30
TEKKEN_WORDS = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def write_sentencepiece(folder: Path, model_type: str, config: dict[str, object], **options: object) -> Path:
    """tokenizer.model and tokenizer_config.json; `options` are the trainer's."""
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, model_type=model_type, minloglevel=2, num_threads=1, **options
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_llama(folder: Path, **config: object) -> Path:
    """As Llama 2's: BPE, bytes for what it does not know, digits one by one, spaces kept."""
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    } | config
    return write_sentencepiece(
        folder,
        "bpe",
        config,
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.99,
    )


def write_t5(folder: Path, extra_ids: int = 10) -> Path:
    """As T5's: unigram, normalised, with sentinels behind."""
    config = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_ids": extra_ids,
    }
    return write_sentencepiece(
        folder, "unigram", config, vocab_size=90, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, character_coverage=0.99
    )


def write_gpt2(folder: Path, **config: object) -> Path:
    """As GPT-2's and OPT's, and of other classes: vocab.json and merges.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"] if config.get("add_bos_token") else ["<|endoftext|>"]
    tokenizer.train_from_iterator(TEXT, vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | config))
    return folder


def write_glm4(folder: Path) -> dict[bytes, int]:
    """As GLM-4's: tokenizer.model in tiktoken's format, special tokens behind. Returns the ids of the tokens."""
    tokens = _write_tiktoken(folder / "tokenizer.model")
    special = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>")
    added = {str(len(tokens) + i): {"content": token, "special": True} for i, token in enumerate(special)}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def write_kimi(folder: Path) -> dict[bytes, int]:
    """As Kimi K2's: tiktoken.model, and a list of some of the 256 tokens behind it. Returns the ids of the others."""
    tokens = _write_tiktoken(folder / "tiktoken.model")
    listed = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 11: ("<|tool_call_begin|>", False)}
    added = {str(len(tokens) + i): {"content": token, "special": special} for i, (token, special) in listed.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def write_hunyuan(folder: Path) -> dict[bytes, int]:
    """As Hunyuan's: hy.tiktoken, whose special tokens its code knows. Returns the ids of the others."""
    tokens = _write_tiktoken(folder / "hy.tiktoken")
    config = {"tokenizer_class": "HYTokenizer", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def _write_tiktoken(path: Path) -> dict[bytes, int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = _ranked_tokens()
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tokens.items()))
    return tokens


def write_tekken(folder: Path, special: list[str] | None = None) -> dict[bytes, int]:
    """As Mistral's: tekken.json alone, with more tokens than its vocabulary takes, which has 50 special ones in front.
    Returns the ranks of the other tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _ranked_tokens()
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in tokens.items()]
    config = {"pattern": TEKKEN_WORDS, "default_num_special_tokens": 50, "default_vocab_size": 450, "version": "v3"}
    stored: dict[str, object] = {"config": config, "vocab": entries}
    if special is not None:
        listed = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)]
        stored["special_tokens"] = listed[::-1]
    (folder / "tekken.json").write_text(json.dumps(stored))
    return {token: rank for token, rank in tokens.items() if rank < 400}


def _ranked_tokens() -> dict[bytes, int]:
    """Byte-level BPE of 420 tokens, the bytes first, in the order in which they merge."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, vocab_size=420, show_progress=False)
    byte_of = {name: byte for byte, name in enumerate(_names_of_bytes())}
    ids = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items())
    return {bytes(byte_of[char] for char in token): id_ for id_, token in ids}


def _names_of_bytes() -> list[str]:
    """The characters of byte-level BPE, as the library has them."""
    names = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet())
    own = {name: ord(name) for name in names if ord(name) < 256}
    others = iter(sorted(name for name in names if ord(name) >= 256))
    by_byte = {byte: name for name, byte in own.items()}
    return [by_byte.get(byte) or next(others) for byte in range(256)]
