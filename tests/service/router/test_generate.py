"""What a client gets when nothing goes wrong."""

import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import Adapter
from router.settings import RouterSettings
from router.text.tokenizer import Tokenizer
from tandem import SamplingDefaults
from tandem._responses import models
from tandem.v1 import generation_pb2, mesh_pb2, mesh_pb2_grpc, sampling_pb2
from tandem.v1.cache_pb2 import KEEP_PRIORITY_HIGH, CacheHints
from tests.defects import Repaired
from tests.fakes.router_model import BOS_ID, EOS_ID, byte_level_tokenizer, write_checkpoint
from tests.fakes.router_workers import PrefillScript, expected_tokens
from tests.service.conftest import Mesh, Result, make_request

PROMPT = [65, 66, 67, 68, 69, 70]
TOKENIZER = Tokenizer(byte_level_tokenizer(), frozenset({EOS_ID}))


def says(text: str, *, at: int) -> dict[int, float]:
    """A logit_bias that makes the fake model repeat `text`'s characters, if their ids are in ascending order."""
    ids = [TOKENIZER.encode(char, add_special_tokens=False)[0] for char in text]
    assert ids == sorted(ids)
    del at
    return dict.fromkeys(ids, 1.0)


async def test_separated_stream_is_one_sequence(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=12)
    assert result.ids() == expected_tokens(PROMPT, 12)
    assert [token.logprob for token in result.tokens()] == [-index - 0.5 for index in range(12)]
    assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    usage = result.messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 12, 0)
    (call,), (start,) = prefill.calls.items, decode.started.items
    assert call.destination.address == decode.info.address
    assert call.destination.transfer_id == start.transfer_id
    assert call.destination.incarnation == decode.info.incarnation
    assert list(call.sequence.eos_token_ids) == [EOS_ID]
    assert call.sequence.cache_namespace == "tiny"
    assert decode.aborted.items == []
    mesh.assert_at_rest()


async def test_cache_hints_reach_both_workers_and_a_conversation_goes_on_where_it_was(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill = await mesh.prefill()
    decoders = [await mesh.decode(f"decode-{number}") for number in range(3)]
    hints = {"session_id": "agent", "keep_priority": KEEP_PRIORITY_HIGH, "time_to_live": {"seconds": 60}}
    for first in range(65, 73):  # prompts that share no prefix, so that nothing but the conversation binds them
        await mesh.generate(token_ids=[first, *PROMPT], max_new_tokens=2, cache_hints=hints)
    served = [[start.sequence for start in decode.started.items] for decode in decoders]
    assert sorted(map(len, served)) == [0, 0, 8]
    for sequence in (*max(served, key=len), *(call.sequence for call in prefill.calls.items)):
        assert sequence.cache_hints == CacheHints(**hints)
    mesh.assert_at_rest()


@pytest.mark.parametrize("count", [1, 2, 30])
async def test_colocated_is_the_same(make_mesh: Any, count: int) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=count)
    assert result.ids() == expected_tokens(PROMPT, count)
    assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    assert decode.started.items[0].transfer_id == ""
    mesh.assert_at_rest()


async def test_one_token_ends_at_prefill_and_frees_the_reservation(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=1)
    assert result.ids() == expected_tokens(PROMPT, 1)
    assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    await decode.aborted.wait_len(1)
    mesh.assert_at_rest()


async def test_the_first_token_may_come_after_later_ones(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill = await mesh.prefill()
    await mesh.decode()
    prefill.scripts = [PrefillScript(first_token_after=3)]
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=5)
    assert result.ids() == expected_tokens(PROMPT, 5)


async def test_the_first_token_does_not_wait_for_the_transfer(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.gate.close()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT, max_new_tokens=3), timeout=10)
    first = await call.read()
    assert [token.id for token in first.tokens] == expected_tokens(PROMPT, 1)
    assert first.prompt.request_id
    assert first.prompt.num_tokens == 6
    decode.gate.open()
    while message := await call.read():
        assert not message.HasField("prompt")


