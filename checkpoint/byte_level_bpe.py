"""Byte-level BPE: how it cuts a text into words, and vocabularies without a list of merges, tiktoken's and Mistral's
tekken.json. In both, tokens that come first merge first.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from checkpoint.config_json import read_json
from mesh.domain.errors import ConfigurationError

GPT2_WORDS = ""  # of ByteLevel itself
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
KIMI_WORDS = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Special tokens of a tekken.json that lists none, as before version 11 (mistral-common, tokens/tokenizers/tekken.py).
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_TEKKEN_FILLER = "<SPECIAL_{}>"


def byte_level_tokenizer(model: BPE, words: str, *, add_prefix_space: bool = False) -> Tokenizer:
    """A tokenizer of byte-level BPE that cuts a text into words by a pattern; GPT2_WORDS has none."""
    tokenizer = Tokenizer(model)
    cut = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_tiktoken(path: Path, words: str) -> Tokenizer:
    """Read a vocabulary whose lines are a token in base 64 and its rank. The id of a token is the number of different
    ones before it. Raises ConfigurationError.
    """
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranked = sorted((int(rank), base64.b64decode(token, validate=True)) for token, rank in lines)
    except (ValueError, binascii.Error) as error:
        raise ConfigurationError(f"{path} is broken: a line is not a token in base 64 and its id") from error
    return byte_level_tokenizer(_ranked([*dict.fromkeys(token for _, token in ranked)]), words)


def read_tekken(path: Path) -> Tokenizer:
    """Read a tekken.json: special tokens have the first ids, in the order of their ranks, then come as many tokens as
    the vocabulary takes; the file may hold more. Raises ConfigurationError.
    """
    stored = read_json(path)
    try:
        config = stored["config"]
        num_special, vocab_size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        entries = stored["vocab"][: vocab_size - num_special]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        special = _tekken_special(stored.get("special_tokens"), num_special)
        words = str(config["pattern"])
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise ConfigurationError(f"{path} is broken: {type(error).__name__}: {error}") from error
    if len(tokens) + num_special != vocab_size or [entry.get("rank") for entry in entries] != [*range(len(tokens))]:
        raise ConfigurationError(f"{path} is broken: it does not have {vocab_size - num_special} tokens in a row")
    tokenizer = byte_level_tokenizer(_ranked(tokens, special), words)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _tekken_special(listed: object, num_special: int) -> list[str]:
    """The special tokens by id. Raises ValueError, or another error of a list of another form."""
    names = list(_TEKKEN_SPECIAL)
    if listed is not None:
        ranked = sorted((entry["rank"], entry["token_str"]) for entry in listed)  # type: ignore[attr-defined]
        names = [str(token) for _, token in ranked]
        if [rank for rank, _ in ranked] != [*range(len(ranked))]:
            raise ValueError("ranks of special tokens are not 0, 1, 2 and on")
    names += [_TEKKEN_FILLER.format(id_) for id_ in range(len(names), num_special)]
    if len(set(names)) != num_special:
        raise ValueError(f"special tokens must be {num_special} different ones")
    return names


def _ranked(tokens: Sequence[bytes], special: Sequence[str] = ()) -> BPE:
    """A model of special tokens followed by `tokens`. Earlier tokens merge first."""
    names = _names_of_bytes()
    vocab = {"".join(names[byte] for byte in token): id_ for id_, token in enumerate(tokens, len(special))}
    merges = [pair for token in vocab for pair in pairs_of(token, vocab)]
    return BPE(vocab | {token: id_ for id_, token in enumerate(special)}, merges, ignore_merges=True)


def _names_of_bytes() -> list[str]:
    """The character that stands for each byte in byte-level BPE: a printable one for itself, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare_codes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare_codes)) for byte in range(256)]


def pairs_of(piece: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is this piece, sorted by their ids."""
    cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
    pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
    return sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
