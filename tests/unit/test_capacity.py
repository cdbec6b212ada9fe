"""Capacity maths against figures worked out by hand, and against the bundled checkpoint's own bytes."""

import json
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import write_shape
from engine.kernels.cpu.machine import why_no_loops
from engine.loading.memory_needs import weights_bytes
from engine.loading.resolve import kv_layout, resolve
from engine.loading.runner_parts import load_packed, load_parameters
from engine.models.packed_weights import write_packed
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from engine.models.share import rank_share
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.capacity.model_size import ModelSize, model_size
from tandem_cli.capacity.prediction import (
    Load,
    PassTimes,
    PlanRequest,
    batches_to_plan,
    blended_tokens_per_s,
    largest_batch,
    plan_capacity,
    predicted_times,
    rate_of_users,
    workers_for,
)
from tandem_cli.capacity.ranks import precision_of, rank_memory
from tandem_cli.capacity.roofline import DEVICES, WEIGHT_BYTES, Capacity, DeviceRates, Precision, find_device
from tandem_cli.load_test.figures import price_per_million
from tandem_cli.model_files.model_folders import BUNDLED
from tests.defects import Repaired

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
HALF = Precision("bfloat16", "bfloat16")
TOY = ModelSize(1000, 100, 10, tied=True, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=8)
TOY_DEVICE = DeviceRates(1e6, bandwidth_bytes_per_s=1000, flops_per_s=8000, attention_flops_per_s=4000)


@pytest.fixture
def llama(tmp_path: Path) -> ModelSize:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return model_size(load_config(tmp_path))


