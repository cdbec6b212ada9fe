"""Tokens in order, each once; text and events of one choice."""

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import decoders, models

from mesh.domain.errors import AttemptsFailed
from mesh.domain.request import SamplingParams
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, SequenceOutput, TokenLogprob
from router.choice import Choice, TokenEvent, TokenOrder
from router.text.chat import ChatMessage, ChatPrompt, Prompt, Rendering, TextPrompt, TokenPrompt
from router.text.tokenizer import Tokenizer
from router.validation import GenerateParams, ValidRequest
from tandem.v1 import sampling_pb2
from tests.defects import Repaired
from tests.fakes.router_model import EOS_ID, byte_level_tokenizer


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), frozenset({EOS_ID}))


def make_choice(
    *, index: int = 0, max_new_tokens: int = 50, seed: int = 7, stop: tuple[str, ...] = (), **params: Any
) -> Choice:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=seed, stop=stop)
    prompt = (5, 6, 7)
    return Choice(
        index, ValidRequest("r", prompt, sampling, GenerateParams(TokenPrompt(prompt), **params)), tokenizer()
    )


def output(first_index: int, ids: list[int], finish: FinishReason | None = None, **changes: Any) -> SequenceOutput:
    tokens = tuple(SampledToken(id_, -1.0, (TokenLogprob(id_, -1.0),)) for id_ in ids)
    return SequenceOutput("r", 0, first_index, tokens, finish, **changes)


def events_of(choice: Choice) -> list[TokenEvent]:
    events = choice.take()
    return [] if events is None else events.tokens


@functools.cache
def with_space_marks() -> Tokenizer:
    """As Llama 2's: the decoder drops the space of a text's first token."""
    words = ["<unk>", "▁sky", "▁blue", "▁is"]
    native = NativeTokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>"))
    native.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(native)


_TURNS = (ChatMessage("user", "sky"),)


@pytest.mark.parametrize(
    ("prompt", "decoder_prompt", "text"),
    [
        (TokenPrompt((1, 3)), (), " blue"),
        (TextPrompt("sky is"), (), " blue"),
        (ChatPrompt(_TURNS, how=Rendering(adds_generation_prompt=False, continues_final=True)), (), " blue"),
        (ChatPrompt(_TURNS), (), "blue"),
        (TextPrompt("sky is"), (0,), "blue"),
    ],
)
def test_an_answer_continues_the_text_of_its_prompt_but_a_turn_begins_one(
    prompt: Prompt, decoder_prompt: tuple[int, ...], text: str
) -> None:
    sampling = SamplingParams(max_new_tokens=9, seed=7)
    valid = ValidRequest("r", (1, 3), sampling, GenerateParams(prompt), decoder_prompt=decoder_prompt)
    choice = Choice(0, valid, with_space_marks())
    choice.accept(output(0, [2, 1]))
    assert [event.text for event in events_of(choice)] == [text, " sky"]


def test_alternatives_have_the_text_that_the_token_would_have() -> None:
    for prompt, first in ((TextPrompt("sky is"), " blue"), (ChatPrompt(_TURNS), "blue")):
        valid = ValidRequest("r", (1, 3), SamplingParams(max_new_tokens=9, seed=7), GenerateParams(prompt))
        choice = Choice(0, valid, with_space_marks())
        choice.accept(output(0, [2, 2]))
        assert [[event.text, *(top.text for top in event.top)] for event in events_of(choice)] == [
            [first, first],
            [" blue", " blue"],
        ]


def test_workers_get_the_decoders_first_token_behind_the_prompt() -> None:
    sampling = SamplingParams(max_new_tokens=9, seed=7)
    valid = ValidRequest("r", (5, 6, 7), sampling, GenerateParams(TokenPrompt((5, 6, 7))), decoder_prompt=(3,))
    choice = Choice(0, valid, tokenizer())
    choice.accept(output(0, [100, 101]))
    spec = choice.next_spec(1, eos_token_ids=frozenset(), namespace="m")
    assert (spec.token_ids, spec.num_prompt_tokens) == ((5, 6, 7, 3, 100, 101), 4)
    assert (spec.max_total_tokens, choice.num_tokens) == (13, 6)
    assert (choice.num_prompt_tokens, choice.usage().prompt_tokens) == (3, 3)


