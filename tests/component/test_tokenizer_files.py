"""Tokenizers without tokenizer.json: ids and texts are those of transformers, and of sentencepiece itself."""

import json
import os
import random
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import sentencepiece
import tiktoken
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

from checkpoint.tokenizer_fingerprint import BYTE_LEVEL, tokenizer_fingerprint
from mesh.domain.errors import ConfigurationError
from router.text.chat import ChatMessage, ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.fakes.tokenizers import (
    TEKKEN_WORDS,
    TEXT,
    write_glm4,
    write_gpt2,
    write_hunyuan,
    write_kimi,
    write_llama,
    write_t5,
    write_tekken,
)

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "two  spaces   three\n\nlines\tand a tab",
    "",
    " ",
    "Löwe à Orléans, naïve café — “quotes” …",
    "日本語 と 中文, Привет мир",
    "😀👨‍👩‍👧‍👦🇫🇷 é vs é",
    "\u0000\u200b\ufeff odd \ue000 private",
    "</s> <s> <|endoftext|> <unk> in the text",
    "12345 + 67890 = 80235; f(x) -> y != z",
    "▁ the space mark itself",
    "ﬁ ligature, ① circled, ½",
    "(self)\n\n\ndef f(): 12345",
    "I'LL do it, don't; Cafe\u0301",
]
Write = Callable[..., Path]
GPT2_END = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
QWEN2 = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
GPT_NEOX = {"tokenizer_class": "GPTNeoXTokenizerFast", **GPT2_END}
ROBERTA = {
    "tokenizer_class": "RobertaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "added_tokens_decoder": {
        str(400 + place): {"content": token, "special": True, "lstrip": token == "<mask>"}
        for place, token in enumerate(("<s>", "</s>", "<unk>", "<pad>", "<mask>"))
    },
}
OPT = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>", "add_bos_token": True}
KINDS: dict[str, Write] = {
    "llama": partial(write_llama, add_bos_token=True),
    "llama-legacy": partial(write_llama, add_bos_token=True, legacy=True),
    "llama-framed": partial(write_llama, add_bos_token=False, add_eos_token=True),
    "t5": write_t5,
    "gpt2": partial(write_gpt2, **GPT2_END),
    "opt": partial(write_gpt2, **OPT),
    "qwen2": partial(write_gpt2, **QWEN2),
    "gpt-neox": partial(write_gpt2, **GPT_NEOX),
    "roberta": partial(write_gpt2, **ROBERTA),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, frozenset())


def test_ids_and_texts_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), (
            text
        )


