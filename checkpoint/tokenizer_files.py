"""Loads a model's tokenizer. tokenizer.json is complete; older checkpoints have other files:

    tokenizer.model             sentencepiece: Llama 2, Baichuan, InternLM, ChatGLM; tiktoken's format: GLM-4
    spiece.model                sentencepiece: T5 and its kind
    tekken.json                 byte-level BPE: Mistral since Nemo
    tiktoken.model, hy.tiktoken tiktoken's format: Kimi K2, Moonlight; Hunyuan
    vocab.json, merges.txt      byte-level BPE: GPT-2, OPT, BLOOM, StarCoder, Qwen 2, GPT-NeoX, CodeT5

tokenizer_config.json, special_tokens_map.json and added_tokens.json list the special tokens and the tokens that are
added around a text; tokenizer.json may lack some of them. Token ids equal those of Hugging Face transformers. Some
tokenizer classes add tokens to a sentencepiece model, or cut words of byte-level BPE, in code only, so unknown classes
are refused.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from checkpoint.byte_level_bpe import (
    GPT2_WORDS,
    KIMI_WORDS,
    LLAMA3_WORDS,
    QWEN2_WORDS,
    byte_level_tokenizer,
    pairs_of,
    read_tekken,
    read_tiktoken,
)
from checkpoint.config_json import read_json
from checkpoint.tokenizer_fingerprint import (
    ALL_IN_ONE,
    BYTE_LEVEL,
    SENTENCEPIECE,
    TEKKEN,
    TIKTOKEN,
    tokenizer_settings,
    tokenizer_source,
)
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

# Tokenizer classes of tiktoken's vocabularies, which checkpoints ship: how they cut a text into words.
_GLM4, _KIMI, _HUNYUAN = "ChatGLM4Tokenizer", "TikTokenTokenizer", "HYTokenizer"
_TIKTOKEN_WORDS = {_GLM4: LLAMA3_WORDS, _KIMI: KIMI_WORDS, _HUNYUAN: QWEN2_WORDS}

# Tokenizer classes of vocab.json and merges.txt: how they cut a text into words.
_ROBERTA = "RobertaTokenizer"
_BYTE_LEVEL_WORDS = {
    "": GPT2_WORDS,
    "GPT2Tokenizer": GPT2_WORDS,
    "CodeGenTokenizer": GPT2_WORDS,
    "GPTNeoXTokenizer": GPT2_WORDS,
    _ROBERTA: GPT2_WORDS,
    "Qwen2Tokenizer": QWEN2_WORDS,
}
_COMPOSES = frozenset({"GPTNeoXTokenizer", "Qwen2Tokenizer", _HUNYUAN})
"""Classes of byte-level BPE that compose characters first (NFC)."""

# ChatGLM's code adds these tokens after the sentencepiece model, whatever the files say. ChatGLM2 has no role tokens,
# but has untrained embeddings for them.
_CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
# The code of Kimi and of Hunyuan appends these special tokens to the vocabulary, unless the files list them.
_NUM_RESERVED_OF_KIMI = 256
_RESERVED_OF_KIMI = "<|reserved_token_{}|>"
_HUNYUAN_TOKENS = (
    *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
    *(f"<|extra_{i}|>" for i in range(205)),
)
_LEADING_TOKENS = {_CHATGLM: ["[gMASK]", "sop"], _GLM4: ["[gMASK]", "<sop>"]}
"""Tokens that the code of a class puts before a text, whatever the files say."""

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
        raw = tokenizer_settings(model_dir)
        special = read_json(model_dir / "special_tokens_map.json", optional=True) | dict(raw)
        return cls.of(raw, special, read_json(model_dir / "added_tokens.json", optional=True))

    @classmethod
    def of(
        cls, raw: Mapping[str, Any], special: Mapping[str, Any] | None = None, ids: Mapping[str, int] | None = None
    ) -> "TokenizerConfig":
        """The settings `raw` of tokenizer_config.json, with special tokens by name and ids of added tokens, if other
        files have them. Raises ConfigurationError.
        """
        names = {key: _content(value) for key, value in (special or raw).items() if key.endswith("_token")}
        added = _added_tokens(raw.get("added_tokens_decoder") or {}, frozenset(names.values()))
        for token, id_ in (ids or {}).items():
            if type(id_) is not int or id_ < 0:
                raise ConfigurationError(f"added_tokens.json: the id of {token!r:.100} must be an integer, got {id_!r}")
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
        _add(tokenizer, added)
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

    def complete(self, tokenizer: Tokenizer) -> Tokenizer:
        """Add the tokens that a tokenizer.json lacks. Raises ConfigurationError if their ids are not the next ones."""
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        _add(tokenizer, {id_: token for id_, token in self.added.items() if token.content not in known})
        return tokenizer

    def _with_tokens_of_class(self, vocab_size: int) -> dict[int, AddedToken]:
        """Return the added tokens by id, with those that the tokenizer class adds after the vocabulary."""
        if self.class_name in (_KIMI, _HUNYUAN):
            reserved = (_RESERVED_OF_KIMI.format(vocab_size + i) for i in range(_NUM_RESERVED_OF_KIMI))
            names = reserved if self.class_name == _KIMI else _HUNYUAN_TOKENS
            tokens = (_unnormalized_token(name, special=True) for name in names)
            return dict(enumerate(tokens, vocab_size)) | dict(self.added)
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
        if self.class_name == _ROBERTA:
            return [self.special.get("cls_token", "<s>")], [self.special.get("sep_token", "</s>")]
        defaults = _ADDS_BOS_EOS.get(self.class_name, (False, False))
        frame = []
        for key, default in zip(("bos", "eos"), defaults, strict=True):
            token = self.special.get(f"{key}_token", "")
            is_added = self.raw.get(f"add_{key}_token", default) and tokenizer.token_to_id(token) is not None
            frame.append([token] if is_added else [])
        return frame[0], frame[1]


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder. It never changes the length of a text's ids, even if tokenizer.json
    enables truncation or padding. Raises ConfigurationError, which names the bad file.
    """
    path = model_dir / tokenizer_source(model_dir)
    try:
        tokenizer = _load(path, TokenizerConfig.read(model_dir))
    except ConfigurationError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot load {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def own_end_token(tokenizer: Tokenizer, model_dir: Path) -> frozenset[int]:
    """The id of the tokenizer's own eos_token, if it has one: fine-tuned models often name theirs there only. vLLM and
    SGLang read it, too. Raises ConfigurationError.
    """
    own = tokenizer.token_to_id(TokenizerConfig.read(model_dir).special.get("eos_token", ""))
    return frozenset() if own is None else frozenset({own})


def _load(path: Path, config: TokenizerConfig) -> Tokenizer:
    if path.name == ALL_IN_ONE:
        return config.complete(Tokenizer.from_file(str(path)))
    if path.name == TEKKEN:
        return config.finish(read_tekken(path))
    if path.name in TIKTOKEN or (path.name in SENTENCEPIECE and _is_tiktoken(path)):
        return config.finish(_tiktoken(path, config))
    if path.name in SENTENCEPIECE:
        return config.finish(_sentencepiece(path, config))
    return config.finish(_byte_level(path.parent, config))


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
    if config.class_name not in _TIKTOKEN_WORDS:
        raise ConfigurationError(
            f"{path} is in tiktoken's format, and how the tokenizer class {config.class_name or '(none)'} cuts words "
            "is not known; add a tokenizer.json to the folder"
        )
    return _composing(read_tiktoken(path, _TIKTOKEN_WORDS[config.class_name]), config)


def _byte_level(model_dir: Path, config: TokenizerConfig) -> Tokenizer:
    if config.class_name not in _BYTE_LEVEL_WORDS:
        raise ConfigurationError(
            f"{model_dir}: the tokenizer class {config.class_name} is not supported with {' and '.join(BYTE_LEVEL)}; "
            "add a tokenizer.json to the folder"
        )
    vocab, merges = BPE.read_file(*(str(model_dir / name) for name in BYTE_LEVEL))
    add_prefix_space = bool(config.raw.get("add_prefix_space", False))
    words = _BYTE_LEVEL_WORDS[config.class_name]
    return _composing(byte_level_tokenizer(BPE(vocab, merges), words, add_prefix_space=add_prefix_space), config)


def _composing(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    if config.class_name in _COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _add(tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Add tokens in the order of their ids. Raises ConfigurationError if one has another id then."""
    vocab_size = tokenizer.get_vocab_size()
    for id_, token in sorted(added.items()):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != id_:
            raise ConfigurationError(
                f"added token {token.content!r} should have id {id_}, after {vocab_size} others: "
                "added_tokens_decoder of tokenizer_config.json, or added_tokens.json, does not fit the vocabulary"
            )


def _content(value: object) -> str:
    """Return the text of a token, which the files store as a string or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _added_tokens(entries: object, special: Set[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens_decoder by id. Raises ConfigurationError."""
    if not isinstance(entries, dict):
        raise ConfigurationError(f"tokenizer_config.json: added_tokens_decoder must be an object, got {entries!r:.100}")
    for id_, entry in entries.items():
        if not (id_.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise ConfigurationError(
                "tokenizer_config.json: added_tokens_decoder must have an object with content for each id, got "
                f"{entry!r:.100} for {id_!r:.100}"
            )
    return {int(id_): _token_of_entry(entry, special) for id_, entry in entries.items()}


def _token_of_entry(entry: Mapping[str, Any], special: Set[str]) -> AddedToken:
    options = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "normalized", "single_word", "special")}
    options["special"] |= entry["content"] in special
    return AddedToken(entry["content"], **options)


def read_sentencepiece(path: Path, config: Mapping[str, Any], *, exact_spaces: bool) -> Tokenizer:
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
    merges = [pair for piece in vocab if piece not in special for pair in pairs_of(piece, vocab)]
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