@given(st.integers(1, 12), st.data())
def test_any_order_of_messages_gives_every_token_once(count: int, data: st.DataObject) -> None:
    ids = list(range(100, 100 + count))
    spans = [(place, data.draw(st.integers(place + 1, count))) for place in range(count)]
    extra = data.draw(st.lists(st.sampled_from(spans), max_size=5))
    messages = data.draw(st.permutations(spans + extra))
    order, got, finishes = TokenOrder(max_early=1000), list[int](), list[FinishReason]()
    for begin, end in messages:
        finish = FinishReason.LENGTH if end == count else None
        for tokens, reason in order.accept(output(begin, ids[begin:end], finish)):
            got += [token.id for token in tokens]
            if reason is not None:
                assert got == ids
                finishes.append(reason)
    assert got == ids
    assert finishes


def test_what_came_early_is_forgotten_with_its_attempt() -> None:
    order = TokenOrder(max_early=2)
    assert order.accept(output(1, [8])) == []
    order.restart()
    assert [len(tokens) for tokens, _ in order.accept(output(0, [7]))] == [1]
    assert order.next_index == 1


def test_a_worker_that_sends_more_than_there_can_be_fills_no_memory(repaired: Repaired) -> None:
    order = TokenOrder(max_early=100)
    for _ in range(10_000):
        assert order.accept(output(1, [8, 9])) == []
        assert order.accept(output(5, [], FinishReason.LENGTH)) == []
    num_kept = len(order._early)
    assert num_kept <= 100
    [first, *_] = order.accept(output(0, [7]))
    assert [token.id for token in first[0]] == [7]
    assert order.next_index == 3
    repaired("S6", f"20,000 early outputs of a sequence of 99 tokens: {num_kept} are kept")


@given(st.text(alphabet="aé😀 STOP\n", max_size=30), st.integers(1, 4), st.booleans())
@settings(max_examples=150)
def test_one_event_per_token_and_all_of_the_text(text: str, batch: int, ends_with_eos: bool) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False) + ([EOS_ID] if ends_with_eos else [])
    choice = make_choice(stop=("STOP",), max_new_tokens=100)
    events: list[TokenEvent] = []
    for place in range(0, len(ids), batch):
        part = ids[place : place + batch]
        is_last = place + batch >= len(ids)
        reason = FinishReason.EOS_TOKEN if ends_with_eos else FinishReason.LENGTH
        choice.accept(output(place, part, reason if is_last else None))
        events += events_of(choice)
    assert [event.id for event in events] == choice.token_ids == ids[: len(choice.token_ids)]
    assert "".join(event.text for event in events) == text.split("STOP")[0]
    assert all(event.text == "" for event in events[:-1] if event.special)
    if "STOP" in text:
        assert choice.finish_reason is FinishReason.STOP_SEQUENCE
    elif ids:
        assert choice.finish_reason is (FinishReason.EOS_TOKEN if ends_with_eos else FinishReason.LENGTH)


def test_held_back_text_goes_out_with_the_last_token() -> None:
    choice = make_choice(stop=("zz",))
    (z_id,) = tokenizer().encode("z", add_special_tokens=False)
    choice.accept(output(0, [z_id]))
    assert [event.text for event in events_of(choice)] == [""]
    choice.accept(output(1, [EOS_ID], FinishReason.EOS_TOKEN))
    events = choice.take()
    assert events is not None
    assert [(event.text, event.special) for event in events.tokens] == [("z", True)]
    assert events.finish_reason is FinishReason.EOS_TOKEN
    assert events.usage is not None
    assert events.usage.completion_tokens == 2


