"""LoRA adapters: parity with transformers' models that have the adapter merged, and rows that do not disturb others."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from checkpoint.adapters import find_adapters, read_adapter
from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import load_model_runner
from engine.models.adapters import adapter_shapes, load_adapter
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError, ModelFailed
from mesh.domain.worker import WorkerRole
from tests.component.arms import load_arm
from tests.component.driving import Driver
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.lora.adapters import (
    PREFIX,
    check_adapters,
    four_adapters,
    read_adapters,
    run_together,
    write_adapter,
)
from tests.component.parity import NUM_NEW, NUM_TOP, TOLERANCE, prompts
from tests.component.ranks.test_ranks import require_equal
from tests.component.sampling.test_speculation import answer, ids
from tests.fakes.drafters import FakeDrafter, known
from tests.fakes.requests import make_request
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("family", ["llama-biases", "llama-tied", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("arm", ["compiled", "torch"])
def test_parity_with_the_merged_model(checkpoint: Checkpoint, tmp_path: Path, family: str, arm: str) -> None:
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine", rank=5))
    check_adapters(model_dir, load_arm(model_dir, arm, adapters=adapters), adapters, 3 * TOLERANCE)


@pytest.mark.parametrize(
    "family",
    [
        *(
            "gpt2",
            "gptj",
            "gpt-neox",
            "opt",
            "bloom",
            "falcon-40b",
            "phi",
            "phi3",
            "gemma2",
            "granite",
            "glm4",
            "olmo2",
        ),
        *("qwen3.5", "falcon-h1", "gemma4", "jamba-dense"),
    ],
)
@pytest.mark.parametrize("arm", ["compiled", "torch"])
def test_parity_of_other_layouts(checkpoint: Checkpoint, tmp_path: Path, family: str, arm: str) -> None:
    """Fused, grouped and transposed matrices, other orders of rotary dimensions, factors on the residual, recurrent
    layers, layers of several sizes.
    """
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine"))
    check_adapters(model_dir, load_arm(model_dir, arm, adapters=adapters), adapters, 10 * TOLERANCE)


@pytest.mark.parametrize("family", ["gemma3n", "jamba-dense", "falcon-mamba"])
def test_families_of_the_eager_decoder(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """The narrow matrices beside Gemma 3n's attention have adapters, too."""
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine"))
    check_adapters(model_dir, load_arm(model_dir, "cpu", adapters=adapters), adapters, 10 * TOLERANCE)


