"""Token ids back to text, one at a time, in linear time.

Text that ends in U+FFFD may be a character whose bytes are not all there, so it is held back. What has been let out is
never revised, and everything let out, joined, is what decoding all ids at once gives.

A window of the newest ids is decoded at every step (as in Text Generation Inference's prefix and read offsets). It is
cut only at clean boundaries, where no character was under way, and keeps at least one token of context, because
decoders treat the first token of a text in their own way.
"""

from collections.abc import Sequence
from typing import Protocol

_PARTIAL = "\ufffd"
_MAX_WINDOW = 12
# No character needs as many tokens: bytes this long under way are not UTF-8, or tokens that straddle characters.
_MAX_PENDING = 16
# At most three bytes of a character can be missing their fourth; a decoder shows them as one to three U+FFFD.
_MAX_PARTIAL_CHARS = 3


class Decoder(Protocol):
    """Decodes a run of token ids on its own."""

    def __call__(self, token_ids: Sequence[int], /) -> str:
        """Text of the ids; incomplete characters show as U+FFFD."""
        ...


class IncrementalDetokenizer(Protocol):
    """Text of one growing sequence. Plug point: Detokenizer, and ByteDetokenizer where tokens are bytes."""

    def push(self, token_id: int, /) -> str:
        """Text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """Whatever is still held back: there will be no more tokens."""
        ...


class Detokenizer:
    """Text of one growing sequence. Special tokens are pushed only where their text is wanted."""

    def __init__(self, decode: Decoder) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._sent = 0  # characters of `_text` already let out
        self._pending = 0  # tokens since a clean boundary
        self._boundary = 0  # clean boundary before the newest one, as an index into the window

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        self._window.append(token_id)
        self._pending += 1
        self._text = self._decode(self._window)
        if not self._text.endswith(_PARTIAL):
            fresh = self._let_out(len(self._text))
            self._cut_at_boundary()
            return fresh
        if self._pending <= _MAX_PENDING:
            return ""
        fresh = self._let_out(len(self._text) - _trailing_partials(self._text))
        self._cut_anywhere()
        return fresh

    def flush(self) -> str:
        """Whatever is still held back: there will be no more tokens."""
        return self._let_out(len(self._text))

    def _let_out(self, end: int) -> str:
        fresh = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return fresh

    def _cut_at_boundary(self) -> None:
        """Everything is out. Drop old ids, but keep those since the boundary before this one."""
        if len(self._window) > _MAX_WINDOW and self._boundary:
            del self._window[: self._boundary]
            self._text = self._decode(self._window)
            self._sent = len(self._text)
        self._boundary = len(self._window)
        self._pending = 0

    def _cut_anywhere(self) -> None:
        """No clean boundary in sight. The held-back end of the text does not depend on ids this old."""
        if len(self._window) > 2 * _MAX_PENDING:
            held = len(self._text) - self._sent
            del self._window[:-_MAX_PENDING]
            self._text = self._decode(self._window)
            self._sent = len(self._text) - held
            self._boundary = 0


def _trailing_partials(text: str) -> int:
    return min(_MAX_PARTIAL_CHARS, len(text) - len(text.rstrip(_PARTIAL)))