def test_tokens_have_their_own_bytes_if_they_are_requested(repaired: Repaired) -> None:
    """Where their text is that of others, or a part of a character."""
    ids = tokenizer().encode("zé", add_special_tokens=False)
    for wanted, own_bytes in ((False, [None] * 4), (True, [b"z", b"\xc3", b"\xa9", b""])):
        choice = make_choice(stop=("zéz",), own_bytes=wanted)
        choice.accept(output(0, [*ids, EOS_ID], FinishReason.EOS_TOKEN))
        events = events_of(choice)
        assert [event.text for event in events] == ["", "", "", "zé"]
        assert [event.own_bytes for event in events] == own_bytes
        assert [top.own_bytes for event in events for top in event.top] == [None, *own_bytes[1:3], None]
    repaired("F15", "events have the token's bytes beside the text")


@given(st.text(alphabet="aé😀 STOP", max_size=30), st.booleans())
@settings(max_examples=100)
def test_own_bytes_are_those_of_the_text(text: str, ends_with_eos: bool) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    choice = make_choice(stop=("STOP",), max_new_tokens=100, own_bytes=True)
    reason = FinishReason.EOS_TOKEN if ends_with_eos else FinishReason.LENGTH
    choice.accept(output(0, [*ids, EOS_ID] if ends_with_eos else ids, reason))
    own = [event.text.encode() if event.own_bytes is None else event.own_bytes for event in events_of(choice)]
    assert b"".join(own).decode() == (text if "STOP" not in text else tokenizer().decode(choice.token_ids))


def test_own_bytes_of_tokens_of_whole_characters_keep_their_space() -> None:
    valid = ValidRequest(
        "r", (1, 3), SamplingParams(stop=("blue sky@",), seed=7), GenerateParams(ChatPrompt(_TURNS), own_bytes=True)
    )
    choice = Choice(0, valid, with_space_marks())
    choice.accept(output(0, [2, 1], FinishReason.LENGTH))
    assert [(event.text, event.own_bytes) for event in events_of(choice)] == [("", b"blue"), ("blue sky", b" sky")]


def test_own_bytes_of_special_tokens_do_not_have_those_of_half_a_character_before() -> None:
    native = NativeTokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    native.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    native.add_special_tokens(["</s>"])
    params = GenerateParams(TokenPrompt((1,)), own_bytes=True, skip_special_tokens=False, include_eos=True)
    choice = Choice(0, ValidRequest("r", (1,), SamplingParams(seed=7), params), Tokenizer(native, frozenset({256})))
    choice.accept(output(0, [0xC3, 256], FinishReason.EOS_TOKEN))
    assert [(event.text, event.own_bytes) for event in events_of(choice)] == [("", b"\xc3"), ("\ufffd</s>", b"</s>")]


def test_a_stop_token_has_no_text() -> None:
    choice = make_choice()
    (a_id, b_id) = tokenizer().encode("zq", add_special_tokens=False)
    choice.accept(output(0, [a_id, b_id], FinishReason.STOP_SEQUENCE))
    assert [event.text for event in events_of(choice)] == ["z", ""]


@pytest.mark.parametrize("reason", [FinishReason.STOP_SEQUENCE, FinishReason.EOS_TOKEN])
def test_the_token_that_ends_a_choice_has_text_if_stops_are_included(reason: FinishReason) -> None:
    (z_id,) = tokenizer().encode("z", add_special_tokens=False)
    for wanted, shown in ((False, "z"), (True, "z</s>")):
        choice = make_choice(skip_special_tokens=False, include_stop=wanted)
        choice.accept(output(0, [z_id, EOS_ID], reason))
        assert "".join(event.text for event in events_of(choice)) == shown


