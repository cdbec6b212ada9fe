"""What workers need, by their settings and their model."""

import json
from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from tandem_cli.configuration.up_settings import UpSettings
from tandem_cli.local_mesh.deployment import Deployment, ModelDeployment
from tandem_cli.local_mesh.hardware import CoreAssignment
from tandem_cli.model_files.model_folders import BUNDLED, BUNDLED_MODELS
from tandem_cli.on_ray.launch import worker_needs
from tandem_cli.on_ray.resources import WorkerNeed

CORES = CoreAssignment(((),), ((), ()))
DUMMY = {"load_format": "dummy"}
SMALL = ModelDeployment("tandem-small", str(BUNDLED), CORES)


def needs(cluster_gpus: float = 0, model: ModelDeployment = SMALL, **values: str) -> dict[str, WorkerNeed]:
    """By worker. The settings `values` are those of decode workers."""
    mesh = Deployment(UpSettings(on="ray"), (model,), pin=False, values={"decode": values})
    return {need.name: need for need in worker_needs(mesh, {}, cluster_gpus)}


def test_weights_and_kv_are_those_of_the_plan() -> None:
    """The bundled model: its sequences have 2048 tokens, decode workers run 64 of them."""
    plain = needs()["decode-0"]
    assert plain.num_ranks == 1
    blocks = 2048 // 16 + 2
    assert plain.min_kv_bytes == pytest.approx(blocks * block_bytes())
    assert plain.max_kv_bytes == 64 * plain.min_kv_bytes
    assert needs(quantize="int8")["decode-0"].weights_bytes < 0.7 * plain.weights_bytes
    assert needs(max_model_len="64")["decode-0"].min_kv_bytes < plain.min_kv_bytes


def block_bytes() -> int:
    from engine.loading.resolve import kv_layout, resolve
    from engine.runner_settings import RunnerSettings

    settings, config = resolve(RunnerSettings(Path(BUNDLED), "cpu"))
    return kv_layout(config, settings).block_bytes


def test_ranks_divide_the_weights() -> None:
    alone, divided = needs()["decode-0"], needs(tensor_parallel="2")["decode-0"]
    assert divided.num_ranks == 2
    assert divided.weights_bytes == pytest.approx(alone.weights_bytes, rel=0.2)


def test_settings_of_kv_are_taken_as_they_are() -> None:
    fixed = needs(kv_cache_bytes="1000000")["decode-0"]
    assert fixed.min_kv_bytes == fixed.max_kv_bytes == 1_000_000
    tokens = needs(max_batch_total_tokens="1600")["decode-0"]
    assert tokens.min_kv_bytes == tokens.max_kv_bytes == 100 * block_bytes()


def test_a_draft_model_counts() -> None:
    draft = needs(draft_model=str(BUNDLED_MODELS / "tandem-draft"))["decode-0"]
    assert draft.weights_bytes > needs()["decode-0"].weights_bytes
    assert draft.min_kv_bytes > needs()["decode-0"].min_kv_bytes


def test_a_layer_of_multi_token_prediction_counts_without_the_models_embedding(tmp_path: Path) -> None:
    """A small layer beside a large vocabulary."""
    facts = json.loads((BUNDLED / "config.json").read_text())
    facts |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "first_k_dense_replace": 99}
    facts |= {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "vocab_size": 2**17}
    facts |= {"moe_intermediate_size": facts["intermediate_size"]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    model = ModelDeployment("wide", str(tmp_path), CORES, values=dict.fromkeys(("prefill", "decode"), DUMMY))
    plain, drafting = (needs(model=model, **values)["decode-0"] for values in ({}, {"speculative": "mtp"}))
    assert 1.001 * plain.weights_bytes < drafting.weights_bytes < 1.1 * plain.weights_bytes


def test_workers_take_gpus_if_there_are_enough() -> None:
    assert [need.num_gpus for need in needs(2).values()] == [0, 0, 0]
    assert [need.num_gpus for need in needs(3).values()] == [1, 1, 1]
    assert [need.num_gpus for need in needs(0, device="cuda").values()] == [0, 1, 1]
    assert [need.num_gpus for need in needs(3, device="cpu").values()] == [1, 0, 0]
    two = {"tensor_parallel": "2"}
    assert [need.num_gpus for need in needs(4, **two).values()] == [0, 0, 0]
    assert [(need.num_gpus, need.num_ranks) for need in needs(5, **two).values()] == [(1, 1), (2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel": "max"}, "must be numbers, not max"),
        ({"tensor_parallel": "2", "rank_listen": "127.0.0.1:0"}, "rank_listen does not work with --on ray"),
        ({"tensor_parallel": "64"}, "64"),
    ],
)
def test_what_ray_cannot_do_is_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        needs(**values)
