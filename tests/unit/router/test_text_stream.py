"""Text out of tokens: nothing lost, nothing revised, stop strings found wherever they are cut."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer

from router.text.text_stream import StopMatcher, TextStream
from router.text.tokenizer import Detokenizer, Tokenizer
from tests.fakes.router_model import BOS_ID, EOS_ID, byte_level_tokenizer, write_checkpoint
from tests.fakes.tokenizers import write_gpt2, write_llama


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), frozenset({EOS_ID}))


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words with a space mark, and bytes for everything unknown."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {word: 257 + place for place, word in enumerate(["▁", "▁a", "a", "b", "▁hello", "lo"])}
    native = NativeTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    native.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(native)


@functools.cache
def wordpiece() -> Tokenizer:
    """As BERT's: words, with spaces between them that no token has."""
    native = NativeTokenizer(models.WordPiece({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    native.decoder = decoders.WordPiece()
    native.add_special_tokens([AddedToken("[SEP]", special=True)])
    return Tokenizer(native)


def byte_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    if tokenizer is byte_fallback():
        return [byte + 1 for byte in text.encode()]
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tokenizer._native.get_vocab()[char] for piece, _ in spelt for char in piece]


@given(st.lists(st.integers(0, 339), max_size=80))
@settings(max_examples=300)
def test_any_ids_join_to_decoding_all_at_once(ids: list[int]) -> None:
    tokenizer = byte_level()
    assert "".join(piece.text for piece in tokenizer.pieces(ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(3, 339), max_size=80))
@settings(max_examples=200)
def test_both_ways_to_text_agree(ids: list[int]) -> None:
    """Where tokens are bytes they are looked up; decoding windows of them, as for other vocabularies, is the same."""
    tokenizer = byte_level()
    windows, ids = Detokenizer(tokenizer.decode), [id_ for id_ in ids if id_ not in tokenizer.special_ids]
    assert "".join([*map(windows.push, ids), windows.flush()]) == tokenizer.decode(ids)


@given(st.text(alphabet="aé日😀😂🤗 \n\u200d", max_size=40), st.booleans())
@settings(max_examples=200)
def test_any_text_comes_back(text: str, split_bytes: bool) -> None:
    tokenizer = byte_level()
    ids = byte_ids(text, tokenizer) if split_bytes else tokenizer.encode(text, add_special_tokens=False)
    assert "".join(piece.text for piece in tokenizer.pieces(ids)) == text


@given(st.text(alphabet="ab é日😀😂", max_size=40))
@settings(max_examples=200)
def test_byte_fallback_text_comes_back(text: str) -> None:
    tokenizer = byte_fallback()
    ids = [257, *byte_ids(text, tokenizer), 261, 258]
    assert "".join(piece.text for piece in tokenizer.pieces(ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(1, 262), max_size=40), st.integers(0, 40))
@settings(max_examples=300)
def test_an_answer_continues_the_text_of_its_prompt(ids: list[int], cut: int) -> None:
    """Also where its first token begins with a space, which a decoder drops at the beginning of a text."""
    tokenizer = byte_fallback()
    before, after = ids[:cut], ids[cut:]
    expected = tokenizer.decode(ids)
    if "\ufffd" in expected or "\ufffd" in tokenizer.decode(before):
        return  # a character is cut in two
    stream = TextStream(tokenizer, before)
    assert tokenizer.decode(before) + "".join(map(stream.push, after)) + stream.flush() == expected


def test_an_answer_behind_half_a_character_begins_anew() -> None:
    tokenizer = byte_fallback()
    hello, first_half = 261, byte_ids("é", tokenizer)[:1]
    assert shown_by([hello], tokenizer, before=[hello]) == " hello"
    assert shown_by([hello], tokenizer, before=[hello, *first_half]) == "hello"
    long = [*byte_ids("日" * 50, tokenizer)]
    assert shown_by([*long, hello], tokenizer, before=long) == "日" * 50 + " hello"


def test_special_tokens_of_the_prompt_are_no_context() -> None:
    tokenizer = wordpiece()
    plain, special = tokenizer.encode("hello", add_special_tokens=False), sorted(tokenizer.special_ids)
    assert shown_by(plain, tokenizer, before=[*plain, *special]) == " hello"
    assert shown_by(plain, tokenizer, before=special) == "hello"


def test_a_token_within_a_text_has_its_space() -> None:
    tokenizer = byte_fallback()
    texts = [tokenizer.text_of(token_id) for token_id in (257, 258, 259, 261)]
    assert texts == [" ", " a", "a", " hello"]
    assert tokenizer.text_of(261, begins=True) == "hello"
    assert byte_level().text_of(byte_level().encode(" a", add_special_tokens=False)[0]).startswith(" ")


def test_the_bytes_of_a_token_may_be_those_of_half_a_character() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        halves = byte_ids("é", tokenizer)
        assert [tokenizer.bytes_of(half, tokenizer.text_of(half)) for half in halves] == [b"\xc3", b"\xa9"]
    assert byte_fallback().bytes_of(261, " hello") == b" hello"


@given(st.lists(st.integers(1, 262), max_size=40))
@settings(max_examples=200)
def test_the_bytes_of_a_token_are_its_own_behind_bytes_that_are_no_character(ids: list[int]) -> None:
    """The text that such bytes show as comes with the token behind them."""
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer, before=[261])
    for token_id in ids:
        stream.push(token_id)
        own = bytes([token_id - 1]) if token_id <= 256 else tokenizer.text_of(token_id).encode()
        assert tokenizer.bytes_of(token_id, stream.added) == own


def test_pieces_never_end_inside_a_character() -> None:
    tokenizer = byte_level()
    pieces = [piece.text for piece in tokenizer.pieces(byte_ids("x😀y", tokenizer))]
    assert "�" not in "".join(pieces)
    assert pieces[:2] == ["x", ""]


def test_endless_broken_bytes_stay_linear() -> None:
    decoded = 0
    tokenizer = byte_level()
    (first_byte, *_) = byte_ids("😀", tokenizer)

    def decode(ids: Sequence[int], /) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(first_byte) for _ in range(1000)) + detokenizer.flush()
    assert text == "�" * 1000
    assert decoded < 60_000