@pytest.mark.parametrize("family", ["llama4", "gemma4-moe", "afmoe", "cohere2-moe"])
def test_attention_beside_experts(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Also of an MLP beside experts. With adapters of experts the decoder is eager (test_ranked_adapters.py)."""
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine", targets=r"self_attn|mlp\.(gate|up|down)_proj"))
    check_adapters(model_dir, load_arm(model_dir, "compiled", adapters=adapters), adapters, 10 * TOLERANCE)


@pytest.mark.parametrize("arm", ["compiled", "torch"])
def test_four_adapters_in_one_batch(checkpoint: Checkpoint, tmp_path: Path, arm: str) -> None:
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    check_adapters(model_dir, load_arm(model_dir, arm, adapters=adapters), adapters, 3 * TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}],
    ids=["fp32", "int8", "int4", "bf16"],
)
def test_a_mixed_batch_equals_each_alone_to_the_bit(
    checkpoint: Checkpoint, tmp_path: Path, options: dict[str, str]
) -> None:
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    runner, base = (load_arm(model_dir, "compiled", adapters=some, **options) for some in (adapters, ()))
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters), "", adapters[0].digest]))
    mixed = run_together(runner, digests)
    require_equal(mixed, [run_together(runner, {number: digest})[0] for number, digest in digests.items()])
    require_equal([mixed[0], mixed[5]], [run_together(base, {number: ""})[0] for number in (0, 5)])


def test_a_mixed_batch_of_the_eager_decoder_is_near_each_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    runner = load_arm(model_dir, "torch", adapters=adapters)
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters), ""]))
    for (number, digest), run in zip(digests.items(), run_together(runner, digests), strict=True):
        alone = run_together(runner, {number: digest})[0]
        assert run.token_ids == alone.token_ids
        assert [t.logprob for t in run.tokens] == pytest.approx([t.logprob for t in alone.tokens], abs=1e-5)


@pytest.mark.parametrize("arm", ["compiled", "torch"])
@pytest.mark.parametrize("max_loaded_adapters", [1, 3])
def test_adapters_that_come_and_go_compute_the_same(
    checkpoint: Checkpoint, tmp_path: Path, arm: str, max_loaded_adapters: int
) -> None:
    """Also beside a sequence whose adapter stays."""
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    whole = load_arm(model_dir, arm, adapters=adapters)
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters), adapters[0].digest]))
    expected = {number: run_together(whole, {number: digest})[0] for number, digest in digests.items()}
    runner = load_arm(model_dir, arm, adapters=adapters, max_loaded_adapters=max_loaded_adapters)
    stays = make_request("stays", prompts()[0], adapter=adapters[1].digest)
    staying = Driver(runner).add(stays) if max_loaded_adapters > 1 else None
    with capture_logs() as logs:
        for number in (4, 1, 0, 3, 2, 5):
            [run] = run_together(runner, {number: digests[number]})
            require_equal([run], [expected[number]])
    read = [line["name"] for line in logs if line["event"] == "adapter read"]
    assert read == (["d", "a", "c", "b", "a"] if staying is None else ["d", "a", "c"])


def test_files_that_changed_meanwhile_are_not_served(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "a"), write_adapter(model_dir, tmp_path / "b", seed=1))
    runner = load_arm(model_dir, "compiled", adapters=adapters, max_loaded_adapters=1)
    write_adapter(model_dir, tmp_path / "b", seed=2)
    request = make_request("r", prompts()[0], adapter=adapters[1].digest)
    with pytest.raises(ModelFailed, match=r"adapter b: .* has changed since the worker started"):
        Driver(runner).add(request)
    (tmp_path / "b" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFailed, match="adapter b can no longer be read"):
        Driver(runner).add(request)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(ModelFailed, match=r"adapter b can no longer be read: cannot read .*adapter_config\.json"):
        Driver(runner).add(request)
    assert run_together(runner, {1: adapters[0].digest})[0].tokens


def add_tensor(folder: Path, name: str, *shape: int) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(shape)}, path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora .* is not supported"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config .* is not supported"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config .* is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern must be an object"),
        ({"init_lora_weights": "lora_ga"}, "changes the base model"),
        ({"init_lora_weights": "OLoRA"}, "changes the base model"),
        ({"r": 8}, "has rank 4, and adapter_config.json says 8"),
        ({"lora_alpha": None}, "lora_alpha of module .* is None"),
        ({"lora_alpha": 10**400}, "lora_alpha of module .* is 1000.*, not a number"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, got 'false'"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"module .*_proj is not among the target_modules of adapter_config"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern: '\\(' is not a regular expression"),
    ],
)
def test_configs_that_are_not_plain_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ConfigurationError, match=f"adapter mine: .*{reason}"):
        read_adapter("mine", folder, 64)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"adapter mine: there is no folder {tmp_path / 'nowhere'}"):
        read_adapter("mine", tmp_path / "nowhere", 8)


def test_a_rank_over_the_cap_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine", rank=9)
    with pytest.raises(ConfigurationError, match="adapter mine: its rank is 9, over max_lora_rank 8: raise"):
        read_adapter("mine", folder, 8)


@pytest.mark.parametrize(
    ("tensor", "shape", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (64,), "only lora_A and lora_B"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", (4, 32), "has shape .4, 32., and this base model needs"),
        ("model.layers.0.self_attn.k_proj.lora_B.weight", (32, 5), "have different ranks"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, tensor: str, shape: tuple[int, ...], reason: str
) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    add_tensor(folder, PREFIX + tensor, *shape)
    with pytest.raises(ConfigurationError, match=f"adapter mine: .*{reason}"):
        load_arm(checkpoint("llama"), "torch", adapters=read_adapters(folder))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            "model.layers.7.self_attn.q_proj",
            "the model has no module model.layers.7.* for another base model, and says",
        ),
        (
            "lm_head",
            "module lm_head cannot have an adapter, only the matrices of attention, MLPs and experts can, but for",
        ),
    ],
)
def test_modules_that_do_not_fit_are_refused(checkpoint: Checkpoint, tmp_path: Path, module: str, reason: str) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine", base_model_name_or_path="org/other")
    for part, shape in (("lora_A", (4, 64)), ("lora_B", (64, 4))):
        add_tensor(folder, f"{PREFIX}{module}.{part}.weight", *shape)
    with pytest.raises(ConfigurationError, match=f"adapter mine: .*{reason}"):
        load_arm(checkpoint("llama"), "torch", adapters=read_adapters(folder))


@pytest.mark.parametrize(
    ("other_name", "reason"),
    [
        (
            ("base_model.model.model.", "model."),
            "module .*_proj has two tensors lora_[AB], with and without 'base_model",
        ),
        (
            ("model.layers", "model.language_model.layers"),
            "model.layers.* and model.language_model.* are the same module",
        ),
    ],
)
def test_two_pairs_for_one_module_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, other_name: tuple[str, str], reason: str
) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name.replace(*other_name): 2 * tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(ConfigurationError, match=f"adapter mine: .*{reason}"):
        load_adapter(read_adapters(folder)[0], parameter_specs(load_decoder_config(checkpoint("llama"))))


def test_targets_may_be_names_or_ends_of_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for targets in (["q_proj", "layers.1.self_attn.k_proj"], ["none"], "all-linear", None):
        folder = write_adapter(
            checkpoint("llama"), tmp_path / "mine", targets=r"q_proj|\.1\..*k_proj", target_modules=targets
        )
        assert len(read_adapters(folder)[0].matrices) == 4


def test_numbers_that_cannot_be_used_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Types before the model is read."""
    model_dir = checkpoint("llama")
    folder = write_adapter(model_dir, tmp_path / "mine", lora_alpha=1e308)
    specs = parameter_specs(load_decoder_config(model_dir))
    with pytest.raises(ConfigurationError, match=r"adapter mine: lora_alpha makes numbers of .* infinite"):
        load_adapter(read_adapters(folder)[0], specs)
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ConfigurationError, match=r"adapter mine: .* has dtype I8, not one of F32, F16, BF16"):
        adapter_shapes(read_adapters(folder), specs)


