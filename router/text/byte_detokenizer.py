"""Token ids back to text where tokens are bytes, as with byte-level BPE: each is looked up, none is decoded twice.

What the general Detokenizer gets from decoding a window of ids at every step comes out here token by token; joined,
both give the text of all ids at once. A character whose bytes are not all there is held back.
"""

import codecs
from collections.abc import Callable

BytesOf = Callable[[int], bytes]
"""The bytes of a token; none for ids that the vocabulary does not have."""

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Text of one growing sequence. Special tokens are pushed only where their text is wanted."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._decode = _decoder_of_utf8("replace").decode

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        return self._decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """Whatever is still held back: there will be no more tokens."""
        return self._decode(b"", True)


class ByteVocabulary:
    """Bytes of each token; looked up once. `token_of` gives a token as the vocabulary spells it, None for unknown ids.

    Byte-level vocabularies (GPT-2, Radford et al. 2019) spell each byte as a visible character. Tokens with any other
    character in them, such as added ones, stand for themselves.
    """

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """See BytesOf."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = _bytes_of(self._token_of(token_id) or "")
        return found


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_chars() -> dict[str, int]:
    """Bytes that print stand for themselves, the others for characters from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_chars()
