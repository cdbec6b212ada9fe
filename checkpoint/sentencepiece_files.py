"""Converts sentencepiece models (Kudo and Richardson 2018) to tokenizers of the `tokenizers` library.

A model is BPE (Llama 2, Mistral, Baichuan, InternLM, ChatGLM) or unigram (T5). Both spell a space as U+2581; BPE
encodes unknown characters as bytes. The file has no list of merges: two pieces merge if their concatenation is a piece,
and pieces with lower ids merge first.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from mesh.domain.errors import ConfigurationError

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_CONTROL, _USER_DEFINED = 3, 4  # ModelProto.SentencePiece.Type
_SENTINELS = "<extra_id_{}>"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def read_sentencepiece(path: Path, config: Mapping[str, Any], *, exact_spaces: bool = False) -> Tokenizer:
    """Return the tokenizer without the tokens that transformers adds around a text. `exact_spaces` puts a space before
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
    tokenizer.add_tokens([_added(piece.piece, special=piece.type == _CONTROL) for piece in added])
    unknown = model.pieces[model.trainer_spec.unk_id].piece
    tokenizer.add_special_tokens([_added(unknown, special=True)])
    return tokenizer


def _parse(path: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    content = path.read_bytes()
    if _TIKTOKEN_LINE.match(content):
        raise ConfigurationError(
            f"{path} is in tiktoken's format, which is not supported; add a tokenizer.json to the folder"
        )
    try:
        model.ParseFromString(content)
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


def _pairs(piece: str, vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is this piece, sorted by their ids."""
    cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
    pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
    return iter(sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])))


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
    tokenizer.add_special_tokens([_added(sentinel, special=True) for sentinel in sentinels])
    return tokenizer


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)
