"""Settings, limits, and the table of requests that are refused."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from checkpoint.model_facts import ModelFacts
from mesh.domain.errors import ConfigurationError, InvalidRequest
from mesh.domain.request import SamplingParams
from mesh.domain.structure import Structure, StructureKind
from router.served_model import LimitPolicy
from router.settings import RouterSettings
from router.text.chat import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from router.validation import (
    GenerateParams,
    Limits,
    ValidRequest,
    check_best_of,
    check_counts,
    check_prompt_ids,
    complete_sampling,
    require_prompt,
    with_stop_strings,
)
from router.workers.membership import capacity_tokens
from tests.fakes.router_views import decode

LIMITS = Limits(max_input_tokens=10, max_total_tokens=16, common_total_tokens=16)
PROMPT = TokenPrompt((1, 2))


def settings(tmp_path: Path, **changes: Any) -> RouterSettings:
    return RouterSettings(model=str(tmp_path), **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_concurrent_requests": 0}, "max_concurrent_requests must be >= 1, got 0"),
        ({"max_input_length": 0}, "max_input_length must be >= 1"),
        ({"max_input_length": 8, "max_total_tokens": 8}, "max_input_length must be < max_total_tokens, got 8 and 8"),
        ({"ttft_target_s": -1.0}, "ttft_target_s must be > 0, got -1"),
        ({"grace_s": 0.0}, "grace_s must be > 0"),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s must be > 0"),
        ({"prefill_threshold": -1}, "prefill_threshold must be >= 0"),
        ({"log_level": "loud"}, "log_level"),
    ],
)
def test_contradictory_settings(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        RouterSettings(**{"model": str(tmp_path), **changes})


def test_the_served_name_is_the_folders(tmp_path: Path) -> None:
    assert settings(tmp_path).served_name == tmp_path.name
    assert settings(tmp_path, name="given").served_name == "given"


@pytest.mark.parametrize(
    ("changes", "positions", "workers", "expected"),
    [
        ({}, 100, [], (99, 100)),
        ({}, None, [], (2**20 - 1, 2**20)),
        ({}, 100, [decode()], (63, 64)),
        ({}, 100, [decode(), decode(num_blocks=20)], (79, 80)),
        ({}, 100, [decode(max_model_len=30)], (29, 30)),
        ({"max_total_tokens": 50}, 100, [decode()], (49, 50)),
        ({"max_input_length": 20}, 100, [decode()], (20, 64)),
        ({"max_input_length": 80}, 100, [decode()], (63, 64)),
    ],
)
def test_limits(tmp_path: Path, changes: dict[str, Any], positions: int, workers: list[Any], expected: Any) -> None:
    policy = LimitPolicy(settings(tmp_path, **changes), ModelFacts(10, frozenset(), positions, "t"))
    limits = policy.resolve({capacity_tokens(view.info) for view in workers})
    assert (limits.max_input_tokens, limits.max_total_tokens) == expected


def test_answers_without_a_length_fit_all_workers(tmp_path: Path) -> None:
    policy = LimitPolicy(settings(tmp_path), ModelFacts(10, frozenset(), None, "t"))
    limits = policy.resolve({1000, 1010})
    assert limits.max_total_tokens == 1010
    assert limits.default_new_tokens(100) == 900
    assert limits.default_new_tokens(600) == 410


def test_a_decoders_first_token_takes_room_at_workers(tmp_path: Path) -> None:
    policy = LimitPolicy(settings(tmp_path), ModelFacts(10, frozenset(), None, "t", decoder_start_token_id=0))
    limits = policy.resolve({capacity_tokens(decode().info)})
    assert (limits.max_input_tokens, limits.max_total_tokens) == (62, 63)


@pytest.mark.parametrize("changes", [{"max_total_tokens": 101}, {"max_input_length": 100}])
def test_limits_beyond_the_model_are_contradictory(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="100"):
        LimitPolicy(settings(tmp_path, **changes), ModelFacts(10, frozenset(), 100, "t"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_choices": 0}, r"num_choices must be in \[1, 8\], got 0"),
        ({"num_choices": 9}, r"num_choices must be in \[1, 8\], got 9"),
        ({"num_choices": 3, "best_of": 2}, r"best_of must be in \[num_choices = 3, 8\], got 2"),
        ({"best_of": 9}, r"best_of must be in \[num_choices = 1, 8\], got 9"),
        ({"top_logprobs": 21}, r"top_logprobs must be in \[0, 20\], got 21"),
        ({"ttft_target_s": 0.0}, "ttft_target must be > 0, got 0 s"),
        ({"ttft_target_s": -1.5}, "ttft_target must be > 0, got -1.5 s"),
    ],
)
def test_shapes_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        check_counts(GenerateParams(PROMPT, **changes), max_choices=100)


def test_what_is_ranked_is_bounded() -> None:
    for top_logprobs, max_new_tokens, fits in ((0, 16384, True), (0, 16385, False), (20, 780, True), (20, 781, False)):
        params = GenerateParams(PROMPT, best_of=4, top_logprobs=top_logprobs)
        valid = ValidRequest("r", (1,), SamplingParams(max_new_tokens=max_new_tokens), params)
        with nullcontext() if fits else pytest.raises(InvalidRequest, match="must be <= 65536"):
            check_best_of(valid)


def test_no_more_choices_than_permits() -> None:
    check_counts(GenerateParams(PROMPT, num_choices=2), max_choices=2)
    with pytest.raises(InvalidRequest, match=r"\[1, 2\]"):
        check_counts(GenerateParams(PROMPT, num_choices=3), max_choices=2)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (None, "input is missing"),
        (TextPrompt(""), "prompt is empty"),
        (ChatPrompt(()), "chat.messages is empty"),
        (
            ChatPrompt((ChatMessage("user", "hi"), ChatMessage("root", "hi"))),
            r"chat.messages\[1\].role must be one of system, user, assistant, tool, got 'root'",
        ),
    ],
)
def test_prompts_refused(prompt: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        require_prompt(prompt)


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ((), "prompt is empty"),
        (range(11), r"has 11 tokens, at most 10 \(max_input_length\)"),
        ((1, 50), "token id 50 is not in the vocabulary of 50"),
    ],
)
def test_prompt_ids_refused(ids: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        check_prompt_ids(ids, vocab_size=50, limits=LIMITS)


def complete(num_prompt_tokens: int = 6, spellings: tuple[tuple[int, ...], ...] = (), **params: Any) -> SamplingParams:
    """Validate and complete, as the service does."""
    sampling = SamplingParams(**params)
    sampling.validate(50)
    return complete_sampling(
        sampling, num_prompt_tokens=num_prompt_tokens, vocab_size=50, limits=LIMITS, spellings=spellings
    )


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        ({"max_new_tokens": 11}, r"prompt tokens \(6\) \+ max_new_tokens \(11\) must be <= max_total_tokens \(16\)"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"min_new_tokens": 11}, r"min_new_tokens \(11\) must be <= max_new_tokens \(10\)"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": 1.5}, "typical_p"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be >= 1"),
        ({"bad_words": ("a",) * 65}, "bad_words has 65 entries"),
        ({"bad_words": (" ",)}, "each of bad_words"),
        ({"bad_word_ids": ((),)}, "each bad word must have 1 to 128 tokens"),
        ({"bad_word_ids": ((1, 50),)}, "bad_word_ids: token id 50"),
        ({"stop": ("a",) * 17}, "stop has 17 strings"),
        ({"stop_token_ids": (50,)}, "stop_token_ids: token id 50"),
        ({"logit_bias": {50: 1.0}}, "logit_bias: token id 50"),
    ],
)
def test_sampling_refused(sampling: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        complete(**sampling)


def test_sampling_completed() -> None:
    assert complete().max_new_tokens == 10
    assert complete(max_new_tokens=3).max_new_tokens == 3
    assert complete(seed=0).seed == 0
    assert complete().seed != complete().seed


def test_spellings_of_bad_words_are_checked_as_the_clients_own() -> None:
    assert complete(bad_words=("a",), bad_word_ids=((1,),), spellings=((2, 3),)).bad_word_ids == ((1,), (2, 3))
    for spellings, complaint in (
        (((4,),) * 192, "bad_word_ids has more than 192 entries"),
        ((tuple(range(49)) * 3,), "each bad word must have 1 to 128 tokens"),
        (((50,),), "bad_word_ids: token id 50"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            complete(bad_words=("a",), bad_word_ids=((1,),), spellings=spellings)


@pytest.mark.parametrize(
    ("sampling", "is_used"),
    [
        ({}, True),
        ({"stop_token_ids": (3,)}, True),
        ({"stop": ("own",)}, False),
        ({"ignore_eos": True}, False),
        ({"structure": Structure(StructureKind.JSON_OBJECT)}, False),
    ],
)
def test_the_models_stop_strings_are_for_requests_without_their_own(sampling: dict[str, Any], is_used: bool) -> None:
    params = GenerateParams(PROMPT, SamplingParams(**sampling))
    assert with_stop_strings(params, ()) is params
    stops = ("###", "User:")
    assert with_stop_strings(params, stops).sampling.stop == (stops if is_used else params.sampling.stop)
