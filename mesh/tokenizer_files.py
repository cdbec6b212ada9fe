"""A model's tokenizer, from whatever files its folder has. tokenizer.json says all; older checkpoints have other files:

    tokenizer.model             sentencepiece: Llama 2, Baichuan, InternLM, ChatGLM (mesh/sentencepiece_files.py)
    spiece.model                sentencepiece: T5 and its kind
    vocab.json, merges.txt      byte-level BPE: GPT-2, OPT, BLOOM, StarCoder

tokenizer_config.json, special_tokens_map.json and added_tokens.json say which tokens are special, and what is put
around a text. Ids are those that Hugging Face transformers gives. What a class adds to a sentencepiece model may
be in its code alone, so classes that are not known here are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from mesh.domain.errors import ConfigurationError
from mesh.model_files import ALL_IN_ONE, BYTE_LEVEL, SENTENCEPIECE, read_json, tokenizer_source

_CHATGLM = "ChatGLMTokenizer"

# The classes of sentencepiece models: whether a text gets a first and a last token where tokenizer_config.json does not
# say. InternLM's, Baichuan's and ChatGLM's are code beside their checkpoints, the others are transformers'.
_FRAMES = {
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

# ChatGLM's code numbers these behind the sentencepiece model, whatever the files say. Generation 2 lacks the roles; its
# rows for them exist, untrained.
_CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
_CHATGLM_FIRST = ["[gMASK]", "sop"]

_T5 = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": 100,
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What the files beside the vocabulary say."""

    raw: Mapping[str, Any]
    special: Mapping[str, str]
    """bos_token, eos_token, ... by these names."""
    added: Mapping[int, AddedToken]

    @classmethod
    def read(cls, model_dir: Path) -> "TokenizerConfig":
        """Raises ConfigurationError."""
        raw = read_json(model_dir / "tokenizer_config.json", optional=True)
        if tokenizer_source(model_dir) == SENTENCEPIECE[1]:
            raw = _T5 | raw  # the older ones do not say which class they are of
        special = read_json(model_dir / "special_tokens_map.json", optional=True) | dict(raw)
        names = {key: _content(value) for key, value in special.items() if key.endswith("_token")}
        added = {int(id_): _added_token(entry) for id_, entry in (raw.get("added_tokens_decoder") or {}).items()}
        for token, id_ in read_json(model_dir / "added_tokens.json", optional=True).items():
            added.setdefault(id_, AddedToken(token, normalized=False, special=token in names.values()))
        return cls(raw, {key: value for key, value in names.items() if value}, added)

    @property
    def class_name(self) -> str:
        """The name of its class in transformers, without Fast."""
        return str(self.raw.get("tokenizer_class") or "").removesuffix("Fast")

    def finish(self, tokenizer: Tokenizer) -> Tokenizer:
        """Add tokens, mark the special ones, put first and last ones around each text. Raises ConfigurationError."""
        known = tokenizer.get_vocab_size()
        added = self._with_tokens_of_class(known)
        for id_, token in sorted(added.items()):
            tokenizer.add_tokens([token])
            if tokenizer.token_to_id(token.content) != id_:
                raise ConfigurationError(f"added token {token.content!r} should have id {id_}, after {known} others")
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

    def _with_tokens_of_class(self, known: int) -> dict[int, AddedToken]:
        """Added tokens by id, with those that its class puts behind the `known` ones of the vocabulary."""
        if self.class_name != _CHATGLM:
            return dict(self.added)
        # Whole words only: "philosophy" has no sop.
        own = [
            AddedToken(token, normalized=False, special=True, single_word=token.isalpha()) for token in _CHATGLM_TOKENS
        ]
        return {**self.added, **dict(enumerate(own, known))}

    def _frame(self, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
        """First and last tokens."""
        if self.class_name == _CHATGLM:
            return _CHATGLM_FIRST, []
        defaults = _FRAMES.get(self.class_name, (False, False))
        found = []
        for key, default in zip(("bos", "eos"), defaults, strict=True):
            token = self.special.get(f"{key}_token", "")
            wanted = self.raw.get(f"add_{key}_token", default) and tokenizer.token_to_id(token) is not None
            found.append([token] if wanted else [])
        return found[0], found[1]


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises ConfigurationError that names the file at fault."""
    path = model_dir / tokenizer_source(model_dir)
    try:
        if path.name == ALL_IN_ONE:
            return Tokenizer.from_file(str(path))
        config = TokenizerConfig.read(model_dir)
        if path.name in SENTENCEPIECE:
            return config.finish(_sentencepiece(path, config))
        return config.finish(_byte_level(model_dir, config))
    except ConfigurationError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot load {path}: {error}") from error


def _sentencepiece(path: Path, config: TokenizerConfig) -> Tokenizer:
    from mesh.sentencepiece_files import read_sentencepiece

    tokenizer = read_sentencepiece(path, config.raw, exact_spaces=config.class_name == _CHATGLM)
    if config.class_name not in _FRAMES:
        raise ConfigurationError(
            f"{path}: what {config.class_name} adds to sentencepiece is not known; put a tokenizer.json beside it"
        )
    return tokenizer


def _byte_level(model_dir: Path, config: TokenizerConfig) -> Tokenizer:
    vocab, merges = BPE.read_file(*(str(model_dir / name) for name in BYTE_LEVEL))
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False))
    add_prefix_space = bool(config.raw.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _content(value: Any) -> str:
    """In the files a token is a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    options = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "normalized", "single_word", "special")}
    return AddedToken(_content(entry), **options)
