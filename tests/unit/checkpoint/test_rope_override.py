"""What an operator may say of rotary positions, and what it does to config.json."""

import json
from pathlib import Path

import pytest

from checkpoint.model_files import NO_ROPE_OVERRIDE, RopeOverride
from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings
from router.settings import RouterSettings

LINEAR = '{"type": "linear", "factor": 2.0}'


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
