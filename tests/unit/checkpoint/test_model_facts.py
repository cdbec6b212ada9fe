"""Facts from a checkpoint folder, and what an operator may say of rotary positions."""

import json
from pathlib import Path

import pytest

from checkpoint.model_facts import read_model_facts
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from checkpoint.tokenizer_fingerprint import tokenizer_fingerprint
from engine.models.model_config import parse_rope
from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings
from router.settings import RouterSettings

LINEAR = '{"type": "linear", "factor": 2.0}'


def write(folder: Path, config: object, generation: object = None, tokenizer: str | None = "{}") -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_facts(tmp_path: Path) -> None:
    facts = read_model_facts(
        write(tmp_path, {"vocab_size": 9, "eos_token_id": 2, "n_positions": 64}, {"eos_token_id": [3, 4]})
    )
    assert (facts.vocab_size, facts.eos_token_ids, facts.max_positions) == (9, frozenset({2, 3, 4}), 64)


def test_what_may_be_missing(tmp_path: Path) -> None:
    facts = read_model_facts(write(tmp_path, {"vocab_size": 9, "eos_token_id": None}))
    assert (facts.eos_token_ids, facts.max_positions) == (frozenset(), None)


def test_a_decoder_inside_a_multimodal_config(tmp_path: Path) -> None:
    config = {"eos_token_id": 1, "text_config": {"vocab_size": 7, "max_position_embeddings": 32}}
    facts = read_model_facts(write(tmp_path, config))
    assert (facts.vocab_size, facts.eos_token_ids, facts.max_positions) == (7, frozenset({1}), 32)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 128),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}}, 64),
        ({"rope_scaling": None}, 64),
        ({"max_position_embeddings": 10**30}, 2**31 - 1),
        ({"max_position_embeddings": 10**30, "model_type": "gemma3_text"}, 2**31 - 1),
        ({"rope_scaling": {"type": "linear", "factor": 1e30}}, 2**31 - 1),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 64),
    ],
)
def test_scaled_positions_reach_further(tmp_path: Path, rope: dict[str, object], longest: int) -> None:
    config = {"vocab_size": 9, "max_position_embeddings": 64, **rope}
    assert read_model_facts(write(tmp_path, config)).max_positions == longest


@pytest.mark.parametrize(
    ("outside", "rope", "longest"),
    [
        ({"original_max_position_embeddings": 8}, {"rope_type": "yarn", "factor": 4.0}, 32),
        ({"original_max_position_embeddings": 8}, {"rope_type": "yarn", "factor": 8.0}, 64),
        ({}, {"rope_type": "yarn", "original_max_position_embeddings": 8}, 32),
    ],
)
def test_router_and_workers_find_the_length_of_the_first_training_in_the_same_places(
    tmp_path: Path, outside: dict[str, object], rope: dict[str, object], longest: int
) -> None:
    config = {"vocab_size": 7, "eos_token_id": 1, "max_position_embeddings": 32, "rope_scaling": rope, **outside}
    assert read_model_facts(write(tmp_path, config)).max_positions == longest
    assert parse_rope(config, 32, 8).max_positions(32) == longest


def test_an_encoder_decoder_begins_with_a_token_and_has_no_longest_length(tmp_path: Path) -> None:
    config = {"vocab_size": 7, "n_positions": 512, "is_encoder_decoder": True, "decoder_start_token_id": 0}
    facts = read_model_facts(write(tmp_path, config))
    assert (facts.decoder_start_token_id, facts.max_positions) == (0, None)
    assert read_model_facts(write(tmp_path, config, {"decoder_start_token_id": 3})).decoder_start_token_id == 3


def test_the_fingerprint_is_of_the_bytes(tmp_path: Path) -> None:
    first = tokenizer_fingerprint(write(tmp_path, {}, tokenizer="{}"))
    assert first == tokenizer_fingerprint(tmp_path)
    assert first != tokenizer_fingerprint(write(tmp_path, {}, tokenizer="{ }"))


