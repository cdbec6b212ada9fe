"""Loads a model's tokenizer. tokenizer.json is complete; older checkpoints have other files:

    tokenizer.model             sentencepiece: Llama 2, Baichuan, InternLM, ChatGLM; tiktoken's format: GLM-4
    spiece.model                sentencepiece: T5 and its kind
    vocab.json, merges.txt      byte-level BPE: GPT-2, OPT, BLOOM, StarCoder

tokenizer_config.json, special_tokens_map.json and added_tokens.json list the special tokens and the tokens that are
added around a text. Token ids equal those of Hugging Face transformers. Some tokenizer classes add tokens to a
sentencepiece model in code only, so unknown classes are refused.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from checkpoint.config_json import read_json
from checkpoint.model_files import ALL_IN_ONE, BYTE_LEVEL, SENTENCEPIECE, tokenizer_source
from mesh.domain.errors import ConfigurationError

_CHATGLM = "ChatGLMTokenizer"

# Tokenizer classes of sentencepiece models: defaults for add_bos_token and add_eos_token. InternLM, Baichuan and
# ChatGLM ship their classes with the checkpoint; the others are part of transformers.
_ADDS_BOS_EOS = {
    "": (False, False),
    "LlamaTokenizer": (True, False),
    "LLaMATokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "InternLMTokenizer": (True, False),
    "InternLM2Tokenizer": (True, False),
    "InternLM3Tokenizer": (True, False),
    "BaiChuanTokenizer": (True, False),
    "BaichuanTokenizer": (True, False),
    "T5Tokenizer": (False, True),
    "MT5Tokenizer": (False, True),
    _CHATGLM: (False, False),
}

# Tokenizer classes of tiktoken's vocabularies: how they cut a text into words. GLM-4 ships its class.
_GLM4 = "ChatGLM4Tokenizer"
_WORD_PATTERNS = {
    _GLM4: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# ChatGLM's code adds these tokens after the sentencepiece model, whatever the files say. ChatGLM2 has no role tokens,
# but has untrained embeddings for them.
_CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
_LEADING_TOKENS = {_CHATGLM: ["[gMASK]", "sop"], _GLM4: ["[gMASK]", "<sop>"]}
"""Tokens that the code of a class puts before a text, whatever the files say."""

_T5 = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": 100,
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_CONTROL, _USER_DEFINED = 3, 4  # ModelProto.SentencePiece.Type
_SENTINELS = "<extra_id_{}>"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_MAX_TOKEN_LINE = 4096


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer settings in the files other than the vocabulary."""

    raw: Mapping[str, Any]
    special: Mapping[str, str]
    """Special tokens by the names of the files: bos_token, eos_token, ..."""
    added: Mapping[int, AddedToken]

    @classmethod
    def read(cls, model_dir: Path) -> "TokenizerConfig":
        """Read the files. Raises ConfigurationError."""
        raw = read_json(model_dir / "tokenizer_config.json", optional=True)
        if tokenizer_source(model_dir) == SENTENCEPIECE[1]:
            raw = _T5 | raw  # older T5 checkpoints do not name their class
        special = read_json(model_dir / "special_tokens_map.json", optional=True) | dict(raw)
        return cls.of(raw, special, read_json(model_dir / "added_tokens.json", optional=True))

    @classmethod
    def of(
        cls, raw: Mapping[str, Any], special: Mapping[str, Any] | None = None, ids: Mapping[str, int] | None = None
    ) -> "TokenizerConfig":
        """The settings `raw` of tokenizer_config.json, with special tokens by name and ids of added tokens, if other
        files have them.
        """
        names = {key: _content(value) for key, value in (special or raw).items() if key.endswith("_token")}
        added = {int(id_): _token_of_entry(entry) for id_, entry in (raw.get("added_tokens_decoder") or {}).items()}
        for token, id_ in (ids or {}).items():
            added.setdefault(id_, AddedToken(token, normalized=False, special=token in names.values()))
        return cls(raw, {key: value for key, value in names.items() if value}, added)

    @property
    def class_name(self) -> str:
        """The tokenizer's class in transformers, without the suffix Fast."""
        return str(self.raw.get("tokenizer_class") or "").removesuffix("Fast")

    def finish(self, tokenizer: Tokenizer) -> Tokenizer:
        """Add tokens, mark the special ones, and add the first and last tokens of a text. Raises ConfigurationError."""
        vocab_size = tokenizer.get_vocab_size()
        added = self._with_tokens_of_class(vocab_size)
        for id_, token in sorted(added.items()):
            tokenizer.add_tokens([token])
            if tokenizer.token_to_id(token.content) != id_:
                raise ConfigurationError(
                    f"added token {token.content!r} should have id {id_}, after {vocab_size} others"
                )
        present = [token for token in self.special.values() if tokenizer.token_to_id(token) is not None]
        listed = {token.content for token in added.values()}
        tokenizer.add_special_tokens(
            [AddedToken(token, normalized=False, special=True) for token in present if token not in listed]
        )
        first, last = self._frame(tokenizer)
        if first or last:
            ids = [(token, tokenizer.token_to_id(token)) for token in (*first, *last)]
            template = [*first, "$A", *last]
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
        return tokenizer

    def _with_tokens_of_class(self, vocab_size: int) -> dict[int, AddedToken]:
        """Return the added tokens by id, with those that the tokenizer class adds after the vocabulary."""
        if self.class_name != _CHATGLM:
            return dict(self.added)
        # Match whole words only: "philosophy" contains "sop".
        class_tokens = [
            AddedToken(token, normalized=False, special=True, single_word=token.isalpha()) for token in _CHATGLM_TOKENS
        ]
        return {**self.added, **dict(enumerate(class_tokens, vocab_size))}

    def _frame(self, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
        """Return the tokens that are added before and after a text."""
        if self.class_name in _LEADING_TOKENS:
            return _LEADING_TOKENS[self.class_name], []
        defaults = _ADDS_BOS_EOS.get(self.class_name, (False, False))
        frame = []
        for key, default in zip(("bos", "eos"), defaults, strict=True):
            token = self.special.get(f"{key}_token", "")
            is_added = self.raw.get(f"add_{key}_token", default) and tokenizer.token_to_id(token) is not None
            frame.append([token] if is_added else [])
        return frame[0], frame[1]


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder. Raises ConfigurationError, which names the bad file."""
    path = model_dir / tokenizer_source(model_dir)
    try:
        if path.name == ALL_IN_ONE:
            return Tokenizer.from_file(str(path))
        config = TokenizerConfig.read(model_dir)
        if path.name in SENTENCEPIECE and _is_tiktoken(path):
            return config.finish(_tiktoken(path, config))
        if path.name in SENTENCEPIECE:
            return config.finish(_sentencepiece(path, config))
        return config.finish(_byte_level(model_dir, config))
    except ConfigurationError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot load {path}: {error}") from error


def _sentencepiece(path: Path, config: TokenizerConfig) -> Tokenizer:
    if config.class_name not in _ADDS_BOS_EOS:
        raise ConfigurationError(
            f"{path}: the tokenizer class {config.class_name} is not supported; add a tokenizer.json to the folder"
        )
    return read_sentencepiece(path, config.raw, exact_spaces=config.class_name == _CHATGLM)


def _is_tiktoken(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(_TIKTOKEN_LINE.match(file.read(_MAX_TOKEN_LINE)))


def _tiktoken(path: Path, config: TokenizerConfig) -> Tokenizer:
    """Read a vocabulary of byte-level BPE whose lines are a token in base 64 and its id; lower ids merge first. The
    file has no list of merges, as sentencepiece has none.
    """
    if config.class_name not in _WORD_PATTERNS:
        raise ConfigurationError(
            f"{path} is in tiktoken's format, and how the tokenizer class {config.class_name or '(none)'} cuts words "
            "is not known; add a tokenizer.json to the folder"
        )
    names = _names_of_bytes()
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        tokens = {int(id_): base64.b64decode(token, validate=True) for token, id_ in lines}
    except (ValueError, binascii.Error) as error:
        raise ConfigurationError(f"{path} is broken: a line is not a token in base 64 and its id") from error
    vocab = {"".join(names[byte] for byte in tokens[id_]): id_ for id_ in sorted(tokens)}
    merges = [pair for token in vocab for pair in _pairs(token, vocab)]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(_WORD_PATTERNS[config.class_name]), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _names_of_bytes() -> list[str]:
    """The character by which byte-level BPE names each byte: printable ones name themselves, then U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare_codes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare_codes)) for byte in range(256)]


