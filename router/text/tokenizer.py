"""The model's tokenizer, loaded from its checkpoint folder, and the way back: token ids to text, one at a time.

Encoding a text of a few MiB takes seconds. Only the library's batch functions release the interpreter lock, so those
are used, for one text at a time. `max_token_chars` bounds how many characters one token can stand for, so that texts
that are too long are refused before any work. Such a bound exists only if every character of a text becomes part of a
token: not for tokenizers that drop characters, merge runs of unknown characters into one token, or let a token swallow
the white space around it.

Detokenizing takes linear time. `Detokenizer` works with any tokenizer. Text that ends in U+FFFD may end in an
incomplete character, so it is held back. Text that was returned is never revised; joined, it equals decoding all ids at
once, provided they are valid UTF-8. Invalid byte-fallback tokens may show as more or fewer U+FFFD than when decoded at
once. Every step decodes a window of the newest ids (as the prefix and read offsets of Text Generation Inference do).
The window is cut only at clean boundaries, with no incomplete character, and keeps at least one token of context,
because decoders treat the first token of a text differently.

`ByteDetokenizer` is for byte-level BPE, whose tokens are byte strings: it looks up the bytes of each token, decodes no
token twice, and gives the same text.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Required, TypedDict

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from checkpoint.tokenizer_files import load_tokenizer, own_end_token

BytesOf = Callable[[int], bytes]
"""Returns the bytes of a token; empty for ids that are not in the vocabulary."""
Decode = Callable[[Sequence[int]], str]
"""Returns the text of some token ids, whatever is around them; incomplete characters show as U+FFFD."""

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")

_PARTIAL = "\ufffd"
_SPACE_MARK = "▁"  # of SentencePiece
_MAX_WINDOW = 12
# Tokens of the text before an answer that its detokenizer looks at.
_MIN_CONTEXT, _MAX_CONTEXT = 4, 24
# No character needs this many tokens: such bytes are not UTF-8, or the tokens straddle characters.
_MAX_PENDING = 16
# An incomplete character has at most three bytes, which a decoder shows as one to three U+FFFD.
_MAX_PARTIAL_CHARS = 3
# No canonical composition joins more than four characters into one (Unicode Standard Annex 15).
_MAX_COMPOSED = 4
_COMPOSING = ("NFC", "NFKC")
_KEEPING_NORMALIZERS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", *_COMPOSING)
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_CUTTING_PRE_TOKENIZERS = ("Split", "Punctuation")


class ByteDetokenizer:
    """The text of one sequence. Push special tokens only if their text is wanted."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._decode = _decoder_of_utf8("replace").decode

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        return self._decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        return self._decode(b"", True)


