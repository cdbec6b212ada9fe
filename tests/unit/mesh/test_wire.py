"""Domain nouns survive the wire."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import wire
from mesh.domain.cache_hints import CacheHints, KeepPriority
from mesh.domain.errors import InvalidRequest, LayoutMismatch
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.domain.request import Fork, SamplingParams
from mesh.domain.structure import Structure, StructureKind
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, SequenceFailure, SequenceOutput, TokenLogprob
from mesh.domain.worker import Adapter, KVEndpoint, WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.v1 import decode_pb2, worker_pb2
from tandem.v1 import cache_pb2, sampling_pb2
from tests.fakes.requests import make_request

TEXT: dict[str, Any] = {"stop": ("end",), "bad_words": ("no",), "truncate_prompt_tokens": 3}
"""Sampling parameters that the router handles."""
floats = st.floats(0, 2, width=32)
OF_WORKERS: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, 1000),
    "min_new_tokens": st.integers(0, 10),
    "temperature": floats,
    "top_k": st.integers(0, 100),
    "top_p": floats,
    "min_p": floats,
    "typical_p": floats,
    "repetition_penalty": floats,
    "presence_penalty": floats,
    "frequency_penalty": floats,
    "logit_bias": st.dictionaries(st.integers(0, 500), floats, max_size=4),
    "seed": st.integers(0, 2**64 - 1),
    "stop_token_ids": st.lists(st.integers(0, 500), max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "bad_word_ids": st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    "structure": st.one_of(
        st.none(),
        st.just(Structure(StructureKind.JSON_OBJECT)),
        st.builds(Structure, st.just(StructureKind.CHOICE), choices=st.lists(st.text(max_size=3)).map(tuple)),
        st.builds(
            Structure,
            st.sampled_from([StructureKind.JSON_SCHEMA, StructureKind.REGEX, StructureKind.GRAMMAR]),
            source=st.text(max_size=5),
        ),
    ),
}
samplings = st.builds(SamplingParams, **OF_WORKERS)


def test_every_sampling_parameter_is_converted() -> None:
    """Tests of this file convert all that are named here."""
    assert OF_WORKERS.keys() | TEXT.keys() == {field.name for field in fields(SamplingParams)}


def test_forks_round_trip() -> None:
    forks = (Fork("f", 2, 7, "00-a-b-01"), Fork("g", 0, 2**64 - 1))
    request = make_request("r", [1], forks=forks, prompt_logprobs=True)
    assert wire.spec_from_proto(wire.spec_to_proto(request)) == request
    first, second = request.forked()
    assert (first.request_id, first.attempt, first.sampling.seed, first.traceparent) == ("f", 2, 7, "00-a-b-01")
    assert (second.prompt_logprobs, second.forks, second.token_ids) == (False, (), (1,))
    twice = make_request("r", [1], forks=(Fork("r", 0, 1),))
    with pytest.raises(InvalidRequest, match="different request_ids"):
        wire.spec_from_proto(wire.spec_to_proto(twice))


@given(samplings, st.booleans(), st.sampled_from([None, 1.5]))
def test_request_round_trip(sampling: SamplingParams, prompt_logprobs: bool, time_left_s: float | None) -> None:
    request = make_request("r", [1, 2, 3], prompt_logprobs=prompt_logprobs, time_left_s=time_left_s, adapter="d")
    request = type(request)(**{f: getattr(request, f) for f in request.__slots__} | {"sampling": sampling})
    assert wire.spec_from_proto(wire.spec_to_proto(request)) == request


@pytest.mark.parametrize(
    "hints",
    [
        CacheHints(),
        CacheHints("agent"),
        CacheHints(keep_priority=KeepPriority.LOW),
        CacheHints("a", time_to_live_s=1.5),
    ],
)
def test_cache_hints_round_trip(hints: CacheHints) -> None:
    request = make_request("r", [1, 2, 3], cache_hints=hints)
    assert wire.spec_from_proto(wire.spec_to_proto(request)) == request


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"session_id": "x" * 257}, "session_id must have at most 256 characters, got 257"),
        ({"time_to_live": {"seconds": 0}}, "time_to_live must be > 0"),
        ({"time_to_live": {"seconds": 31 * 86400}}, "time_to_live must be > 0 and at most 2592000 s, got"),
        ({"time_to_live": {"seconds": 30 * 86400 + 1}}, "at most 2592000 s, got 2592001 s"),
    ],
)
def test_cache_hints_out_of_range_are_refused(hints: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        wire.hints_from_proto(cache_pb2.CacheHints(**hints))


def test_a_keep_priority_of_a_newer_version_is_the_normal_one() -> None:
    assert wire.hints_from_proto(cache_pb2.CacheHints(keep_priority=99)) == CacheHints()


def test_absent_sampling_fields_take_the_documented_defaults() -> None:
    assert wire.sampling_from_proto(sampling_pb2.SamplingParams()) == SamplingParams()


def test_text_never_reaches_workers() -> None:
    plain = make_request("r", [1])
    assert wire.spec_from_proto(wire.spec_to_proto(make_request("r", [1], sampling=TEXT))) == plain
    sampling = SamplingParams(**TEXT)
    assert wire.sampling_from_proto(wire.sampling_to_proto(sampling)) == sampling, "from clients they do come"


def test_a_structure_of_no_known_kind_is_refused() -> None:
    message = sampling_pb2.SamplingParams(structure=sampling_pb2.Structure())
    with pytest.raises(InvalidRequest, match="structure"):
        wire.sampling_from_proto(message)


@pytest.mark.parametrize("field", ["request_id", "token_ids", "num_prompt_tokens", "sampling"])
def test_unrunnable_requests_are_refused(field: str) -> None:
    spec = wire.spec_to_proto(make_request("r", [1, 2]))
    spec.ClearField(field)
    with pytest.raises(InvalidRequest):
        wire.spec_from_proto(spec)


def test_output_round_trip() -> None:
    for reason in (None, *(set(FinishReason) - {FinishReason.UNKNOWN})):
        output = SequenceOutput(
            "r",
            attempt=2,
            first_index=5,
            tokens=(SampledToken(3, -0.5, (TokenLogprob(3, -0.5), TokenLogprob(9, -1.5))),),
            finish_reason=reason,
            prompt_logprobs=(PromptLogprob(None), PromptLogprob(-2.0, (TokenLogprob(1, -0.25),))),
            cached_tokens=16,
        )
        assert wire.output_from_proto(wire.output_to_proto(output)) == output


def test_worker_round_trip() -> None:
    facts = {"state_blocks": 3, "keys_are_values": True, "windows": (0, 128), "windows_are_chunks": True}
    layout = KVLayout("fp", 2, 4, 8, 16, "float32", **facts)
    endpoints = (KVEndpoint("h:2", KVSpan(Span(0, 1), Span(0, 4))), KVEndpoint("h:3", KVSpan(Span(1, 1), Span(0, 4))))
    for role in WorkerRole:
        info = WorkerInfo("w", "i", role, "h:1", "m", "t", layout, 512, 64, 100, 2048, "cpu", 7, kv_endpoints=endpoints)
        info = replace(info, tensor_parallel=4, pipeline_parallel=2, adapters=(Adapter("mine", "digest"),))
        assert wire.worker_from_proto(wire.worker_to_proto(info)) == info
        older = wire.worker_to_proto(info)
        for degree in ("tensor_parallel", "pipeline_parallel"):
            older.ClearField(degree)
            assert getattr(wire.worker_from_proto(older), degree) == 1
        older.layout.ClearField("keys_are_values")
        with pytest.raises(LayoutMismatch, match="keys_are_values: True here, False there"):
            layout.require_same(wire.worker_from_proto(older).layout)
    load = WorkerLoad(1, 2, 3, 4, 5, 6)
    assert wire.load_from_proto(wire.load_to_proto(load)) == load
    with pytest.raises(InvalidRequest, match="role"):
        wire.worker_from_proto(worker_pb2.WorkerRecord())


def test_enums_are_complete() -> None:
    assert {wire.failure_from_proto(wire.failure_to_proto(f)) for f in SequenceFailure} == set(SequenceFailure)
    assert len(decode_pb2.SequenceFailure.values()) == len(SequenceFailure) + 1
    assert len(sampling_pb2.FinishReason.values()) == len(FinishReason), "UNKNOWN stays inside the mesh"
    assert {wire.state_from_proto(wire.state_to_proto(s)) for s in WorkerState} == set(WorkerState)
    assert wire.state_from_proto(99) is WorkerState.LOST  # type: ignore[arg-type]
