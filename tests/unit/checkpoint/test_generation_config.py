"""What generation_config.json recommends for sampling, and the stop strings that it names."""

import json
from pathlib import Path

import pytest

from checkpoint.generation_config import read_sampling_defaults, read_stop_strings
from mesh.domain.errors import ConfigurationError


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_file_may_be_missing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"eos_token_id": 7, "do_sample": False}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        (
            {"top_k": -1, "top_p": None, "min_p": 0, "repetition_penalty": 1.1},
            {"top_k": 0, "min_p": 0, "repetition_penalty": 1.1},
        ),
    ],
)
def test_recommended_sampling(tmp_path: Path, generation: dict[str, object], defaults: dict[str, float]) -> None:
    """As vLLM reads it: what is there counts, whatever do_sample says."""
    assert read_sampling_defaults(write(tmp_path, generation)) == defaults


@pytest.mark.parametrize(
    "wrong", [{"temperature": "1"}, {"top_k": 1.5}, {"top_p": 2}, {"min_p": True}, {"top_p": [1]}, {"top_k": 10**400}]
)
def test_recommended_sampling_that_no_request_may_have_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(
        ConfigurationError, match=f"generation_config.json: {next(iter(wrong))} must .*set generation_config to"
    ):
        read_sampling_defaults(write(tmp_path, wrong))


@pytest.mark.parametrize(
    ("named", "stops"), [(None, ()), ([], ()), ("###", ("###",)), (["###", "\nUser:"], ("###", "\nUser:"))]
)
def test_stop_strings(tmp_path: Path, named: object, stops: tuple[str, ...]) -> None:
    """One or several, as in transformers."""
    assert read_stop_strings(tmp_path) == ()
    assert read_stop_strings(write(tmp_path, {"stop_strings": named})) == stops


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (7, "stop_strings must be a text or a list of texts, got 7"),
        ([7], "stop_strings must be a text or a list of texts"),
        ({"###": 1}, "stop_strings must be a text or a list of texts"),
        (False, "stop_strings must be a text or a list of texts"),
        ("", "each stop string must have 1 to 256 characters"),
        (["#" * 257], "each stop string must have 1 to 256 characters"),
        (["#"] * 17, "stop has 17 strings, at most 16 are allowed"),
    ],
)
def test_stop_strings_that_no_request_may_have_are_refused(tmp_path: Path, wrong: object, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"generation_config.json: {complaint}.*; .*set generation_config to"):
        read_stop_strings(write(tmp_path, {"stop_strings": wrong}))