def test_llama_3_8b(llama: ModelSize) -> None:
    assert llama.params == 8_030_261_248
    assert llama.kv_bytes_per_token(2) == 131_072
    capacity = Capacity(llama, HALF, find_device("H100 SXM").rates(HALF), memory_share=0.9)
    assert capacity.weights_bytes == 16_060_522_496
    assert capacity.kv_tokens == int((72e9 - 16_060_522_496) // 131_072) == 426_784
    assert capacity.users(8192) == 52
    assert capacity.critical_batch == pytest.approx(989.4e12 / 3.35e12)
    # Weights without the embedding: 15.0 GB over 3.35 TB/s, and 2,000 tokens of KV.
    assert capacity.decode_step_s(1, 2000) == pytest.approx((15_009_316_864 + 2000 * 131_072) / 3.35e12)


def test_latents_are_keys_and_values_at_once(tmp_path: Path) -> None:
    config = {**LLAMA_3_8B, "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 3, "q_lora_rank": None}
    config |= {"num_experts_per_tok": 2, "n_routed_experts": 8, "moe_intermediate_size": 1408}
    config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_decoder_config(tmp_path)
    assert model_size(found).kv_bytes_per_token(2) == 3 * (512 + 64) * 2
    layout = kv_layout(found, RunnerSettings(tmp_path, load_format="dummy", kv_dtype="float16"))
    assert layout.block_bytes == layout.block_size * 3 * (512 + 64) * 2
    (memory,) = rank_memory(found, replace(HALF, kv="float16"), Degrees(), None)
    assert memory.kv_bytes_per_token == 3 * (512 + 64) * 2


@pytest.mark.parametrize("kv", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shape", ["lfm2-350m", "qwen3.5-0.8b", "granite4-h-350m", "mamba-130m", "jamba-3b-4"])
def test_a_sequence_holds_the_blocks_of_its_state(tmp_path: Path, shape: str, kv: str) -> None:
    """As many as a worker reserves; what a plan calls 1,000 users is no more than the blocks hold."""
    config = load_decoder_config(write_shape(shape, tmp_path))
    layout = kv_layout(config, RunnerSettings(tmp_path / shape, load_format="dummy", kv_dtype=kv))
    rates = DeviceRates(1e11, 1, 1, 1)
    capacity = Capacity(model_size(config), Precision("float32", "float32", kv), rates)
    assert capacity.state_blocks == layout.state_blocks > 0
    assert 16 * capacity.kv_bytes_per_token == layout.block_bytes
    assert capacity.kv_tokens // 16 == capacity.num_blocks - layout.state_blocks
    assert capacity.users(1024) == capacity.num_blocks // layout.num_blocks_for(1024)
    (memory,) = rank_memory(config, capacity.precision, Degrees(), None)
    assert memory.kv_bytes_per_token == capacity.kv_bytes_per_token


@pytest.mark.parametrize("layers", [("sliding", "full"), ("sliding",)], ids="-".join)
def test_a_sequence_holds_what_windows_show(tmp_path: Path, layers: tuple[str, ...]) -> None:
    """In tokens; a worker has up to a block more in each group. What an answer of `tandem plan` calls sequences."""
    config = {**LLAMA_3_8B, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 512}
    config |= {"layer_types": [f"{kind}_attention" for kind in layers] * (32 // len(layers))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_decoder_config(tmp_path)
    layout = kv_layout(found, RunnerSettings(tmp_path, load_format="dummy", kv_dtype="bfloat16"))
    capacity = Capacity(model_size(found), HALF, DeviceRates(1e12, 1, 1, 1))
    assert capacity.num_blocks == int(capacity._bytes_for_kv // layout.block_bytes)
    [shown] = plan_capacity(capacity, PlanRequest(Load(1, 1, 1), [1], lengths=[8192]), {})["sequences"]
    in_window = 512 if "full" not in layers else (512 + 8192) / 2
    assert shown["kv_bytes"] == in_window * 131_072
    assert shown["all_kv_bytes"] == 8192 * 131_072
    assert 0 <= layout.num_blocks_for(8192) * layout.block_bytes - shown["kv_bytes"] <= layout.block_bytes


def test_parameters_are_those_of_the_checkpoint() -> None:
    path = BUNDLED / "model.safetensors"
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    config = load_config(BUNDLED)
    stored_bytes = sum(
        end - start for start, end in (each["data_offsets"] for each in header.values() if "shape" in each)
    )
    assert model_size(config).params * WEIGHT_BYTES[config.dtype] == stored_bytes


def test_a_prompt_and_a_step_by_hand() -> None:
    capacity = Capacity(TOY, HALF, TOY_DEVICE)
    # 10 tokens: 2 x (1000 x 10 + 100) FLOPs of linear layers; 4 x 2 x 4 x 8 x 10 x 5 of attention.
    assert capacity.prefill_flops(10) == 20_200 + 12_800
    assert capacity.kv_bytes_per_token == 64
    # Linear: arithmetic 2.525 s > reading 2.2 s. Attention: arithmetic 3.2 s > moving 1.28 s.
    assert capacity.prefill_s(10) == pytest.approx(2.525 + 3.2)
    # A step of 2 with 20 tokens each: reading 2.2 s > arithmetic 0.55 s; KV 2.56 s > arithmetic 2.56 s (equal).
    assert capacity.decode_step_s(2, 20) == pytest.approx(2.2 + 2.56)
    assert capacity.decode_intensity(2, 20) == pytest.approx((4400 + 10_240) / (2200 + 2560))
    assert capacity.transfer_s(10, link_bytes_per_s=320) == 2


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_mixtral_reads_the_experts_that_are_chosen(tmp_path: Path, repaired: Repaired) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    size = model_size(load_config(tmp_path))
    one_expert = 32 * 3 * 4096 * 14336
    assert size.expert_params == 8 * one_expert
    assert size.params == 46_702_792_704
    assert size.active_params == size.step_params - 6 * one_expert
    assert size.active_params + size.vocabulary_params == pytest.approx(12.88e9, rel=1e-3)  # as published
    # Experts that B rows touch, if each row chooses 2 of 8 at random: 2, then 3.5 of them, in the end all.
    assert size.read_params(1) == pytest.approx(size.active_params)
    assert size.read_params(2) == pytest.approx(size.step_params - (8 - 3.5) * one_expert)
    assert size.read_params(10**4) == pytest.approx(size.step_params)
    int8 = Precision("int8", "bfloat16")
    capacity = Capacity(size, int8, find_device("h100-sxm").rates(int8))
    step_ms = 1000 * capacity.decode_step_s(1, 256)
    assert step_ms == pytest.approx(size.active_params / 3.35e9, rel=0.01)
    assert capacity.prefill_flops(1000) < 1000 * 2.2 * size.active_params
    batch = capacity.critical_batch
    assert 2 * size.active_params * batch / 1978.9e12 == pytest.approx(size.read_params(batch) / 3.35e12)
    repaired("F7", f"one token on an H100 in int8: {step_ms:.1f} ms, 2 of 8 experts read; all 8 at large batches")


def test_a_model_without_experts_reads_everything(llama: ModelSize) -> None:
    assert llama.active_params == llama.step_params == llama.read_params(1) == llama.read_params(100)


LLAMA_2_7B = LLAMA_3_8B | {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}


def test_batches_that_do_not_fit_are_not_planned_with(tmp_path: Path, repaired: Repaired) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    load = Load(input_tokens=3840, output_tokens=256, requests_per_s=1)
    capacity = Capacity(model_size(load_config(tmp_path)), HALF, find_device("a10g").rates(HALF), memory_share=1.0)
    assert capacity.users(4096) == 4
    assert batches_to_plan(capacity, load, None) == [1, 4]
    assert batches_to_plan(capacity, load, [1, 32]) == [1, 4, 32]
    plan = plan_capacity(capacity, PlanRequest(load, [1, 4, 32]), {})
    assert [row["fits"] for row in plan["predictions"]] == [True, True, True, False]
    assert plan["batch"] == 4
    assert plan["workers"]["predicted"]["whole"] == (1, 3)
    too_small = replace(capacity, memory_share=0.5)
    assert batches_to_plan(too_small, load, None) == [1]
    assert [row["fits"] for row in plan_capacity(too_small, PlanRequest(load, [1]), {})["predictions"]] == [
        False,
        False,
    ]
    repaired("F8", f"Llama 2 7B on an A10G: batches 1 and 4, 32 'does not fit', 1 + 3 workers; {len(DEVICES)} devices")


def test_int8_holds_a_tied_embedding_twice() -> None:
    capacity = Capacity(TOY, Precision("int8", "float32"), TOY_DEVICE)
    assert capacity.weights_bytes == 1100 * 1 + 100 * 4 + 10 * 4
    assert replace(capacity, precision=Precision("float32", "float32")).weights_bytes == 1110 * 4


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma4ForCausalLM"])
def test_a_plan_counts_what_a_worker_holds(tmp_path: Path, architecture: str, quantize: str) -> None:
    """A tied output matrix is packed beside the embedding; Gemma 4 has a second table of tokens."""
    if reason := why_no_loops():
        pytest.skip(reason)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 64, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 2048, "vocab_size_per_layer_input": 2048}
    config = LLAMA_3_8B | sizes | {"torch_dtype": "bfloat16", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    settings, _ = resolve(RunnerSettings(tmp_path, "cpu", load_format="dummy", quantize=quantize))
    found = load_decoder_config(tmp_path)
    write_packed(tmp_path / "packed", load_packed(settings, found, rank_share(found)))
    capacity = Capacity(model_size(found), precision_of(settings, found), TOY_DEVICE)
    num_bytes = (tmp_path / "packed").stat().st_size
    assert capacity.weights_bytes == pytest.approx(num_bytes, rel=0.03)
    assert weights_bytes(settings, parameter_specs(found), found, is_packed=True) == pytest.approx(num_bytes, rel=0.03)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_plan_counts_the_table_of_the_eager_decoder(tmp_path: Path, quantize: str) -> None:
    """It stays in bf16 beside numbers in fp32."""
    sizes = {"hidden_size": 512, "intermediate_size": [1024, 1024], "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "hidden_size_per_layer_input": 64, "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    sizes |= {"vocab_size": 2048, "vocab_size_per_layer_input": 65_536, "torch_dtype": "bfloat16"}
    config = {"architectures": ["Gemma3nForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings, _ = resolve(RunnerSettings(tmp_path, "cpu", load_format="dummy", quantize=quantize))
    found = load_decoder_config(tmp_path)
    specs = parameter_specs(found)
    parameters = load_parameters(settings, found, specs)
    table = next(spec for spec in specs if spec.name == "layer_inputs")
    assert parameters.take("layer_inputs").dtype == torch.bfloat16
    capacity = Capacity(model_size(found), precision_of(settings, found), TOY_DEVICE)
    num_bytes = weights_bytes(settings, specs, found)
    assert num_bytes > prod(table.shape) * 2
    # The plan has a tied output matrix in int8 beside the embedding; small matrices in fp32 count as linear layers.
    beside = prod(specs[0].shape) if quantize == "int8" else 0
    assert capacity.weights_bytes - beside == pytest.approx(num_bytes, rel=0.03)


def test_a_model_that_does_not_fit_has_no_users(llama: ModelSize) -> None:
    capacity = Capacity(llama, HALF, replace(TOY_DEVICE, memory_bytes=8e9))
    assert (capacity.kv_tokens, capacity.users(1)) == (0, 0)
    assert largest_batch(capacity, Load(1, 1, 1), [1, 8]) is None


def test_workers_for_a_load_by_hand() -> None:
    load = Load(input_tokens=100, output_tokens=11, requests_per_s=4)
    times = PassTimes(prefill_s=0.5, step_s=0.2, batch=8)
    need = workers_for(load, times)
    # 4 x 0.5 s of prefill, and 4 x 10 steps x 0.2 s / 8 of decode, each second.
    assert (need.prefill, need.decode) == pytest.approx((2, 1))
    assert need.whole == (2, 1)
    assert need.decode_per_prefill == pytest.approx(0.5)
    assert rate_of_users(load, times, users=10) == pytest.approx(10 / 2.5)


def test_prices_by_hand() -> None:
    assert price_per_million(3.6, 1000) == pytest.approx(1.0)
    assert price_per_million(3.6, 200) == pytest.approx(5.0)
    assert price_per_million(3.6, blended_tokens_per_s(1000, 200)) == pytest.approx((3 * 1.0 + 5.0) / 4)


def test_devices_know_what_they_multiply_with() -> None:
    assert find_device("h100-sxm").rates(Precision("int8", "float16")).flops_per_s == 1978.9e12
    assert find_device("a100-80gb").rates(Precision("fp8", "bfloat16")).flops_per_s == 312e12  # it has no fp8
    for device in DEVICES.values():
        assert device.source
        assert device.rates(Precision("float16", "float16")).flops_per_s < 3e15
        assert 1e11 < device.bandwidth_bytes_per_s < 1e13
    with pytest.raises(ConfigurationError, match="choose a --dtype of float32, float16"):
        find_device("t4").rates(HALF)
    with pytest.raises(ConfigurationError, match="did you mean a100-80gb or a100-80gb-pcie"):
        find_device("A100")
    with pytest.raises(ConfigurationError, match="known devices: here, h100-sxm"):
        find_device("abacus")


def test_fp8_kv_takes_half_and_is_multiplied_in_the_type_of_the_rest(llama: ModelSize) -> None:
    h100, narrow = find_device("h100-sxm"), Precision("bfloat16", "bfloat16", "fp8")
    assert h100.rates(narrow) == h100.rates(HALF)
    half, fp8 = (Capacity(llama, precision, h100.rates(precision)) for precision in (HALF, narrow))
    assert (half.kv_bytes_per_token, fp8.kv_bytes_per_token) == (131072, 65536)
    assert fp8.kv_tokens - 2 * half.kv_tokens in (0, 1)
    plan = plan_capacity(fp8, PlanRequest(Load(2048, 256, 1.0), [1]), {})
    assert {row["kv"] for row in plan["memory"]} == {"fp8"}
    assert "fp8" not in {row["other"] for row in plan["memory"]}


BATCHES, CONTEXTS = st.integers(1, 512), st.integers(1, 8192)


@given(BATCHES, CONTEXTS)
def test_more_sequences_never_make_a_step_shorter_nor_a_token_dearer(batch: int, context: int) -> None:
    capacity = Capacity(TOY, HALF, TOY_DEVICE)
    assert capacity.decode_step_s(batch + 1, context) >= capacity.decode_step_s(batch, context)
    one, more = (capacity.decode_tokens_per_s(size, context) for size in (batch, batch + 1))
    assert more >= one * (1 - 1e-12)


@given(BATCHES, CONTEXTS)
def test_no_step_is_faster_than_its_bytes_or_its_flops(batch: int, context: int) -> None:
    capacity, device = Capacity(TOY, HALF, TOY_DEVICE), TOY_DEVICE
    step_s = capacity.decode_step_s(batch, context) * (1 + 1e-12)
    assert step_s >= capacity.decode_bytes(batch, context) / device.bandwidth_bytes_per_s
    assert step_s >= capacity.decode_flops(batch, context) / device.flops_per_s


@given(st.integers(1, 100))
def test_below_the_critical_batch_more_rows_are_free(num_rows: int) -> None:
    capacity = Capacity(TOY, HALF, TOY_DEVICE)
    without_kv = capacity.decode_step_s(num_rows, 0)
    is_free = without_kv == capacity.decode_step_s(1, 0)
    assert is_free == (num_rows <= capacity.critical_batch)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_ratio_of_workers_is_the_same_at_every_rate(first: float, second: float) -> None:
    capacity = Capacity(TOY, HALF, TOY_DEVICE)
    needs = [
        workers_for(load, predicted_times(capacity, load, 8))
        for load in (Load(100, 20, requests_per_s=rate) for rate in (first, second))
    ]
    assert needs[0].decode_per_prefill == pytest.approx(needs[1].decode_per_prefill)