def test_tokens_that_straddle_characters_come_out() -> None:
    """Each token ends one emoji and begins the next: the text never looks complete before the end."""
    vocab = {"ð": 0, "ŁĺĤð": 1, "ŁĺĤ": 2}
    native = NativeTokenizer(models.BPE(vocab, []))
    native.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(native)
    ids = [0, *[1] * 100, 2]
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push(id_) for id_ in ids]
    assert "".join(pieces) == tokenizer.decode(ids) == "😂" * 101
    assert "".join(pieces[:60])  # not all at the end


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    pieces = tokenizer.pieces([BOS_ID, *tokenizer.encode("hello", add_special_tokens=False), EOS_ID])
    assert pieces[0].special
    assert pieces[-1].special
    assert "".join(piece.text for piece in pieces) == "hello"


@pytest.mark.parametrize("write", [write_gpt2, write_llama])
def test_special_tokens_may_have_their_names(write: Callable[[Path], Path], tmp_path: Path) -> None:
    native = Tokenizer.load(write(tmp_path), frozenset())._native
    native.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer = Tokenizer(native)
    end = native.token_to_id("<|end|>")
    ids = [end, *tokenizer.encode("hello für 😀", add_special_tokens=False)[:-1], end]
    pieces = tokenizer.pieces(ids, skip_special_tokens=False)
    assert [pieces[0], pieces[-1]] == [(end, "<|end|>", True), (end, pieces[-1].text, True)]
    assert pieces[-1].text.endswith("<|end|>")
    assert "".join(piece.text for piece in pieces) == native.decode(ids, skip_special_tokens=False)


def test_prompts_are_never_cut_or_padded(tmp_path: Path) -> None:
    native = byte_level_tokenizer()
    native.enable_truncation(2)
    native.enable_padding(length=50)
    native.save(str(write_checkpoint(tmp_path) / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path, frozenset()).encode("qqqqq", add_special_tokens=True)) == 5


