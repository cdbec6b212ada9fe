"""Keyword arguments to messages."""

from typing import Any

import pytest

from tandem._requests import (
    generate_request,
    history_request,
    model_request,
    set_draining_request,
    set_traffic_request,
    switch_role_request,
    tokenize_request,
)
from tandem.exceptions import InvalidRequest
from tandem.models import Priority
from tandem.v1 import cache_pb2, generation_pb2
from tests.defects import Repaired


def test_every_argument_reaches_its_field() -> None:
    request = generate_request(
        {
            "token_ids": [1, 2],
            "model": "m",
            "max_new_tokens": 3,
            "min_new_tokens": 1,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.75,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "presence_penalty": -1.0,
            "frequency_penalty": 2.0,
            "logit_bias": {7: -100.0},
            "seed": 2**64 - 1,
            "stop": ["a", "b"],
            "stop_token_ids": [9],
            "ignore_eos": True,
            "typical_p": 0.5,
            "bad_words": ["no"],
            "bad_word_ids": [[3], [4, 5]],
            "truncate_prompt_tokens": 6,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_eos": False,
            "own_bytes": True,
            "top_logprobs": 5,
            "prompt_logprobs": True,
            "echo": True,
            "n": 2,
            "best_of": 4,
            "client_request_id": "mine",
            "adapter": "tuned",
            "priority": "batch",
            "ttft_target": 1.5,
            "session_id": "agent-7",
            "keep_priority": "high",
            "time_to_live": 90,
            "timeout": 1.0,
        }
    )
    sampling = request.sampling
    assert {field.name for field, _ in sampling.ListFields()} | {"structure"} == set(sampling.DESCRIPTOR.fields_by_name)
    assert list(request.token_ids.ids) == [1, 2]
    assert (request.model, request.num_choices, request.client_request_id) == ("m", 2, "mine")
    assert (request.best_of, request.adapter) == (4, "tuned")
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.top_k, sampling.seed) == (3, 1, 4, 2**64 - 1)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.75, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0, 2.0)
    assert (dict(sampling.logit_bias), list(sampling.stop), list(sampling.stop_token_ids)) == (
        {7: -100.0},
        ["a", "b"],
        [9],
    )
    assert sampling.ignore_eos
    assert (sampling.typical_p, sampling.truncate_prompt_tokens, list(sampling.bad_words)) == (0.5, 6, ["no"])
    assert [list(run.ids) for run in sampling.bad_word_ids] == [[3], [4, 5]]
    for name in ("skip_special_tokens", "spaces_between_special_tokens", "include_eos"):
        assert request.output.HasField(name)
        assert not getattr(request.output, name)
    assert (request.priority, request.ttft_target.ToMilliseconds()) == (generation_pb2.PRIORITY_BATCH, 1500)
    assert (request.output.top_logprobs, request.output.prompt_logprobs, request.output.echo) == (5, True, True)
    assert request.output.own_bytes
    hints = request.cache_hints
    assert (hints.session_id, hints.time_to_live.ToMilliseconds()) == ("agent-7", 90_000)
    assert hints.keep_priority == cache_pb2.KEEP_PRIORITY_HIGH


def test_none_leaves_a_field_absent_and_zero_does_not() -> None:
    sampling = generate_request({"prompt": "", "temperature": None, "top_k": 0}).sampling
    assert not sampling.HasField("temperature")
    assert sampling.HasField("top_k")


def test_priorities_have_the_same_names_everywhere() -> None:
    numbers = [generate_request({"prompt": "x", "priority": priority}).priority for priority in Priority]
    assert numbers == [number for number in generation_pb2.Priority.values() if number]


def test_messages_become_a_conversation() -> None:
    request = tokenize_request({"messages": [{"role": "user", "content": "hi"}]})
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "hi")]


@pytest.mark.parametrize("name", ["add_special_tokens", "skip_special_tokens"])
def test_special_tokens_of_a_text_are_wanted_or_not(name: str) -> None:
    assert not tokenize_request({"prompt": "x"}).HasField(name)
    request = tokenize_request({"prompt": "x", name: False})
    assert request.HasField(name)
    assert not getattr(request, name)
    generates = generate_request({"prompt": "x", name: False})
    assert (generates if name == "add_special_tokens" else generates.output).HasField(name)


