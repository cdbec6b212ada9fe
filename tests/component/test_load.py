"""Configurations and checkpoints: what is read, and what is refused with which words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.source import ModelSource
from checkpoint.tensors import open_checkpoint, read_header
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import fingerprint
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from tests.component.checkpoints import WINDOW, build_checkpoint
from tests.component.driving import Driver
from tests.component.encoder_decoders import build_encoder_decoder
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]


@pytest.fixture
def model_dir(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit_config(model_dir: Path, **changes: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = model_dir / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def load(model_dir: Path, **changes: str) -> None:
    load_model_runner(RunnerSettings(model_dir, num_blocks=4, **changes))  # type: ignore[arg-type]


def test_facts_of_families(checkpoint: Checkpoint) -> None:
    assert load_config(checkpoint("mistral")).windows == (WINDOW,) * 3
    assert load_config(checkpoint("qwen2-window")).windows == (None, WINDOW, WINDOW)
    assert load_config(checkpoint("qwen2")).qkv_bias
    assert load_config(checkpoint("qwen2")).tied
    assert load_config(checkpoint("qwen3")).qk_norm
    assert load_config(checkpoint("qwen3")).head_dim == 32
    assert load_config(checkpoint("llama-biases")).mlp_bias


@pytest.mark.parametrize("family", ["llama-linear", "llama-dynamic", "llama-yarn", "llama-llama3"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_old_spelling_of_rope(checkpoint: Checkpoint, tmp_path: Path, family: str, type_key: str) -> None:
    raw = json.loads((checkpoint(family) / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = {type_key: rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path) == load_config(checkpoint(family))


def test_windows_from_max_window_layers_when_types_are_absent(checkpoint: Checkpoint, tmp_path: Path) -> None:
    raw = json.loads((checkpoint("qwen2-window") / "config.json").read_text())
    del raw["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).windows == (None, WINDOW, WINDOW)


def test_longest_sequence(checkpoint: Checkpoint) -> None:
    assert load_config(checkpoint("llama")).max_model_len == 512
    assert load_config(checkpoint("llama-linear")).max_model_len == 2048
    assert load_config(checkpoint("llama-yarn")).max_model_len == 128
    assert not load_config(checkpoint("llama-dynamic")).shareable_prefixes
    assert load_config(checkpoint("llama")).shareable_prefixes


@pytest.mark.parametrize(
    "change",
    [
        {"max_position_embeddings": 10**30},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e30, "rope_theta": 1e4}},
    ],
)
def test_no_limit_of_positions_is_one_that_workers_can_tell(model_dir: Path, change: dict[str, object]) -> None:
    edit_config(model_dir, **change)
    assert load_config(model_dir).max_model_len == 2**31 - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT9"]}, "GPT9 is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "none given"),
        ({"hidden_act": "swish9"}, "swish9.*supported: silu"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "mrope.*supported: default"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, r"have a factor \(8\.0\), but no rope_type"),
        ({"rope_parameters": {"rope_type": None, "factor": 8.0}}, r"have a factor \(8\.0\), but no rope_type"),
        (
            {"rope_parameters": {"rope_type": ["linear"], "factor": 8.0}},
            r"rope_type must be a string, got \['linear'\]",
        ),
        ({"rope_parameters": {"rope_type": 0, "factor": 8.0}}, "rope_type must be a string, got 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1}},
            "rope_theta of YaRN must be above 1",
        ),
        (
            {
                "original_max_position_embeddings": 1,
                "rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
            },
            "original_max_position_embeddings must be above 1, got 1",
        ),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be an integer from 2 on, got 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        (
            {"num_attention_heads": 10**8, "num_key_value_heads": 10**8, "head_dim": 16},
            "head_dim is 1600000000, more than",
        ),
        ({"head_dim": 10**9}, "num_attention_heads times head_dim is 4000000000, more than the 16777216 rows"),
        ({"intermediate_size": 10**12}, "intermediate_size is 1000000000000, more than"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, more than .*: the file is broken"),
        ({"quantization_config": {"bits": 4}}, "quant_method None is not supported; supported: awq, gptq"),
    ],
)
def test_unsupported_configurations(model_dir: Path, change: dict[str, object], words: str) -> None:
    edit_config(model_dir, **change)
    with pytest.raises(ConfigurationError, match=words):
        load(model_dir)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gpt2", {"n_positions": 10**30}, "max_position_embeddings is 2147483647, more than"),
        ("deepseek-v3", {"qk_nope_head_dim": 10**9}, "times qk_nope_head_dim is 4000000000, more than"),
        ("gemma4", {"head_dim": 10**9}, "times head_dim is 4000000000, more than"),
        (
            "qwen3.5",
            {"linear_value_head_dim": 10**9},
            "heads of recurrent layers times their dimensions is .*, more than",
        ),
        ("nemotron-h", {"ssm_state_size": 10**12}, "heads of recurrent layers times their dimensions is .*, more than"),
        ("lfm2", {"conv_L_cache": 10**9}, "kernel of recurrent layers is 1000000000, more than"),
        ("gemma3n", {"intermediate_size": [10**12] * 8}, "intermediate_size is 1000000000000, more than"),
    ],
)
def test_sizes_of_no_model_are_refused_before_they_take_memory(
    checkpoint: Checkpoint, tmp_path: Path, family: str, change: dict[str, object], words: str
) -> None:
    model_dir = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    edit_config(model_dir, **change)
    with pytest.raises(ConfigurationError, match=words):
        load_decoder_config(model_dir)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gemma3n", {"intermediate_size": [96] * 7}, "intermediate_size has 7 entries for 8 layers"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5] * 7}, "pattern must have 8 numbers below 1"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 8}, "pattern must have 8 numbers below 1"),
        ("gemma3n", {"activation_sparsity_pattern": [-0.5] * 8}, "must be a list of numbers from 0 on"),
        ("gemma3n", {"altup_active_idx": 1}, "altup_active_idx must be 0"),
        ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale False is not supported"),
        ("gemma3n", {"num_kv_shared_layers": 7}, "leaves no layer of a kind that has KV of its own"),
        ("jamba", {"attn_layer_offset": 3}, r"attn_layer_offset \(3\) must be below attn_layer_period \(3\)"),
        ("jamba", {"hidden_act": "gelu"}, "'gelu' as activation of Mamba 1 is not supported"),
        ("mamba", {"time_step_rank": 0}, "time_step_rank must be a positive integer"),
        ("lfm2", {"layer_types": ["conv"] * 5}, "a model without any layer of attention is not supported"),
        ("gpt-neo", {"attention_layers": ["global", "chunked"]}, "may name global and local, not 'chunked'"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max must be 8"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True is not supported"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is not supported"),
        ("codegen", {"n_head": 2}, "CodeGen's heads are in 4 parts, not 2"),
        ("llama", {"intermediate_size": [96] * 3}, "intermediate_size must be a positive integer, not a list"),
    ],
)
def test_variants_that_are_not_supported(
    checkpoint: Checkpoint, tmp_path: Path, family: str, change: dict[str, object], words: str
) -> None:
    model_dir = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    edit_config(model_dir, **change)
    with pytest.raises(ConfigurationError, match=words):
        load_decoder_config(model_dir)


@pytest.mark.parametrize("member", ["num_layers", "num_decoder_layers"])
def test_layers_of_no_encoder_decoder_are_refused(tmp_path: Path, member: str) -> None:
    model_dir = build_encoder_decoder("t5", tmp_path / "t5")
    edit_config(model_dir, **{member: 10**8})
    with pytest.raises(ConfigurationError, match="100000000 layers are more than 4096: the file is broken"):
        load_config(model_dir)


def test_missing_or_broken_config(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load(tmp_path)
    (model_dir / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load(model_dir)


def test_missing_tensor(model_dir: Path) -> None:
    edit_weights(model_dir, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ConfigurationError, match=r"k_proj\.weight is missing: model\.safetensors must have it"):
        load(model_dir)


def test_wrong_shape(model_dir: Path) -> None:
    edit_weights(model_dir, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ConfigurationError, match=r"model\.safetensors.*model\.norm\.weight.*\[63\].*\[64\]"):
        load(model_dir)


def test_quantised_tensor(model_dir: Path) -> None:
    edit_weights(model_dir, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: tensor model\.norm\.weight has dtype I8"):
        load(model_dir)


@pytest.mark.parametrize("kept_bytes", [0, 5, 200, -10])
def test_truncated_file(model_dir: Path, kept_bytes: int) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors.*truncated"):
        load(model_dir)


def test_no_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor"):
        load(model_dir)
    (model_dir / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"pytorch_model\.bin is in a format that can run code"):
        load(model_dir)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_link_that_leads_nowhere_is_named(model_dir: Path, name: str) -> None:
    """As in a cache whose blobs were deleted."""
    if name.startswith("model."):
        (model_dir / "model.safetensors").unlink()
    (model_dir / name).unlink(missing_ok=True)
    (model_dir / name).symlink_to("nowhere")
    with pytest.raises(ConfigurationError, match=f"{model_dir / name} is a link that leads nowhere: download"):
        ModelSource(str(model_dir)).locate() if name == "config.json" else open_checkpoint(model_dir)


def test_a_header_that_lies(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"data_offsets"', b'"data_offset5"', 1))
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: the header describes tensor .*weight wrongly"):
        load(model_dir)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_of_weights(model_dir: Path, dtype: torch.dtype) -> None:
    edit_weights(model_dir, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    specs = parameter_specs(load_config(model_dir))
    loaded = load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32))
    stored = load_file(model_dir / "model.safetensors")
    assert torch.equal(loaded.take("final_norm"), stored["model.norm.weight"].float())
    assert torch.equal(
        loaded.take_linear("layers.0.down").weight, stored["model.layers.0.mlp.down_proj.weight"].float()
    )


def test_a_tensor_in_two_shards_is_that_of_the_index(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        save_file({"w": torch.full((2,), float(number)), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    for named in ("a", "b"):
        weight_map = {"w": f"{named}.safetensors", "a": "a.safetensors", "b": "b.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert open_checkpoint(tmp_path)["w"].path.name == f"{named}.safetensors"


def test_broken_shards(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    index.write_text(whole.replace(shards[0].name, f"../{shards[0].name}"))
    with pytest.raises(ConfigurationError, match="outside its folder"):
        load(tmp_path)
    index.write_text(whole)
    shutil.copy(shards[1], shards[0])
    with pytest.raises(ConfigurationError, match=f"{shards[0].name}.*in the index but not in the file"):
        load(tmp_path)
    shards[0].unlink()
    with pytest.raises(ConfigurationError, match=f"{shards[0].name} is missing: it has tensor .*weight"):
        load(tmp_path)
    for text, message in (
        ("[]", "must hold a JSON object"),
        ('{"weight_map": []}', "is not a safetensors index"),
        ('{"weight_map": {"a": 1}}', "is not a safetensors index"),
        ("{}", "is not a safetensors index"),
        ("[" * 100_000, "is not valid JSON"),
    ):
        index.write_text(text)
        with pytest.raises(ConfigurationError, match=f"{index.name} {message}"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"), [(b"[]", "must hold a JSON object"), (b"[" * 100_000, "not valid JSON")]
)
def test_headers_that_are_no_objects(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigurationError, match=f"{path} .*{message}"):
        read_header(path)


def test_dummy_weights_need_only_the_configuration(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    seen: list[float] = []
    settings = RunnerSettings(model_dir, load_format="dummy", num_blocks=8, seed=3)
    driver = Driver(load_model_runner(settings, seen.append))
    run = driver.add(make_request("r", range(20), max_new_tokens=4))
    driver.finish(run)
    again = Driver(load_model_runner(settings), seed=5)
    same = again.add(make_request("r", range(20), max_new_tokens=4))
    again.finish(same)
    assert run.tokens == same.tokens
    assert all(token.logprob < 0 for token in run.tokens)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_progress_reaches_one(model_dir: Path) -> None:
    seen: list[float] = []
    load_model_runner(RunnerSettings(model_dir, num_blocks=4), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int4"},
        {"load_format": "pickle"},
        {"block_size": 0},
        {"num_blocks": 0},
        {"device": "quantum"},
        {"attention": "flash"},
    ],
)
def test_wrong_settings(model_dir: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        load_model_runner(RunnerSettings(**{"model_dir": model_dir, "num_blocks": 4} | change))  # type: ignore[arg-type]


def test_fingerprint_tells_models_apart(model_dir: Path, tmp_path: Path) -> None:
    original = fingerprint(model_dir)
    sharded = build_checkpoint("llama", tmp_path / "sharded", max_shard_size="100KB")
    assert fingerprint(sharded) == original
    assert fingerprint(build_checkpoint("llama", tmp_path / "other", seed=1)) != original
    assert len({original, *(fingerprint(model_dir, "dummy", seed) for seed in (0, 0, 1))}) == 3
    edit_config(model_dir, rms_norm_eps=1e-3)
    assert fingerprint(model_dir) != original


def test_products_in_fp32_are_exact_whatever_the_container_allows(checkpoint: Checkpoint) -> None:
    torch.set_float32_matmul_precision("high")  # as torch begins with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    load_model_runner(RunnerSettings(checkpoint("llama"), num_blocks=4, enforce_eager=True))
    assert torch.get_float32_matmul_precision() == "highest"