def test_streaming_gives_the_text_of_all_ids(folder: Path) -> None:
    tokenizer = load(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert "".join(piece.text for piece in tokenizer.pieces(ids)) == tokenizer.decode(ids), text


@pytest.mark.parametrize("write", [write_llama, write_t5])
def test_ids_are_those_of_sentencepiece(write: Write, tmp_path: Path) -> None:
    """But for a space at the beginning, which transformers takes for the one that is put there."""
    ours = load(write(tmp_path))
    theirs: Any = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in (text for text in TEXTS[:8] if not text.startswith(" ")):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text


def test_t5_has_a_file_of_its_own_name_and_may_say_nothing_else(tmp_path: Path) -> None:
    said, silent = write_t5(tmp_path / "said", extra_ids=100), write_t5(tmp_path / "silent")
    (silent / "tokenizer.model").rename(silent / "spiece.model")
    (silent / "tokenizer_config.json").unlink()
    for text in TEXTS:
        ids = [load(folder).encode(text, add_special_tokens=True) for folder in (said, silent)]
        assert ids[0] == ids[1]
        assert ids[1][-1] == 1


def test_added_tokens_have_the_ids_that_the_files_say(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<tool>": 420, "<pad>": 421}')
    tokenizer = load(tmp_path)
    assert tokenizer.encode("a<tool>b", add_special_tokens=False)[1:2] == [420]
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<tool>": 500}')
    assert tokenizer_fingerprint(tmp_path) != before
    with pytest.raises(ConfigurationError, match="added token '<tool>' should have id 500"):
        load(tmp_path)


def all_in_one(folder: Path, **config: object) -> Path:
    """tokenizer.json with 400 tokens, and tokenizer_config.json."""
    ByteLevelBPETokenizer(*(str(write_gpt2(folder) / name) for name in BYTE_LEVEL)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return folder


def test_tokens_that_tokenizer_json_lacks_are_added(tmp_path: Path) -> None:
    """As transformers does, in the order of their ids, so that a text of the chat template is one token."""
    listed = {"401": {"content": "<|end|>"}, "400": {"content": "<|user|>", "special": True}, "1": {"content": "!"}}
    folder = all_in_one(tmp_path, added_tokens_decoder=listed, eos_token="<|end|>")
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    text = "<|user|>Hello! world<|end|>"
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ids[0], ids[-1]) == (400, 401)
    assert ours.eos_token_ids == {401}
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "Hello! world"


def test_tokens_that_would_get_another_id_are_refused_by_name(tmp_path: Path) -> None:
    folder = all_in_one(tmp_path, added_tokens_decoder={"405": {"content": "<|user|>"}})
    with pytest.raises(ConfigurationError, match=r"added token '<\|user\|>' should have id 405, after 400 others"):
        load(folder)


@pytest.mark.parametrize("listed", [[{"content": "x"}], {"5": "x"}, {"x": {"content": "x"}}, {"5": {}}, {"5": None}])
@pytest.mark.parametrize("write", [all_in_one, write_gpt2])
def test_added_tokens_of_another_form_are_named(tmp_path: Path, write: Write, listed: object) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json: added_tokens_decoder must"):
        load(write(tmp_path, added_tokens_decoder=listed))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text('{"<x>": "5"}')
    with pytest.raises(ConfigurationError, match=r"added_tokens\.json: the id of '<x>' must be an integer, got '5'"):
        load(tmp_path)


@pytest.mark.parametrize("listed", [{}, {"421": {"content": "[gMASK]", "special": True}}], ids=["silent", "listed"])
def test_chatglm_frames_texts_with_tokens_behind_its_model(listed: dict[str, object], tmp_path: Path) -> None:
    """As its own code does around sentencepiece, whether its files list some of the tokens or not."""
    ours = load(write_llama(tmp_path, tokenizer_class="ChatGLMTokenizer", added_tokens_decoder=listed))
    theirs: Any = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    gmask, sop, user, assistant = 421, 423, 426, 427
    for text in (*TEXTS[:8], "a philosophy of gossip"):
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == [gmask, sop, *theirs.encode(text)], text
        assert ours.decode(ids) == text
    chat = ours.encode("[gMASK]sop<|user|>\n  Hello world<|assistant|>", add_special_tokens=False)
    assert chat == [gmask, sop, user, *theirs.encode("\n  Hello world"), assistant]
    assert {420, 422, 424, 425, 428} < ours.special_ids


def test_internlm_2_begins_with_a_token_as_the_first_one_does(tmp_path: Path) -> None:
    assert (
        load(write_llama(tmp_path, tokenizer_class="InternLM2Tokenizer")).encode("a", add_special_tokens=True)[0] == 1
    )


def test_classes_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path, tokenizer_class="OrionTokenizer")
    with pytest.raises(ConfigurationError, match=r"OrionTokenizer is not supported; add a tokenizer\.json"):
        load(tmp_path)
    assert load(write_llama(tmp_path, tokenizer_class=None)).encode("a", add_special_tokens=True)[0] != 1
    bart = write_gpt2(tmp_path / "bart", tokenizer_class="BartTokenizer")
    with pytest.raises(
        ConfigurationError, match=r"BartTokenizer is not supported with vocab\.json and merges\.txt; add"
    ):
        load(bart)


_GLM4_WORDS = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def awkward_texts() -> list[str]:
    rng = random.Random(3)
    words = "".join(TEXT).split(" ")
    mixed = ("".join(rng.choice([" ", "", "\n", "'s"]) + rng.choice(words) for _ in range(30)) for _ in range(20))
    return [*TEXTS, *mixed]


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tokens = write_glm4(tmp_path)
    special = {token: len(tokens) + i for i, token in enumerate(("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>"))}
    theirs = tiktoken.Encoding("glm4", pat_str=_GLM4_WORDS, mergeable_ranks=tokens, special_tokens=special)
    ours = load(tmp_path)
    for text in awkward_texts():
        ids = theirs.encode(text, allowed_special=set(special))
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text, add_special_tokens=True) == [special["[gMASK]"], special["<sop>"], *ids], text
        assert "".join(piece.text for piece in ours.pieces(ids)) == ours.decode(ids), text
    chat = ours.encode("[gMASK]<sop><|user|>\nHello", add_special_tokens=False)
    assert chat == [special["[gMASK]"], special["<sop>"], special["<|user|>"], *theirs.encode("\nHello")]