class ByteVocabulary:
    """A cached BytesOf. `token_of` returns a token as the vocabulary spells it, None for unknown ids.

    Byte-level vocabularies (GPT-2, Radford et al. 2019) spell each byte as a visible character. Tokens with any other
    character in them, such as added ones, stand for themselves.
    """

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        token_bytes = self._known.get(token_id)
        if token_bytes is None:
            token_bytes = self._known[token_id] = _bytes_of(self._token_of(token_id) or "")
        return token_bytes


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_chars() -> dict[str, int]:
    """Printable bytes stand for themselves, the others are mapped to characters from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_chars()


class Detokenizer:
    """The text of one sequence. Push special tokens only if their text is wanted. `before`: the tokens with text that
    the sequence continues; theirs is not returned.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = _context(decode, before)
        self._text = decode(self._window) if self._window else ""  # of the window
        self._sent = len(self._text)  # characters of `_text` already returned
        self._pending = 0  # tokens since a clean boundary
        self._boundary = 0  # clean boundary before the newest one, as an index into the window

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        self._window.append(token_id)
        self._pending += 1
        self._text = self._decode(self._window)
        if not self._text.endswith(_PARTIAL):
            fresh = self._release_until(len(self._text))
            self._cut_at_boundary()
            return fresh
        if self._pending <= _MAX_PENDING:
            return ""
        fresh = self._release_until(len(self._text) - _trailing_partials(self._text))
        self._cut_anywhere()
        return fresh

    def flush(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        return self._release_until(len(self._text))

    def _release_until(self, end: int) -> str:
        fresh = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return fresh

    def _cut_at_boundary(self) -> None:
        """All text is returned: drop old ids, but keep those since the previous boundary."""
        if len(self._window) > _MAX_WINDOW and self._boundary:
            del self._window[: self._boundary]
            self._text = self._decode(self._window)
            self._sent = len(self._text)
        self._boundary = len(self._window)
        self._pending = 0

    def _cut_anywhere(self) -> None:
        """Cut without a clean boundary: the held-back end of the text does not depend on ids this old."""
        if len(self._window) > 2 * _MAX_PENDING:
            held = len(self._text) - self._sent
            del self._window[:-_MAX_PENDING]
            self._text = self._decode(self._window)
            self._sent = len(self._text) - held
            self._boundary = 0


def _context(decode: Decode, before: Sequence[int]) -> list[int]:
    """The last of these tokens, cut where no character is; none if their text ends within a character."""
    for length in range(min(_MIN_CONTEXT, len(before)), min(_MAX_CONTEXT, len(before)) + 1):
        ids = list(before[len(before) - length :])
        if _PARTIAL not in decode(ids):
            return ids
    return []


def _trailing_partials(text: str) -> int:
    return min(_MAX_PARTIAL_CHARS, len(text) - len(text.rstrip(_PARTIAL)))


IncrementalDetokenizer = Detokenizer | ByteDetokenizer


class _Component(TypedDict, total=False):
    """A normalizer or pre-tokenizer in the format of tokenizer.json; a Sequence has members."""

    type: Required[str]
    normalizers: list["_Component"]
    pretokenizers: list["_Component"]
    pattern: dict[str, str]
    content: str
    behavior: str


def max_token_chars(tokenizer: NativeTokenizer) -> int | None:
    """Return the maximum number of characters that one token can stand for; None if there is no bound."""
    normalizers, pre_tokenizers = _components(tokenizer.normalizer), _components(tokenizer.pre_tokenizer)
    added = tokenizer.get_added_tokens_decoder().values()
    if not (
        all(map(_keeps_length, normalizers))
        and all(map(_keeps_text, pre_tokenizers))
        and _knows_every_character(tokenizer, [*normalizers, *pre_tokenizers])
        and not any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    composed = any(part["type"] in _COMPOSING for part in normalizers)
    return longest * (_MAX_COMPOSED if composed else 1)


def _components(component: Normalizer | PreTokenizer | None) -> list[_Component]:
    """Return the members of a component in the format of tokenizer.json."""
    if component is None:
        return []
    return list(_flat(json.loads(component.__getstate__())))


def _flat(state: _Component) -> Iterable[_Component]:
    members = state.get("normalizers") or state.get("pretokenizers")
    if state.get("type") == "Sequence":
        for member in members or []:
            yield from _flat(member)
    else:
        yield state


def _keeps_length(normalizer: _Component) -> bool:
    """True if the normalizer makes no text shorter, except by composition, which _MAX_COMPOSED covers."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return normalizer["type"] in _KEEPING_NORMALIZERS


def _keeps_text(pre_tokenizer: _Component) -> bool:
    """True if the pre-tokenizer drops no character."""
    if pre_tokenizer["type"] in _CUTTING_PRE_TOKENIZERS:
        return str(pre_tokenizer.get("behavior", "")).lower() != "removed"
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_every_character(tokenizer: NativeTokenizer, components: list[_Component]) -> bool:
    """True if the model falls back to bytes for unknown text and has a token for each byte."""
    if not isinstance(tokenizer.model, BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in components):
        return all(tokenizer.token_to_id(char) is not None for char in pre_tokenizers.ByteLevel.alphabet())
    return bool(tokenizer.model.byte_fallback) and all(
        tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )


class TextToken(NamedTuple):
    """A prompt token with the text it adds. A NamedTuple, because prompts have many."""

    id: int
    text: str
    special: bool


class Tokenizer:
    """Text to ids and back. `eos_token_ids`, which end an answer, count as special even if the tokenizer does not mark
    them.
    """

    def __init__(self, native: NativeTokenizer, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._native = native
        self.eos_token_ids = eos_token_ids
        added = native.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special) | eos_token_ids
        self._text_by_id: dict[int, str] = {}
        is_bytes = type(native.decoder) is decoders.ByteLevel
        self._bytes_of = ByteVocabulary(native.id_to_token) if is_bytes else None
        fallbacks = {native.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
        self._bytes_by_id = {id_: byte for id_, byte in fallbacks.items() if id_ is not None}
        self._max_token_chars = max_token_chars(native)

    @classmethod
    def load(cls, model_dir: Path, eos_token_ids: frozenset[int]) -> "Tokenizer":
        """The tokenizer's own end token is added to `eos_token_ids`. Raises ConfigurationError if the tokenizer files
        are missing or broken.
        """
        native = load_tokenizer(model_dir)
        return cls(native, eos_token_ids | own_end_token(native, model_dir))

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this name, None if there is none."""
        token_id = self._native.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def max_chars(self, num_tokens: int) -> int | None:
        """Return how many characters `num_tokens` tokens can stand for at most; None if there is no bound."""
        return None if self._max_token_chars is None else num_tokens * self._max_token_chars

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids. Releases the interpreter lock, so long texts can be encoded on a thread."""
        ids: list[int] = self._native.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all ids, without special tokens."""
        return self._decode_plain([id_ for id_ in token_ids if id_ not in self.special_ids])

    def detokenizer(self, before: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Return a new incremental detokenizer that suits this tokenizer, for the text that continues that of `before`.
        Many decoders drop the space of a text's first token.
        """
        if self._bytes_of is not None:
            return ByteDetokenizer(self._bytes_of)
        near = before[-2 * _MAX_CONTEXT :]
        return Detokenizer(self._decode_plain, [id_ for id_ in near if id_ not in self.special_ids])

    def text_of(self, token_id: int, *, begins: bool = False) -> str:
        """Return the text of one token within a text, or if it `begins` one; special tokens are spelt out."""
        if begins:
            return self._decode_plain([token_id])
        text = self._text_by_id.get(token_id)
        if text is None:
            text = self._text_by_id[token_id] = self._text_within(token_id)
        return text

    def bytes_of(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that adds `text`; they may begin or end within a character."""
        if self._bytes_of is not None:
            return self._bytes_of(token_id)
        if text.startswith(_PARTIAL):  # of tokens before, whose bytes this one shows to be no character
            text = self.text_of(token_id)
        return self._bytes_by_id.get(token_id) or text.encode()

    def _text_within(self, token_id: int) -> str:
        text = self._decode_plain([token_id])
        spelt = "" if self._bytes_of is not None else self._native.id_to_token(token_id) or ""
        with_space = spelt.replace(_SPACE_MARK, " ")
        return with_space if with_space == f" {text}" else text

    def pieces(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[TextToken]:
        """Return each id with the text it adds. Special tokens add none, so that the joined texts equal
        `decode(token_ids)`, or else their names.
        """
        detokenizer = self.detokenizer()
        skipped = self.special_ids if skip_special_tokens else frozenset()
        tokens = list(self._push_all(detokenizer, token_ids, skipped))
        tail = detokenizer.flush()
        for index in range(len(tokens) - 1, -1, -1):
            if tokens[index].id not in skipped:
                tokens[index] = tokens[index]._replace(text=tokens[index].text + tail)
                break
        return tokens

    def _push_all(
        self, detokenizer: IncrementalDetokenizer, token_ids: Sequence[int], skipped: frozenset[int]
    ) -> Iterator[TextToken]:
        for token_id in token_ids:
            text = "" if token_id in skipped else detokenizer.push(token_id)
            yield TextToken(token_id, text, token_id in self.special_ids)

    def _decode_plain(self, token_ids: Sequence[int]) -> str:
        text: str = self._native.decode_batch([token_ids], skip_special_tokens=False)[0]
        return text
