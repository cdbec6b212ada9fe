"""Writes the vocabulary of a GGUF file as the files of a Hugging Face tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from checkpoint.byte_level_bpe import GPT2_WORDS, LLAMA3_WORDS, QWEN2_WORDS, byte_level_tokenizer
from checkpoint.gguf.file import GgufFile
from checkpoint.tokenizer_files import TokenizerConfig
from mesh.domain.errors import ConfigurationError

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # of llama.cpp and of sentencepiece alike
_BPE_TYPE = 2  # TrainerSpec.ModelType

_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_QWEN2_NAMES = (
    *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
)
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0"), GPT2_WORDS),
    **dict.fromkeys(("mellum", "trillion", "granite-docling", *_SINGLE_DIGITS), GPT2_WORDS),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3_WORDS),
    **dict.fromkeys(_QWEN2_NAMES, QWEN2_WORDS),
    "tekken": _TEKKEN_WORDS,
}
"""How `tokenizer.ggml.pre` cuts a text into words. Names with one pattern are those that llama.cpp gives one, but for
encoders' names."""
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")
"""Those of Qwen's own vocabulary, before which texts are normalised to NFC."""
_WHOLE_WORDS_FIRST = frozenset({*_LLAMA3_NAMES, "tekken"})
_BEGIN_TEXTS = _WHOLE_WORDS_FIRST
"""Those that put a first token before a text if the file does not say, as most files of Llama 3 do not."""
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>"),
    }
)
"""Tokens that end an answer in llama.cpp by their names: files of Gemma and Phi 3 name no token that ends a turn."""


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer_config.json and the vocabulary to `folder`. Raises ConfigurationError for a kind that is not
    known.
    """
    kind = file.require("tokenizer.ggml.model")
    config = _tokenizer_config(file, is_byte_level=kind == "gpt2")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if kind == "gpt2":
        TokenizerConfig.of(config).finish(_byte_level(file)).save(str(folder / "tokenizer.json"))
    elif kind == "llama":
        (folder / "tokenizer.model").write_bytes(_sentencepiece(file))
    else:
        raise ConfigurationError(
            f"{file.path} has a tokenizer of kind {kind}, which is not read; "
            "give the tokenizer of the original checkpoint: --tokenizer FOLDER"
        )


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The contents of generation_config.json: the tokens that begin and end an answer."""
    ids = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom", "padding")}
    ends = [id_ for id_ in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"], *_named_ends(file))) if id_ is not None]
    named = {"bos_token_id": ids["bos"], "eos_token_id": ends or None, "pad_token_id": ids["padding"]}
    return {key: value for key, value in named.items() if value is not None}


def _named_ends(file: GgufFile) -> list[int]:
    """The added tokens that end an answer by their names. Texts of these names may also be words of a vocabulary."""
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type"))
    added = (_CONTROL, _USER_DEFINED)
    pairs = enumerate(zip(tokens, kinds, strict=False))
    return [id_ for id_, (token, kind) in pairs if kind in added and token in _ENDS]


def _tokenizer_config(file: GgufFile, *, is_byte_level: bool) -> dict[str, Any]:
    tokens: Sequence[str] = file.require("tokenizer.ggml.tokens")
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    adds_bos = not is_byte_level or file.metadata.get("tokenizer.ggml.pre") in _BEGIN_TEXTS
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if is_byte_level else "LlamaTokenizer",
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in special.items():
        id_ = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if id_ is not None and id_ < len(tokens):
            config[f"{name}_token"] = tokens[id_]
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
    if is_byte_level:
        added = (_CONTROL, _USER_DEFINED)
        config["added_tokens_decoder"] = {
            str(id_): {"content": tokens[id_], "special": kind == _CONTROL, "normalized": False}
            for id_, kind in enumerate(file.require("tokenizer.ggml.token_type"))
            if kind in added
        }
    else:
        config["legacy"] = True  # llama.cpp puts a space after special tokens, too
        config["add_prefix_space"] = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return config


def _byte_level(file: GgufFile) -> Tokenizer:
    words = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if words not in _WORDS:
        raise ConfigurationError(
            f"{file.path} cuts words as {words}, which is not known ({', '.join(_WORDS)} are); "
            "give the tokenizer of the original checkpoint: --tokenizer FOLDER"
        )
    vocab = {token: id_ for id_, token in enumerate(file.require("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", ())]
    try:
        model = BPE(vocab, merges, ignore_merges=words in _WHOLE_WORDS_FIRST)
    except Exception as error:  # as the library raises it for merges of what is no token
        raise ConfigurationError(f"{file.path}: its merges do not fit its tokens: {error}") from error
    tokenizer = byte_level_tokenizer(model, _WORDS[words])
    if words in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    if words in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    return tokenizer


def _sentencepiece(file: GgufFile) -> bytes:
    """The vocabulary as a model of sentencepiece, which is what it was made from."""
    from sentencepiece import sentencepiece_model_pb2

    tokens, kinds = file.require("tokenizer.ggml.tokens"), file.require("tokenizer.ggml.token_type")
    scores = file.require("tokenizer.ggml.scores")
    if not len(tokens) == len(kinds) == len(scores):
        raise ConfigurationError(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores and {len(kinds)} types")
    merged = [score for score, kind, token in zip(scores, kinds, tokens, strict=True) if kind == _NORMAL and token[1:]]
    if sorted(merged, reverse=True) != merged:
        raise ConfigurationError(
            f"{file.path}: tokens do not merge in the order of their ids, which is not read; "
            "give the tokenizer of the original checkpoint: --tokenizer FOLDER"
        )
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = _BPE_TYPE
    model.trainer_spec.unk_id = int(file.metadata.get("tokenizer.ggml.unknown_token_id", 0))
    model.trainer_spec.byte_fallback = _BYTE in kinds
    model.normalizer_spec.add_dummy_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    return bytes(model.SerializeToString())
