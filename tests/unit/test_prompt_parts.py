"""Log-probs of a long prompt in parts: small ones, nothing lost, and other sequences' tokens between them."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.session import MAX_UNSENT_EVENTS, Failed, Session, Step
from mesh import wire
from mesh.domain.tokens import PromptLogprob, SampledToken, SequenceFailure, SequenceOutput, TokenLogprob
from tests.defects import Repaired

TOP = tuple(TokenLogprob(place, -1.0) for place in range(20))


def output(request_id: str, index: int = 0, num_prompt: int = 0, num_top: int = 20) -> SequenceOutput:
    entries = tuple(PromptLogprob(-float(place), TOP[:num_top]) for place in range(num_prompt))
    return SequenceOutput(request_id, 0, index, (SampledToken(7, -0.5),), prompt_logprobs=entries, cached_tokens=3)


@given(st.integers(0, 5000), st.integers(0, 20))
def test_parts_are_small_and_make_the_whole(num_prompt: int, num_top: int) -> None:
    whole = output("a", 0, num_prompt, num_top)
    parts = list(whole.in_parts())
    assert [part.tokens for part in parts] == [()] * (len(parts) - 1) + [whole.tokens]
    assert sum((part.prompt_logprobs for part in parts), ()) == whole.prompt_logprobs
    assert all(len(part.prompt_logprobs) * (1 + num_top) <= 2048 for part in parts)
    assert parts[-1].cached_tokens == 3


def test_no_part_is_a_large_message() -> None:
    part = next(output("a", 0, 90_000).in_parts())
    assert wire.output_to_proto(part).ByteSize() < 64 << 10


async def test_other_sequences_tokens_go_between_the_parts(repaired: Repaired) -> None:
    session = Session()
    session.send(Step([output("long", 0, 2000)]))
    session.send(Step([output("long", 1), output("other", 5)]))
    session.send(Step([output("other", 6)]))
    session.end()
    steps = [event.outputs async for event in session.events() if isinstance(event, Step)]
    ids = [[each.request_id for each in step] for step in steps]
    assert ids[:3] == [["long"], ["long", "other"], ["long", "other"]]
    assert set(map(tuple, ids[3:])) == {("long",)}, "an ended session sends the parts that wait"
    session = Session()
    session.send(Step([output("long", 0, 2000)]))
    session.send(Step([output("long", 1), output("other", 5)]))
    async with asyncio.timeout(60):
        found: list[SequenceOutput] = []
        async for event in session.events():
            assert isinstance(event, Step)
            found += event.outputs
            if found[-1].first_index == 1:
                break
    own = [each for each in found if each.request_id == "long"]
    assert sum(len(each.prompt_logprobs) for each in own) == 2000
    assert [len(each.tokens) for each in own] == [0] * (len(own) - 2) + [1, 1]
    place = next(place for place, each in enumerate(found) if each.request_id == "other")
    assert place <= 2
    repaired("D10", f"decode link: another sequence's token goes out behind {place} of {len(own) - 1} parts")


async def test_a_full_session_ends_behind_its_last_event() -> None:
    session = Session()
    for place in range(MAX_UNSENT_EVENTS):
        assert session.send(Step([output("a", place)]))
    session.end()
    async with asyncio.timeout(60):
        found = [event.outputs[0].first_index async for event in session.events() if isinstance(event, Step)]
    assert found == list(range(MAX_UNSENT_EVENTS))


async def test_parts_of_a_sequence_that_has_ended_are_dropped() -> None:
    session = Session()
    session.send(Step([output("failed", 0, 2000), output("aborted", 0, 2000)]))
    session.send(Failed(("failed", 0), SequenceFailure.PREEMPTED, ""))
    events = session.events()
    assert isinstance(await anext(events), Step)
    session.drop(("aborted", 0))
    assert isinstance(await anext(events), Failed)
    session.end()
    assert [event async for event in events] == []