def test_a_damaged_header_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1))
    with pytest.raises(ConfigurationError, match=f"adapter mine: {path}: the header .* are not the size of shape"):
        read_adapters(folder)


def test_a_file_cut_short_while_the_worker_starts_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir, folder = checkpoint("llama"), tmp_path / "mine"
    (adapter,) = read_adapters(write_adapter(model_dir, folder))
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=f"adapter mine: {path} is truncated"):
        load_adapter(adapter, parameter_specs(load_decoder_config(model_dir)))


def test_a_setting_lists_folders_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    a, b = (write_adapter(checkpoint("llama"), tmp_path / name) for name in "ab")
    assert find_adapters(f"first={a}, second={b}") == {"first": a, "second": b}
    assert find_adapters(str(tmp_path)) == {"a": a, "b": b}
    assert find_adapters("") == {}
    for text, reason in (
        (f"a={a},a={b}", "two adapters are named a"),
        (f"a b={a}", "a name has 1 to 64 letters"),
        ("a=", "adapter 'a=' has no folder: give NAME=FOLDER"),
        (str(a), "no folder in it has adapter_config.json"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            find_adapters(text)


def test_a_digest_tells_contents_not_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    same = [read_adapters(write_adapter(model_dir, tmp_path / name))[0].digest for name in "ab"]
    assert same[0] == same[1]
    for changes in ({"seed": 1}, {"lora_alpha": 7}, {"use_rslora": True}):
        assert read_adapters(write_adapter(model_dir, tmp_path / "c", **changes))[0].digest != same[0]


def test_missing_files_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigurationError, match=r"has no adapter_model\.safetensors; run tandem convert"):
        read_adapter("mine", folder, 8)


@pytest.mark.parametrize("mistakes", [0.0, 0.5])
def test_drafts_change_nothing(checkpoint: Checkpoint, tmp_path: Path, mistakes: float) -> None:
    """Steps in which sequences of several adapters have several rows each."""
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    runner = load_arm(model_dir, "compiled", adapters=adapters)
    digests = ["", *(adapter.digest for adapter in adapters)]
    asked = [
        make_request(f"r{number}", prompts()[number % 3], max_new_tokens=20, adapter=digest)
        for number, digest in enumerate(digests)
    ]
    known_digests = frozenset(digests[1:])
    plain, _ = answer(runner, None, asked, adapters=known_digests)
    guessed, scheduler = answer(runner, FakeDrafter(known(ids(plain)), mistakes), asked, adapters=known_digests)
    assert guessed == plain
    assert scheduler.load().drafted_tokens > 30


def test_a_replay_goes_on_to_the_bit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    adapter = four_adapters(model_dir, tmp_path)[0]
    runner = load_arm(model_dir, "compiled", adapters=(adapter,))
    whole = run_together(runner, {1: adapter.digest})[0]
    driver, known_ids = Driver(runner), [*prompts()[1], *whole.token_ids[:4]]
    replay = make_request("r", known_ids, max_new_tokens=NUM_NEW, num_prompt_tokens=len(prompts()[1]))
    run = driver.add(replace(replay, adapter=adapter.digest, top_logprobs=NUM_TOP))
    driver.finish(run)
    assert run.tokens == whole.tokens[4:]


def test_a_worker_announces_its_adapters_and_doubts_their_base(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    bases = {"same": model_dir.name, "other": "org/another-model", "silent": ""}
    folders = {name: write_adapter(model_dir, tmp_path / name, base_model_name_or_path=b) for name, b in bases.items()}
    listed = ",".join(f"{name}={folder}" for name, folder in folders.items())
    limits = EngineLimits(64, 4, max_kv_tokens=256)
    with capture_logs() as logs:
        loaded = load_engine(_worker(model_dir, listed), limits)
    assert [adapter.name for adapter in loaded.worker_info(WorkerRole.DECODE, limits).adapters] == list(bases)
    doubted = [line["name"] for line in logs if line["event"] == "an adapter names another base model"]
    assert doubted == ["other"]


def test_an_adapter_has_another_name_than_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    settings = replace(_worker(checkpoint("llama"), f"mine={folder}"), name="mine")
    with pytest.raises(ConfigurationError, match="adapter mine has the name of the model"):
        settings.adapters()


def test_encoder_decoders_have_none(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_adapter(checkpoint("llama"), tmp_path / "mine")
    model_dir = build_encoder_decoder("t5", tmp_path / "t5")
    with pytest.raises(ConfigurationError, match="adapter mine: encoder-decoder models have no adapters"):
        load_model_runner(RunnerSettings(model_dir, "cpu", num_blocks=8, adapters=read_adapters(folder)))


def _worker(model_dir: Path, adapters: str) -> DecodeSettings:
    return DecodeSettings(model=str(model_dir), registry_address="none", adapter=adapters, enforce_eager=True)