_KIMI_WORDS = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *_GLM4_WORDS.split("|")[-5:],
    ]
)
_HUNYUAN_WORDS = _GLM4_WORDS.replace("{1,3}", "")


@pytest.mark.parametrize(
    ("write", "words", "special"),
    [
        (
            write_kimi,
            _KIMI_WORDS,
            {"[BOS]": 0, "<|im_end|>": 2, "<|tool_call_begin|>": 11, "<|reserved_token_675|>": 255},
        ),
        (write_hunyuan, _HUNYUAN_WORDS, {"<|endoftext|>": 0, "<|eos|>": 3, "<|extra_204|>": 209}),
    ],
    ids=["kimi", "hunyuan"],
)
def test_ids_of_classes_that_checkpoints_ship_are_those_of_tiktoken(
    write: Callable[[Path], dict[bytes, int]], words: str, special: dict[str, int], tmp_path: Path
) -> None:
    tokens = write(tmp_path)
    theirs = tiktoken.Encoding("theirs", pat_str=words, mergeable_ranks=tokens, special_tokens={})
    ours = load(tmp_path)
    for text in [*awkward_texts(), "GPT4发布于2023年 中文English中文 the models' weights I'Ve"]:
        composed = unicodedata.normalize("NFC", text) if write is write_hunyuan else text
        if "<|endoftext|>" not in text:
            assert ours.encode(text, add_special_tokens=True) == theirs.encode(composed), text
    for token, place in special.items():
        assert ours.encode(f"a{token}", add_special_tokens=False)[-1] == len(tokens) + place
    assert ours.eos_token_ids == {len(tokens) + (1 if write is write_kimi else 3)}


def test_tiktoken_of_classes_that_are_not_known_is_refused_by_name(tmp_path: Path) -> None:
    write_glm4(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XTokenizer"}')
    with pytest.raises(ConfigurationError, match=r"the tokenizer class XTokenizer cuts words is not known; add"):
        load(tmp_path)


def test_a_broken_vocabulary_of_tiktoken_is_named(tmp_path: Path) -> None:
    write_glm4(tmp_path)
    path = tmp_path / "tokenizer.model"
    for line in ("IQ= 500", "IQ==", "IQ== x"):
        path.write_text(path.read_text() + f"{line}\n")
        with pytest.raises(ConfigurationError, match=r"tokenizer\.model is broken: a line is not a token in base 64"):
            load(tmp_path)


@pytest.mark.parametrize("special", [None, ["<unk>", "<s>", "</s>", "[THINK]"]], ids=["unlisted", "listed"])
def test_mistral_has_special_tokens_in_front_of_tiktokens(tmp_path: Path, special: list[str] | None) -> None:
    """As mistral-common has, which cuts and merges by tiktoken."""
    ranks = write_tekken(tmp_path, special)
    theirs = tiktoken.Encoding("tekken", pat_str=TEKKEN_WORDS, mergeable_ranks=ranks, special_tokens={})
    ours = load(tmp_path)
    for text in awkward_texts():
        if "<s>" in text:
            continue
        ids = [50 + rank for rank in theirs.encode(text)]
        assert ours.encode(text, add_special_tokens=True) == [1, *ids], text
        assert "".join(piece.text for piece in ours.pieces(ids)) == ours.decode(ids) == text
    chat = ours.encode(f"{special[3] if special else '[INST]'}</s><SPECIAL_49>", add_special_tokens=False)
    assert chat == [3, 2, 49]
    assert (ours.eos_token_ids, len(ours.special_ids)) == ({2}, 50)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([ChatMessage("user", "Hi")]) == "<s>[INST]Hi[/INST]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {}}, "KeyError: 'default_num_special_tokens'"),
        ({"vocab": []}, "it does not have 400 tokens in a row"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "Error: "),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "ranks of special tokens are not 0, 1, 2"),
        ({"special_tokens": [{"rank": i, "token_str": "<s>"} for i in (0, 1)]}, "special tokens must be 50 different"),
    ],
)
def test_a_broken_vocabulary_of_mistral_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    write_tekken(tmp_path)
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigurationError, match=rf"tekken\.json is broken: .*{message}"):
        load(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no tokenizer: neither tokenizer\.json nor tokenizer\.model nor"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.model is no sentencepiece model"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"cannot load .*tokenizer\.json"):
        load(tmp_path)