def test_the_fingerprint_is_of_the_tokens_that_are_added(tmp_path: Path) -> None:
    """And of nothing else that tokenizer_config.json says."""
    write(tmp_path, {}, tokenizer='{"added_tokens": [{"id": 3, "content": "<a>"}]}')
    first = tokenizer_fingerprint(tmp_path)
    known, new = {"3": {"content": "<a>"}}, {"4": {"content": "<b>"}}
    for listed, is_same in (({}, True), (known, True), (known | new, False), ([], True), ({"3": None}, True)):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": listed, "eos_token": "<c>"})
        )
        assert (tokenizer_fingerprint(tmp_path) == first) is is_same, listed


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "named"),
    [
        ({}, None, "{}", "config.json has no vocab_size"),
        ([], None, "{}", "config.json must hold a JSON object"),
        ({"vocab_size": "9"}, None, "{}", "config.json: vocab_size must be a positive integer"),
        ({"vocab_size": 9, "eos_token_id": [-1]}, None, "{}", "config.json: eos_token_id"),
        ({"vocab_size": 9}, {"eos_token_id": True}, "{}", "generation_config.json: eos_token_id"),
        ({"vocab_size": 9, "is_encoder_decoder": True}, None, "{}", "needs decoder_start_token_id, got None"),
        ({"vocab_size": 9}, None, None, "tokenizer.json"),
    ],
)
def test_errors_name_the_file(
    tmp_path: Path, config: object, generation: object, tokenizer: str | None, named: str
) -> None:
    write(tmp_path, config, generation, tokenizer)
    with pytest.raises(ConfigurationError, match=named):
        read_model_facts(tmp_path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*config\.json: No such file"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json is not valid JSON"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    "scaling",
    [
        "linear",
        "{",
        "[]",
        "2",
        '{"factor": 2}',
        '{"rope_type": 7}',
        '{"type": "linear", "factor": "2"}',
        '{"type": "linear", "factor": 0}',
        '{"type": "linear", "factor": NaN}',
        '{"type": "linear", "factor": 2, "rope_theta": -1}',
    ],
)
def test_nonsense_is_refused_by_name(scaling: str) -> None:
    with pytest.raises(ConfigurationError, match="rope_scaling"):
        RopeOverride(scaling)


@pytest.mark.parametrize("theta", [-1.0, float("nan"), float("inf")])
def test_a_base_is_a_positive_number(theta: float) -> None:
    with pytest.raises(ConfigurationError, match="rope_theta"):
        RopeOverride(theta=theta)


def test_the_base_and_the_rotated_share_stay() -> None:
    stored = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    config = RopeOverride(LINEAR).apply({"rope_parameters": stored})
    kept = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert config == {"rope_parameters": {"type": "linear", "factor": 2.0, **kept}}


def test_layers_with_a_window_keep_their_angles() -> None:
    stored = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    ropes = RopeOverride(LINEAR).apply({"rope_parameters": stored})["rope_parameters"]
    assert ropes["sliding_attention"] == {"rope_theta": 1e4}
    assert ropes["full_attention"] == {"rope_theta": 1e6, "type": "linear", "factor": 2.0}


def test_the_old_spelling_is_replaced() -> None:
    config = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 7.0}
    assert RopeOverride(LINEAR).apply(config) == {"rope_parameters": json.loads(LINEAR), "rope_theta": 7.0}
    assert NO_ROPE_OVERRIDE.apply(config) == config


def test_a_service_takes_json_or_a_table_of_its_settings_file(tmp_path: Path) -> None:
    argv = ["--model", "m", "--rope-scaling", LINEAR, "--rope-theta", "1e6"]
    settings = load_settings(RouterSettings, argv, prog="router", environ={}).values
    assert settings.rope_override() == RopeOverride(LINEAR, 1e6)
    file = tmp_path / "mesh.toml"
    file.write_text('[router]\nrope_scaling = {type = "linear", factor = 2.0}\n')
    settings = load_settings(RouterSettings, ["--model", "m", "--config", str(file)], prog="router", environ={}).values
    assert settings.rope_override() == RopeOverride(LINEAR)
    with pytest.raises(ConfigurationError, match="rope_scaling"):
        load_settings(RouterSettings, ["--model", "m", "--rope-scaling", "linear"], prog="router", environ={})