def stopped_by_hand(text: str, stops: list[str], *, keep: bool) -> tuple[str, bool]:
    """The first prefix that ends with a stop string ends the text; unless kept, the longest such string is cut off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - (0 if keep else max(map(len, found)))], True
    return text, False


@given(
    st.lists(st.text(alphabet="ab", max_size=5), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=500)
def test_stop_strings_do_not_depend_on_the_cut(pieces: list[str], stops: list[str], keep: bool) -> None:
    matcher = StopMatcher(stops, keep=keep)
    shown, matched = "", False
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        assert "".join(pieces).startswith(shown)
        if matched:
            break
    else:
        shown += matcher.flush()
    assert (shown, matched) == stopped_by_hand("".join(pieces), stops, keep=keep)


@given(st.lists(st.text(alphabet="abc", max_size=4), max_size=10))
@settings(max_examples=200)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str]) -> None:
    matcher = StopMatcher(["abca", "cc"])
    shown = ""
    for place, piece in enumerate(pieces):
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            return
        held = "".join(pieces[: place + 1])[len(shown) :]
        assert matcher._held == held
        assert not held or any(stop.startswith(held) and stop != held for stop in ("abca", "cc"))


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("hello STOP there", ["STOP"], "hello "),
        ("a\n\nb", ["\n\n"], "a"),
        ("ababac", ["abac"], "ab"),
        ("xabc", ["abc", "b"], "xa"),  # "b" is complete before "abc"
        ("xabc", ["abc", "c"], "x"),  # both at the same character: the longest
        ("no such", ["zzz"], "no such"),
        ("😀😂", ["😂"], "😀"),
    ],
)
def test_text_stream_over_tokens(text: str, stops: list[str], shown: str) -> None:
    tokenizer = byte_level()
    for ids in (tokenizer.encode(text, add_special_tokens=False), byte_ids(text, tokenizer)):
        stream = TextStream(tokenizer, stop=stops)
        out = ""
        for id_ in ids:
            out += stream.push(id_)
            if stream.stopped:
                break
        out += stream.flush()
        assert out == shown


def test_a_stop_string_may_be_completed_by_the_flush() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stop=("x�",))
    ids = byte_ids("x", tokenizer) + byte_ids("😀", tokenizer)[:2]
    shown = "".join(stream.push(id_) for id_ in ids) + stream.flush()
    assert stream.stopped
    assert shown == ""


def shown_by(ids: list[int], tokenizer: Tokenizer, before: Sequence[int] = (), **rules: Any) -> str:
    stream = TextStream(tokenizer, before, **rules)
    out = ""
    for id_ in ids:
        out += stream.push(id_)
        if stream.stopped:
            break
    return out + stream.flush()


def test_special_tokens_are_shown_if_wanted() -> None:
    for tokenizer in (byte_level(), wordpiece()):
        plain = tokenizer.encode("hello", add_special_tokens=False)
        special = sorted(tokenizer.special_ids)[0]
        name = tokenizer.text_of(special)
        assert shown_by([*plain, special], tokenizer) == "hello"
        shown = shown_by([*plain, special, *plain], tokenizer, skip_special_tokens=False)
        assert shown.replace(" ", "") == f"hello{name}hello"
        assert shown_by([special, *plain], tokenizer, skip_special_tokens=False, stop=(name,)) == ""


@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 3), slice(-1, None)])
def test_a_stop_string_may_be_within_the_name_of_a_special_token_that_is_shown(part: slice) -> None:
    """As in vLLM: stop strings end the text that a client sees, whatever tokens it comes from."""
    tokenizer = byte_level()
    plain = tokenizer.encode("hello", add_special_tokens=False)
    special = sorted(tokenizer.special_ids)[0]
    name = tokenizer.text_of(special)
    rules = {"stop": (name[part],)}
    expected = f"hello{name.partition(name[part])[0]}"
    assert shown_by([*plain, special, *plain], tokenizer, skip_special_tokens=False, **rules) == expected
    assert shown_by([*plain, special, *plain], tokenizer, **rules) == "hellohello"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = wordpiece()
    special = sorted(tokenizer.special_ids)[0]
    name = tokenizer.text_of(special)
    assert shown_by([special] * 2, tokenizer, skip_special_tokens=False) == f"{name} {name}"
    without = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert shown_by([special] * 2, tokenizer, **without) == name * 2


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab")])
def test_stop_strings_count_behind_the_minimum(min_tokens: int, shown: str) -> None:
    tokenizer = byte_level()
    assert shown_by(byte_ids("ababab", tokenizer), tokenizer, stop=("ab",), min_tokens=min_tokens) == shown


def stopped_as_in_vllm(text: str, stops: list[str], min_tokens: int) -> str:
    """Its `check_stop_strings` for one character at a time: a match must end in the characters behind the minimum."""
    for end in range(min_tokens + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(
    st.text(alphabet="ab", max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 13),
)
@settings(max_examples=500)
def test_stop_strings_may_begin_before_the_minimum(text: str, stops: list[str], min_tokens: int) -> None:
    tokenizer = byte_level()
    shown = shown_by(byte_ids(text, tokenizer), tokenizer, stop=tuple(stops), min_tokens=min_tokens)
    assert shown == stopped_as_in_vllm(text, stops, min_tokens)
