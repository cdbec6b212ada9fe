"""The model's tokenizer, as its checkpoint folder has it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.decoders import ByteLevel

from mesh.tokenizer_files import load_tokenizer
from router.text.byte_detokenizer import ByteDetokenizer, ByteVocabulary
from router.text.detokenizer import Detokenizer, IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token of a prompt with the text it adds; special tokens add none."""

    id: int
    text: str
    special: bool


class Tokenizer:
    """Text to ids and back. `eos_token_ids` count as special even where the tokenizer does not say so."""

    def __init__(self, native: NativeTokenizer, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._native = native
        # tokenizer.json may ask to cut or pad every text; a prompt must never be changed silently.
        native.no_truncation()
        native.no_padding()
        added = native.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special) | eos_token_ids
        self._alone: dict[int, str] = {}
        is_bytes = type(native.decoder) is ByteLevel
        self._bytes_of = ByteVocabulary(native.id_to_token) if is_bytes else None

    @classmethod
    def load(cls, model_dir: Path, eos_token_ids: frozenset[int]) -> "Tokenizer":
        """Raises ConfigurationError if its files are missing or broken."""
        return cls(load_tokenizer(model_dir), eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Releases the interpreter lock, so long texts may be encoded on a thread."""
        ids: list[int] = self._native.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, special tokens left out."""
        return self._decode_plain([id_ for id_ in token_ids if id_ not in self.special_ids])

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self._decode_plain) if self._bytes_of is None else ByteDetokenizer(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        """Text of one token on its own, special tokens spelt out."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode_plain([token_id])
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[TextToken]:
        """Each id with the text it adds; joined, the texts are `decode(token_ids)`."""
        detokenizer = self.detokenizer()
        tokens = list(self._push_all(detokenizer, token_ids))
        rest = detokenizer.flush()
        for index in range(len(tokens) - 1, -1, -1):
            if not tokens[index].special:
                tokens[index] = TextToken(tokens[index].id, tokens[index].text + rest, special=False)
                break
        return tokens

    def _push_all(self, detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> Iterator[TextToken]:
        for token_id in token_ids:
            special = token_id in self.special_ids
            yield TextToken(token_id, "" if special else detokenizer.push(token_id), special)

    def _decode_plain(self, token_ids: Sequence[int]) -> str:
        text: str = self._native.decode(token_ids, skip_special_tokens=False)
        return text