def _byte_level(model_dir: Path, config: TokenizerConfig) -> Tokenizer:
    vocab, merges = BPE.read_file(*(str(model_dir / name) for name in BYTE_LEVEL))
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False))
    add_prefix_space = bool(config.raw.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _content(value: object) -> str:
    """Return the text of a token, which the files store as a string or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _token_of_entry(entry: Mapping[str, object]) -> AddedToken:
    options = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "normalized", "single_word", "special")}
    return AddedToken(_content(entry), **options)


def read_sentencepiece(path: Path, config: Mapping[str, Any], *, exact_spaces: bool = False) -> Tokenizer:
    """Convert a sentencepiece model (Kudo and Richardson 2018).

    A model is BPE (Llama 2, Mistral, Baichuan, InternLM, ChatGLM) or unigram (T5). Both spell a space as U+2581; BPE
    encodes unknown characters as bytes. The file has no list of merges: two pieces merge if their concatenation is a
    piece, and pieces with lower ids merge first.

    Return the tokenizer without the tokens that transformers adds around a text. `exact_spaces` puts a space before
    every text, as sentencepiece does; transformers omits it if the text starts with one. Raises ConfigurationError.
    """
    model = _parse(path)
    if model.trainer_spec.model_type == _BPE:
        tokenizer = _bpe(model, config, exact_spaces=exact_spaces)
    elif model.trainer_spec.model_type == _UNIGRAM:
        tokenizer = _unigram(model, config)
    else:
        raise ConfigurationError(f"{path}: sentencepiece models of words or characters are not supported")
    added = [piece for piece in model.pieces if piece.type in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([_unnormalized_token(piece.piece, special=piece.type == _CONTROL) for piece in added])
    unknown = model.pieces[model.trainer_spec.unk_id].piece
    tokenizer.add_special_tokens([_unnormalized_token(unknown, special=True)])
    return tokenizer


def _parse(path: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # of protobuf, whichever implementation runs
        raise ConfigurationError(f"{path} is no sentencepiece model: {error}") from error
    if not model.pieces:
        raise ConfigurationError(f"{path} is no sentencepiece model: it has no pieces")
    return model


def _bpe(model: Any, config: Mapping[str, Any], *, exact_spaces: bool) -> Tokenizer:
    vocab = {piece.piece: id_ for id_, piece in enumerate(model.pieces)}
    special = {piece.piece for piece in model.pieces if piece.type in (_CONTROL, _USER_DEFINED)}
    unknown = model.pieces[model.trainer_spec.unk_id].piece
    merges = [pair for piece in vocab if piece not in special for pair in _pairs(piece, vocab)]
    tokenizer = Tokenizer(
        BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bool(model.trainer_spec.byte_fallback))
    )
    add_space = bool(config.get("add_prefix_space", model.normalizer_spec.add_dummy_prefix))
    if add_space and exact_spaces:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "never" if not add_space else "always" if config.get("legacy") else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return tokenizer


def _pairs(piece: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is this piece, sorted by their ids."""
    cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
    pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
    return sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _unigram(model: Any, config: Mapping[str, Any]) -> Tokenizer:
    """Return a T5 tokenizer, with the sentinels after the vocabulary in descending order."""
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    sentinels = [_SENTINELS.format(i) for i in reversed(range(int(config.get("extra_ids") or 0)))]
    pieces += [(sentinel, 0.0) for sentinel in sentinels if all(sentinel != piece for piece, _ in pieces)]
    tokenizer = Tokenizer(Unigram(pieces, model.trainer_spec.unk_id, bool(model.trainer_spec.byte_fallback)))
    if model.normalizer_spec.precompiled_charsmap:
        tokenizer.normalizer = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True)
    tokenizer.add_special_tokens([_unnormalized_token(sentinel, special=True) for sentinel in sentinels])
    return tokenizer


def _unnormalized_token(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)