@pytest.mark.parametrize(
    ("reason", "include_eos", "include_stop", "shown"),
    [
        (FinishReason.EOS_TOKEN, False, True, "z"),
        (FinishReason.EOS_TOKEN, False, False, "z"),
        (FinishReason.EOS_TOKEN, True, False, "z</s>"),
        (FinishReason.STOP_SEQUENCE, False, True, "z</s>"),
        (FinishReason.STOP_SEQUENCE, True, False, "z"),
    ],
)
def test_the_end_of_sequence_token_may_be_told_from_what_the_client_named(
    reason: FinishReason, include_eos: bool, include_stop: bool, shown: str
) -> None:
    """The z, which may begin a stop string, is held back until the end. Tokens and log-probs are whole in any case."""
    (z_id,) = tokenizer().encode("z", add_special_tokens=False)
    choice = make_choice(
        stop=("zq",), skip_special_tokens=False, include_eos=include_eos, include_stop=include_stop, top_logprobs=1
    )
    choice.accept(output(0, [z_id]))
    choice.accept(output(1, [EOS_ID], reason))
    events = choice.take()
    assert events is not None
    assert "".join(event.text for event in events.tokens) == shown
    assert [(event.id, event.logprob, len(event.top)) for event in events.tokens] == [(z_id, -1, 1), (EOS_ID, -1, 1)]
    assert (events.finish_reason, events.usage and events.usage.completion_tokens) == (reason, 2)


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH, FinishReason.EOS_TOKEN])
def test_a_stop_string_that_ends_with_half_a_character_is_the_reason_for_the_end(reason: FinishReason | None) -> None:
    ids = tokenizer().encode("zé", add_special_tokens=False)[:2]
    if reason is FinishReason.EOS_TOKEN:
        ids.append(EOS_ID)
    choice = make_choice(stop=("z\ufffd",), max_new_tokens=len(ids))
    choice.accept(output(0, ids, reason))
    events = choice.take()
    assert events is not None
    assert ("".join(event.text for event in events.tokens), events.finish_reason) == ("", FinishReason.STOP_SEQUENCE)


def test_after_the_end_nothing_counts() -> None:
    choice = make_choice(max_new_tokens=2)
    choice.accept(output(0, [100, 101]))
    assert choice.finish_reason is FinishReason.LENGTH
    choice.accept(output(2, [102], FinishReason.EOS_TOKEN))
    assert choice.token_ids == [100, 101]
    assert choice.finish_reason is FinishReason.LENGTH


def test_a_replay_asks_for_the_rest_with_the_same_draws() -> None:
    choice = make_choice(index=2, seed=2**64 - 1, top_logprobs=3, prompt_logprobs=True)
    choice.accept(output(0, [100, 101]))
    spec = choice.next_spec(1, eos_token_ids=frozenset({EOS_ID}), namespace="m")
    assert spec.token_ids == (5, 6, 7, 100, 101)
    assert (spec.num_prompt_tokens, spec.num_generated, spec.attempt) == (3, 2, 1)
    assert spec.sampling.seed == 1  # seed + index, wrapped
    assert spec.sampling.max_new_tokens == 50
    assert spec.request_id == "r-2"
    assert (spec.top_logprobs, spec.prompt_logprobs) == (3, False)


@pytest.mark.parametrize("has_come", [False, True])
def test_prompt_logprobs_are_asked_for_until_they_come(has_come: bool) -> None:
    choice = make_choice(prompt_logprobs=True)
    logprobs = (PromptLogprob(None),) * 3 if has_come else ()
    choice.accept(output(0, [100], prompt_logprobs=logprobs))
    assert choice.next_spec(1, eos_token_ids=frozenset(), namespace="m").prompt_logprobs is not has_come


def test_a_reason_that_is_not_known_is_an_error_and_no_end(repaired: Repaired) -> None:
    """The stream ends with a status, as it does for all that fails or is cancelled: they have no finish reason."""
    choice = make_choice()
    with pytest.raises(AttemptsFailed, match="reason that this router does not know"):
        choice.accept(output(0, [70], FinishReason.UNKNOWN))
    assert choice.finish_reason is None
    names = set(sampling_pb2.FinishReason.keys())
    assert names == {f"FINISH_REASON_{reason}" for reason in ("UNSPECIFIED", "LENGTH", "EOS_TOKEN", "STOP_SEQUENCE")}
    repaired("M12", "gone from the protocol, numbers reserved: a stream that fails ends with a status, as documented")