def test_one_stop_string_may_come_bare() -> None:
    assert list(generate_request({"prompt": "x", "stop": "end"}).sampling.stop) == ["end"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "got none"),
        ({"prompt": "x", "token_ids": [1]}, "got prompt and token_ids"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": "x"}, "token_ids"),
        ({"messages": ["hi"]}, "role"),
        ({"messages": [{"role": "user"}]}, "role"),
        ({"prompt": "x", "top_k": -1}, "top_k"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "n": -1}, "^n must be an integer in"),
        ({"prompt": "x", "stop": [1]}, "stop"),
        ({"prompt": "x", "bad_words": [1]}, "bad_words"),
        ({"prompt": "x", "bad_word_ids": [3]}, "bad_word_ids"),
        ({"prompt": "x", "priority": "urgent"}, "batch, standard, interactive"),
        ({"prompt": "x", "priority": 3}, "priority"),
        ({"prompt": "x", "ttft_target": "soon"}, "ttft_target"),
        ({"prompt": "x", "keep_priority": "ever"}, "keep_priority must be one of low, normal, high"),
        ({"prompt": "x", "time_to_live": "long"}, "time_to_live"),
        ({"prompt": "x", "session_id": 7}, "session_id"),
        ({"prompt": "x", "ttft_target": float("inf")}, "ttft_target"),
        ({"prompt": "x", "ttft_target": float("nan")}, "ttft_target"),
        ({"prompt": "x", "ttft_target": 1e300}, "ttft_target"),
        ({"prompt": "x", "logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"prompt": "x", "stop": 5}, "^stop must be a list, got 5$"),
        ({"prompt": "x", "stop": ["a", 5]}, r"^stop\[1\] must be a text, got 5$"),
        ({"prompt": b"\xff"}, "^prompt must be a text"),
        ({"prompt": "caf\udce9"}, r"^prompt must be valid Unicode, got 'caf\\udce9'$"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"^messages\[0\]\.content must be valid Unicode"),
        ({"token_ids": [1, 2.5]}, r"^token_ids\[1\] must be an integer in \[0, 4294967295\], got 2.5$"),
        ({"prompt": "x", "seed": True}, "^seed must be an integer in .*, got True$"),
        ({"prompt": "x", "echo": 2**63}, "^echo must be true or false"),
        ({"prompt": "x", "max_new_tokens": 10**5000}, "^max_new_tokens must be an integer .* of 16610 bits$"),
        ({"prompt": "x", "regex": 5}, "^regex must be a text, got 5$"),
        ({"prompt": "x", "choice": 5}, "^choice must be a list, got 5$"),
        ({"prompt": "x", "bad_word_ids": 5}, "^bad_word_ids must be a list, got 5$"),
        ({"prompt": "x", "bad_word_ids": [[1], ["a"]]}, r"^bad_word_ids\[1\]\[0\] must be an integer"),
        ({"prompt": "x", "logit_bias": 5}, "^logit_bias must be a mapping"),
        ({"prompt": "x", "logit_bias": {-1: 1.0}}, "^logit_bias must map an integer in .* to a number, got -1: 1.0$"),
        ({"messages": 5}, "^messages must be a list, got 5$"),
        ({"messages": {"role": "user", "content": "x"}}, "^messages must be a list of messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"^messages\[0\].content must be a text"),
        ({"messages": [], "tools": 5}, "^tools must be a list, got 5$"),
        ({"messages": [], "tools": {"type": "function"}}, "^tools must be a list of objects"),
        ({"messages": [], "tools": "search"}, r"^tools\[0\] must be an object, got 's'$"),
        ({"messages": [], "chat_template_kwargs": 5}, "^chat_template_kwargs must be a mapping"),
        ({"messages": [], "chat_template_kwargs": "x"}, "^chat_template_kwargs must be a mapping"),
    ],
)
def test_what_cannot_be_sent_is_named(arguments: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        generate_request(arguments)


def test_a_worker_or_model_that_is_no_text_is_named() -> None:
    wrong: Any = 5
    with pytest.raises(InvalidRequest, match=r"^name must be a text, got 5$"):
        model_request(wrong)
    with pytest.raises(InvalidRequest, match=r"^worker_id must be a text, got 5$"):
        set_draining_request(wrong, draining=True)
    with pytest.raises(InvalidRequest, match=r"^worker_id must be a text, got 5$"):
        switch_role_request(wrong, "decode")
    with pytest.raises(InvalidRequest, match=r"^role must be prefill or decode"):
        switch_role_request("w", [wrong])  # type: ignore[arg-type]


@pytest.mark.parametrize("span_s", [float("nan"), float("inf"), 1e300, "long"])
def test_a_history_of_no_length_is_refused(span_s: Any, repaired: Repaired) -> None:
    with pytest.raises(InvalidRequest, match="span_s"):
        history_request(span_s)
    repaired("D31", "InvalidRequest")


@pytest.mark.parametrize(("name", "shares"), [("chat", {"v1": "x"}), ("chat", {1: 1.0}), (7, {"v1": 1.0}), ("c", 3)])
def test_traffic_that_cannot_be_sent_is_refused(name: Any, shares: Any, repaired: Repaired) -> None:
    with pytest.raises(InvalidRequest, match=r"^(name|shares) must "):
        set_traffic_request(name, shares)
    repaired("D31", "InvalidRequest")


def test_an_unknown_name_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        generate_request({"prompt": "x", "max_tokens": 3})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("arguments", "kind", "value"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json_schema": '{"type":"null"}'}, "json_schema", '{"type":"null"}'),
        ({"json_object": True}, "json_object", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_structures(arguments: Any, kind: str, value: Any) -> None:
    structure = generate_request({"prompt": "p", **arguments}).sampling.structure
    assert structure.WhichOneof("kind") == kind
    assert getattr(structure, kind) == value


def test_choices() -> None:
    sampling = generate_request({"prompt": "p", "choice": ["a", "b"]}).sampling
    assert list(sampling.structure.choice.texts) == ["a", "b"]
    assert not generate_request({"prompt": "p"}).sampling.HasField("structure")


def test_no_json_object_is_no_structure() -> None:
    assert not generate_request({"prompt": "p", "json_object": False}).sampling.HasField("structure")
    structure = generate_request({"prompt": "p", "json_object": False, "regex": "a"}).sampling.structure
    assert structure.WhichOneof("kind") == "regex"


@pytest.mark.parametrize(
    "arguments",
    [{"regex": "a", "choice": ["b"]}, {"json_schema": {"a": object()}}, {"regex": 3}, {"choice": "yes"}],
)
def test_structures_that_make_no_sense(arguments: Any) -> None:
    with pytest.raises(InvalidRequest):
        generate_request({"prompt": "p", **arguments})
