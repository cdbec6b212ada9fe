"""Members that a config.json leaves out have the values that transformers takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from engine.models.model_config import ModelConfig
from engine.models.read_config import load_config
from tests.component.checkpoints import FAMILIES, OTHER_FAMILIES
from tests.component.remote_families import REMOTE_FAMILIES

Checkpoint = Callable[[str], Path]

# They change what a model says, not the shape of a tensor that would be missed.
_MEMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    *("hidden_activation", "hidden_act", "activation_function", "activation"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention_bias", "rope_parameters", "logit_scale"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *("query_pre_attn_scalar", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "tie_word_embeddings"),
    *("activation_sparsity_pattern", "altup_num_inputs"),
)


@pytest.mark.parametrize("family", [*sorted((FAMILIES | OTHER_FAMILIES).keys() - REMOTE_FAMILIES), "gemma3n"])
def test_members_that_are_left_out(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    raw = json.loads((checkpoint(family) / "config.json").read_text())
    raw.pop("time_step_limit", None)  # its infinity is no JSON

    def read(content: dict[str, object]) -> object:
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = load_config(tmp_path)
        assert isinstance(config, ModelConfig)
        return config

    members = [member for member in _MEMBERS if member in raw]
    assert members
    for member in members:
        rest = {key: value for key, value in raw.items() if key != member}
        said = json.loads(AutoConfig.for_model(**rest).to_json_string(use_diff=False))
        assert read(rest) == read(said | {"architectures": raw["architectures"]}), member
