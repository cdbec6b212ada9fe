"""Capacity maths against figures worked out by hand, and against the bundled checkpoint's own bytes."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.capacity import WEIGHT_BYTES, Capacity, DeviceRates, ModelSize, Precision, model_size
from bench.devices import DEVICES, find_device
from bench.fleet import (
    Load,
    PassTimes,
    blended_price,
    largest_batch,
    predicted_times,
    price_per_million_tokens,
    rate_of_users,
    workers_for,
)
from bench.shapes import BUNDLED
from engine.models.config import load_config
from mesh.domain.errors import ConfigurationError

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


def test_int8_holds_a_tied_embedding_twice() -> None:
    capacity = Capacity(TOY, Precision("int8", "float32"), TOY_DEVICE)
    assert capacity.weights_bytes == 1100 * 1 + 100 * 4 + 10 * 4
    assert replace(capacity, precision=Precision("float32", "float32")).weights_bytes == 1110 * 4


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
    assert price_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    assert blended_price(1.0, 5.0) == 2.0


def test_devices_know_what_they_multiply_with() -> None:
    assert find_device("h100-sxm").rates(Precision("int8", "float16")).flops_per_s == 1978.9e12
    assert find_device("a100-80gb").rates(Precision("fp8", "bfloat16")).flops_per_s == 312e12  # it has no fp8
    assert all(device.flops_per_s["bfloat16"] < 3e15 and device.source for device in DEVICES.values())
    with pytest.raises(ConfigurationError, match="known are: here, h100-sxm"):
        find_device("abacus")


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
