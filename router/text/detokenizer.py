"""Token ids back to text, one at a time, in linear time.

`Detokenizer` works with any tokenizer. Text that ends in U+FFFD may end in an incomplete character, so it is held back.
Text that was returned is never revised; joined, it equals decoding all ids at once, provided they are valid UTF-8.
Invalid byte-fallback tokens may show as more or fewer U+FFFD than when decoded at once. Every step decodes a window of
the newest ids (as the prefix and read offsets of Text Generation Inference do). The window is cut only at clean
boundaries, with no incomplete character, and keeps at least one token of context, because decoders treat the first
token of a text differently.

`ByteDetokenizer` is for byte-level BPE, whose tokens are byte strings: it looks up the bytes of each token, decodes no
token twice, and gives the same text.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

BytesOf = Callable[[int], bytes]
"""Returns the bytes of a token; empty for ids that are not in the vocabulary."""

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")


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


_PARTIAL = "\ufffd"
_MAX_WINDOW = 12
# No character needs this many tokens: such bytes are not UTF-8, or the tokens straddle characters.
_MAX_PENDING = 16
# An incomplete character has at most three bytes, which a decoder shows as one to three U+FFFD.
_MAX_PARTIAL_CHARS = 3


class Decoder(Protocol):
    """Decodes a run of token ids independently of others."""

    def __call__(self, token_ids: Sequence[int], /) -> str:
        """Return the text of the ids; incomplete characters show as U+FFFD."""
        ...


class IncrementalDetokenizer(Protocol):
    """The text of one sequence. Plug point: Detokenizer, and ByteDetokenizer for byte-level vocabularies."""

    def push(self, token_id: int, /) -> str:
        """Return the text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        ...


class Detokenizer:
    """The text of one sequence. Push special tokens only if their text is wanted."""

    def __init__(self, decode: Decoder) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._sent = 0  # characters of `_text` already returned
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


def _trailing_partials(text: str) -> int:
    return min(_MAX_PARTIAL_CHARS, len(text) - len(text.rstrip(_PARTIAL)))