async def test_eos_is_a_token_without_text(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    await mesh.decode()
    bias = says("ab", at=0) | {EOS_ID: 1.0}  # in turn: eos, a, b
    result = await mesh.generate(token_ids=[5] * 4, logit_bias=bias, max_new_tokens=10)
    assert result.text() == "ab"
    assert [(token.text, token.special) for token in result.tokens()] == [("a", False), ("b", False), ("", True)]
    assert result.finish() == sampling_pb2.FINISH_REASON_EOS_TOKEN
    assert result.messages[-1].usage.completion_tokens == 3
    ignored = await mesh.generate(token_ids=[5] * 4, logit_bias=bias, max_new_tokens=7, ignore_eos=True)
    assert ignored.text() == "ababa"
    assert ignored.finish() == sampling_pb2.FINISH_REASON_LENGTH


async def test_a_stop_string_ends_both_workers_work(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    result = await mesh.generate(token_ids=[5] * 6, logit_bias=says("abc", at=0), stop=["ca"], max_new_tokens=50)
    assert result.text() == "ab"
    assert [token.text for token in result.tokens()] == ["a", "b", "", ""]
    assert result.finish() == sampling_pb2.FINISH_REASON_STOP_SEQUENCE
    await decode.aborted.wait_len(1)
    await mesh.until(lambda: decode.num_running == 0)
    mesh.assert_at_rest()


async def test_a_stop_token_has_no_text(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode()
    (stop_id,) = says("c", at=0)
    result = await mesh.generate(token_ids=[5] * 6, logit_bias=says("abc", at=0), stop_token_ids=[stop_id])
    assert result.text() == "ab"
    assert result.finish() == sampling_pb2.FINISH_REASON_STOP_SEQUENCE
    assert result.ids()[-1] == stop_id


async def test_several_choices_in_one_stream(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=4, seed=10, output={"echo": True})
    for index in range(3):
        assert result.ids(index) == expected_tokens(PROMPT, 4)
        assert result.finish(index) == sampling_pb2.FINISH_REASON_LENGTH
        assert result.of(index)[0].echo == TOKENIZER.decode(PROMPT)
    assert sum(message.HasField("prompt") for message in result.messages) == 1
    assert result.messages[0].HasField("prompt")
    (start,), (call,) = decode.started.items, prefill.calls.items
    assert start.sequence.sampling.seed == 10
    assert [fork.seed for fork in start.sequence.forks] == [11, 12]
    assert call.sequence.forks == start.sequence.forks, "so that the KV comes whatever the first token is"
    assert len({start.sequence.request_id, *(fork.request_id for fork in start.sequence.forks)}) == 3
    mesh.assert_at_rest()


@pytest.mark.parametrize("separated", [True, False])
async def test_log_probs_of_prompt_and_alternatives(make_mesh: Any, separated: bool) -> None:
    mesh = await make_mesh()
    if separated:
        await mesh.prefill()
    await mesh.decode()
    output = {"prompt_logprobs": True, "top_logprobs": 2}
    result = await mesh.generate(prompt="hello 😀!", num_choices=2, max_new_tokens=3, output=output)
    tokens = result.messages[0].prompt.tokens
    assert [token.id for token in tokens] == TOKENIZER.encode("hello 😀!", add_special_tokens=True)
    assert "".join(token.text for token in tokens) == "hello 😀!"
    assert [token.HasField("logprob") for token in tokens] == [False] + [True] * (len(tokens) - 1)
    for token in [*tokens, *result.tokens(0), *result.tokens(1)]:
        assert len(token.top) == 2
        assert token.top[0].text == TOKENIZER.text_of(token.top[0].id)


@pytest.mark.parametrize("separated", [True, False])
async def test_log_probs_of_a_long_prompt_come_in_parts(make_mesh: Any, separated: bool, repaired: Repaired) -> None:
    """Each message is small, none is a worker's failure, and the tokens come behind them."""
    mesh = await make_mesh(model_positions=8192)
    room = {"num_blocks": 4096, "max_model_len": 8192}
    if separated:
        await mesh.prefill(**room)
    await mesh.decode(**room)
    prompt = [60 + place % 200 for place in range(2500)]
    output = {"prompt_logprobs": True, "top_logprobs": 20}
    result = Result()
    await result.read(mesh.stub.Generate(make_request(token_ids=prompt, max_new_tokens=4, output=output)))
    parts = [message for message in result.messages if message.HasField("prompt")]
    tokens = [token for message in parts for token in message.prompt.tokens]
    assert [token.id for token in tokens] == prompt
    assert [token.HasField("logprob") for token in tokens] == [False] + [True] * (len(prompt) - 1)
    assert all(len(token.top) == 20 for token in tokens)
    assert result.ids() == expected_tokens(prompt, 4)
    assert not any(message.tokens for message in parts[:-1])
    largest = max(message.ByteSize() for message in result.messages)
    assert largest < 256 << 10
    assert [attempt.backoff_ms for attempt in result.messages[-1].timing.attempts] == [0.0]
    repaired("D10", f"router: 2,500 tokens with 20 each come in {len(parts)} messages of {largest >> 10} KiB at most")


async def test_more_log_probs_than_can_be_kept_are_refused(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.validation.MAX_PROMPT_LOGPROBS", 100)
    mesh = await make_mesh()
    await mesh.decode()
    output = {"prompt_logprobs": True, "top_logprobs": 9}
    assert (await mesh.generate(token_ids=[60] * 10, max_new_tokens=1, output=output)).finish()
    with pytest.raises(grpc.aio.AioRpcError, match="must be <= 100"):
        await mesh.generate(token_ids=[60] * 11, max_new_tokens=1, output=output)


async def test_cached_tokens_are_reported(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill = await mesh.prefill()
    await mesh.decode()
    prefill.scripts = [PrefillScript(cached_tokens=4)]
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=2)
    assert result.messages[-1].usage.cached_tokens == 4


async def test_chat_and_tokenize_agree(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    chat = [("user", "hi 😀")]
    result = await mesh.generate(chat=chat, max_new_tokens=2, output={"echo": True})
    rendered = "<s>[user] hi 😀\n[assistant] "
    assert result.messages[0].echo == rendered
    tokenized = await mesh.stub.Tokenize(
        generation_pb2.TokenizeRequest(chat={"messages": [{"role": role, "content": text} for role, text in chat]})
    )
    ids = [token.id for token in tokenized.tokens]
    assert list(decode.started.items[0].sequence.token_ids) == ids
    assert ids[0] == BOS_ID
    assert tokenized.tokens[0].special
    assert "<s>" + "".join(token.text for token in tokenized.tokens) == rendered


async def test_long_prompts_take_the_same_way(make_mesh: Any) -> None:
    mesh = await make_mesh()
    text = "hello world, the quick brown fox " * 50
    tokenized = await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(prompt=text))
    assert "".join(token.text for token in tokenized.tokens) == text
    ids = generation_pb2.TokenIds(ids=[token.id for token in tokenized.tokens])
    assert (await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(token_ids=ids))).tokens == tokenized.tokens


async def test_models(make_mesh: Any) -> None:
    before_s = int(time.time())
    mesh = await make_mesh(max_input_length=100)
    model = (await mesh.stub.GetModel(generation_pb2.GetModelRequest())).model
    since_s = model.serving_since_unix_s
    assert before_s <= since_s <= time.time()
    assert (model.name, model.max_input_tokens, model.max_total_tokens) == ("tiny", 100, 512)
    assert (model.ready, model.has_chat_template, list(model.eos_token_ids)) == (False, True, [EOS_ID])
    await mesh.decode()
    (model,) = (await mesh.stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert (model.ready, model.max_total_tokens) == (True, 256)
    assert model.serving_since_unix_s == since_s, "it does not depend on the call"


@pytest.mark.parametrize(("setting", "told"), [("auto", {"temperature": 0.6, "top_k": 20}), ("none", {})])
async def test_clients_are_told_what_generation_config_recommends(
    tmp_path: Path, setting: str, told: dict[str, float]
) -> None:
    """And decide themselves: a request without a temperature stays greedy."""
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    mesh = Mesh(folder, models=f"tiny={folder}", generation_config=setting)
    await mesh.start()
    try:
        message = (await mesh.stub.GetModel(generation_pb2.GetModelRequest())).model
        (model,) = models([message])
        assert model.sampling_defaults == SamplingDefaults(**told)  # type: ignore[arg-type]
        decode = await mesh.decode()
        assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=2)).ids() == expected_tokens(PROMPT, 2)
        assert decode.started.items[-1].sequence.sampling.temperature == 0.0
    finally:
        await mesh.stop()


@pytest.mark.parametrize("setting", ["auto", "none"])
async def test_an_answer_ends_with_the_models_stop_strings(tmp_path: Path, setting: str) -> None:
    """Unless the request has its own, as in transformers."""
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"stop_strings": ["ca", "zz"]}')
    mesh = Mesh(folder, models=f"tiny={folder}", generation_config=setting)
    await mesh.start()
    try:
        (model,) = models([(await mesh.stub.GetModel(generation_pb2.GetModelRequest())).model])
        assert model.stop_strings == (("ca", "zz") if setting == "auto" else ())
        await mesh.decode()
        ask = {"token_ids": [5] * 6, "logit_bias": says("abc", at=0), "max_new_tokens": 7}
        result = await mesh.generate(**ask)
        assert result.text() == ("ab" if setting == "auto" else "abcabca")
        assert (result.finish() == sampling_pb2.FINISH_REASON_STOP_SEQUENCE) is (setting == "auto")
        for own in ({"stop": ["cc"]}, {"ignore_eos": True}):
            result = await mesh.generate(**ask, **own)
            assert (result.text(), result.finish()) == ("abcabca", sampling_pb2.FINISH_REASON_LENGTH)
    finally:
        await mesh.stop()


def test_generation_config_is_auto_or_none() -> None:
    with pytest.raises(ConfigurationError, match="generation_config must be auto or none, got 'vllm'"):
        RouterSettings(model="m", generation_config="vllm")


async def test_workers_are_listed(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = (
        await mesh.prefill(),
        await mesh.decode(tensor_parallel=2, pipeline_parallel=3, adapters=(Adapter("mine", "d"),)),
    )
    assert prefill.info.role is not decode.info.role
    decode.gate.close()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT, max_new_tokens=2), timeout=10)
    await call.read()
    listed = await mesh_pb2_grpc.MeshStub(mesh.channel).ListWorkers(mesh_pb2.ListWorkersRequest())
    assert [status.record.worker_id for status in listed.workers] == ["decode-0", "prefill-0"]
    assert [status.record.tensor_parallel for status in listed.workers] == [2, 1]
    assert [status.record.pipeline_parallel for status in listed.workers] == [3, 1]
    assert [list(status.record.adapters) for status in listed.workers] == [["mine"], []]
    assert {status.state for status in listed.workers} == {mesh_pb2.WORKER_STATE_READY}
    assert (listed.active_requests, listed.queued_requests) == (1, 0)
    decode.gate.open()
    assert await call.read()


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (
            make_request(token_ids=PROMPT, model="gpt"),
            grpc.StatusCode.NOT_FOUND,
            "'gpt' is not served here; served: tiny",
        ),
        (make_request(prompt=""), grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        (generation_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input is missing"),
        (make_request(token_ids=[9999]), grpc.StatusCode.INVALID_ARGUMENT, "9999"),
        (make_request(token_ids=[5] * 256), grpc.StatusCode.INVALID_ARGUMENT, "at most 255"),
        (make_request(token_ids=[5], max_new_tokens=256), grpc.StatusCode.INVALID_ARGUMENT, "max_total_tokens (256)"),
        (make_request(token_ids=[5], num_choices=9), grpc.StatusCode.INVALID_ARGUMENT, "num_choices"),
        (make_request(token_ids=[5], temperature=-1), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (make_request(chat=[("robot", "hi")]), grpc.StatusCode.INVALID_ARGUMENT, "role"),
    ],
)
async def test_bad_requests(make_mesh: Any, request_: Any, code: grpc.StatusCode, words: str) -> None:
    mesh: Mesh = await make_mesh()
    decode = await mesh.decode()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.stub.Generate(request_, timeout=5).read()
    assert caught.value.code() is code
    assert words in (caught.value.details() or "")
    assert decode.started.items == []
    mesh.assert_at_rest()


async def test_a_truncated_prompt_is_its_end_also_in_the_echo(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    whole = TOKENIZER.encode("hello world", add_special_tokens=False)
    result = await mesh.generate(
        prompt="hello world", truncate_prompt_tokens=2, max_new_tokens=3, output={"echo": True}
    )
    assert result.ids() == expected_tokens(whole[-2:], 3)
    assert result.messages[0].echo == TOKENIZER.decode(whole[-2:])
    assert result.messages[0].prompt.num_tokens == 2
    sampling = decode.started.items[0].sequence.sampling
    assert not sampling.HasField("truncate_prompt_tokens")


async def test_workers_get_bad_words_as_tokens(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    await mesh.generate(prompt="x", bad_words=["fox"], bad_word_ids=[{"ids": [7, 8]}], max_new_tokens=1)
    sampling = decode.started.items[0].sequence.sampling
    fox, behind_space = (TOKENIZER.encode(text, add_special_tokens=False) for text in ("fox", " fox"))
    assert [list(run.ids) for run in sampling.bad_word_ids] == [[7, 8], fox, behind_space]
    assert not sampling.bad_words


async def test_special_tokens_are_text_if_wanted(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode()
    bias = says("ab", at=0) | {BOS_ID: 1.0}
    request = {"token_ids": [5] * 3, "logit_bias": bias, "max_new_tokens": 6}
    assert (await mesh.generate(**request)).text() == "abab"
    shown = await mesh.generate(**request, output={"skip_special_tokens": False})
    assert shown.text() == "<s>ab<s>ab"
    assert [token.special for token in shown.tokens()] == [True, False, False] * 2
