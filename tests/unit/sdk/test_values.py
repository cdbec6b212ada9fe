"""The SDK's values: what they say, and that they say nothing else."""

import math

import pytest

import tandem
from tandem._responses import EventReader, ResultBuilder
from tandem.exceptions import ConnectionFailed, InternalError
from tandem.models import Choice, Result, Token, Usage, confidence
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import sampling_pb2


def test_confidence_is_the_exponential_of_the_mean_logprob() -> None:
    tokens = [Token(1, "a", math.log(0.5)), Token(2, "b", math.log(0.125)), Token(3, "c")]
    assert confidence(tokens) == pytest.approx(0.25)
    assert confidence([]) is None
    assert confidence([Token(1, "a")]) is None


def test_a_result_mirrors_its_first_choice() -> None:
    first = Choice(0, "a", (Token(1, "a", -1.0),), tandem.FinishReason.LENGTH, Usage(3, 1))
    second = Choice(1, "b", (), tandem.FinishReason.EOS_TOKEN, Usage(3, 2))
    result = Result("r", (first, second))
    assert (result.text, result.tokens, result.usage) == ("a", first.tokens, first.usage)
    assert result.finish_reason == "length"
    assert result.confidence == first.confidence
    assert result.usage.total_tokens == 4


def test_values_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Token(1, "a").text = "b"  # type: ignore[misc]


def test_a_message_with_several_tokens_becomes_several_events() -> None:
    message = pb.GenerateResponse(
        prompt=pb.PromptInfo(request_id="r"),
        tokens=[pb.Token(id=1, text="a"), pb.Token(id=2, text="b")],
        finish_reason=sampling_pb2.FINISH_REASON_STOP_SEQUENCE,
        usage=pb.Usage(prompt_tokens=5),
        echo="> ",
    )
    first, last = EventReader(1).read(message)
    assert (first.text, first.finish_reason, first.usage) == ("> a", None, None)
    assert (last.text, last.finish_reason, last.usage) == ("b", "stop_sequence", Usage(5))
    assert first.request_id == last.request_id == "r"


def test_timing_comes_with_the_last_event_and_adds_up() -> None:
    attempts = [
        pb.AttemptTiming(queue_ms=1, prefill_ms=2, backoff_ms=3),
        pb.AttemptTiming(queue_ms=4, prefill_ms=5, decode_ms=6, kv_transfer_ms=0.5),
    ]
    message = pb.GenerateResponse(
        tokens=[pb.Token(id=1, text="a"), pb.Token(id=2, text="b")],
        finish_reason=sampling_pb2.FINISH_REASON_LENGTH,
        timing=pb.Timing(total_ms=22, prepare_ms=1, first_token_ms=7, attempts=attempts),
    )
    builder = ResultBuilder()
    first, last = EventReader(1).read(message)
    for event in (first, last):
        builder.add(event)
    assert first.timing is None
    timing = builder.result().timing
    assert timing is not None
    assert timing == last.timing
    assert [attempt.kv_transfer_ms for attempt in timing.attempts] == [None, 0.5]
    assert (timing.phases_ms["queue"], timing.phases_ms["prefill"]) == (5, 7)
    assert sum(timing.phases_ms.values()) == timing.total_ms == 22


def test_a_choice_may_end_without_a_further_token() -> None:
    reader, builder = EventReader(1), ResultBuilder()
    for message in (
        pb.GenerateResponse(tokens=[pb.Token(id=1, text="a")]),
        pb.GenerateResponse(finish_reason=sampling_pb2.FINISH_REASON_LENGTH),
    ):
        for event in reader.read(message):
            builder.add(event)
    reader.check_complete()
    assert builder.result().text == "a"
    assert event.token is None


def test_own_bytes_of_tokens_come_if_they_were_requested() -> None:
    top = [pb.TopToken(id=8, text="\ufffd", own_bytes=b"\xc3"), pb.TopToken(id=9, text="a")]
    message = pb.GenerateResponse(tokens=[pb.Token(id=1, text="ab", own_bytes=b"", top=top), pb.Token(id=2, text="c")])
    first, second = EventReader(1, has_details=True).read(message)
    assert first.token is not None
    assert second.token is not None
    assert (first.token.own_bytes, second.token.own_bytes) == (b"", None), "empty is not absent"
    assert [entry.own_bytes for entry in first.token.top] == [b"\xc3", None]
    plain, _ = EventReader(1, has_details=False).read(message)
    assert plain.token == tandem.Token(1, "ab")


def test_a_reason_of_a_newer_server_is_unknown() -> None:
    (event,) = EventReader(1).read(pb.GenerateResponse(finish_reason=99))  # type: ignore[arg-type]
    assert event.finish_reason == "unknown"


def test_a_stream_must_end_every_choice() -> None:
    reader = EventReader(2)
    list(reader.read(pb.GenerateResponse(index=1, finish_reason=sampling_pb2.FINISH_REASON_LENGTH)))
    with pytest.raises(InternalError, match="without a finish reason"):
        reader.check_complete()


def test_every_public_name_is_there_and_named_once() -> None:
    assert sorted(set(tandem.__all__)) == sorted(tandem.__all__)
    assert all(hasattr(tandem, name) for name in tandem.__all__)


def test_both_clients_have_the_same_methods() -> None:
    def methods(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    assert methods(tandem.Client) == methods(tandem.AsyncClient)


def test_a_repeated_answer_gives_only_what_was_not_given() -> None:
    reader = EventReader(1)

    def part(*ids: int, prompt: int | None = None) -> pb.GenerateResponse:
        message = pb.GenerateResponse(tokens=[pb.Token(id=each, text=str(each)) for each in ids])
        if prompt is not None:
            message.prompt.MergeFrom(pb.PromptInfo(request_id=f"r{prompt}", tokens=[pb.Token(id=prompt)]))
        return message

    assert reader.read(part(prompt=1)) == []
    reader.repeat()  # before the first event: the prompt's tokens come again, in parts
    assert reader.read(part(prompt=2)) == []
    (first,) = reader.read(part(5, prompt=3))
    assert ([each.id for each in first.prompt_tokens], first.text) == ([2, 3], "5")
    reader.repeat()
    assert reader.read(part(prompt=4)) == []
    (second,) = reader.read(part(5, 6, prompt=4))
    assert (second.text, second.prompt_tokens, second.request_id) == ("6", (), first.request_id)
    reader.repeat()
    with pytest.raises(ConnectionFailed, match="the answer was different"):
        reader.read(part(5, 7))
