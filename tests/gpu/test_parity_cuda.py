"""The CPU parity tests on a CUDA device, for every attention backend that can run there."""

from pathlib import Path

import pytest
import torch

from engine.attention.flash import PAGE_TOKENS, why_no_flash_attn
from engine.loading.load_runner import load_model_runner
from engine.runner_settings import RunnerSettings
from tests.component.checkpoints import FAMILIES, OTHER_FAMILIES, build_checkpoint
from tests.component.encoder_decoders import FORMS, EncoderDecoderReference, build_encoder_decoder
from tests.component.kv.kv_moves import check_round_trip
from tests.component.parity import check_half_precision, check_parity, half_tolerance
from tests.component.test_encoder_decoder import require_same, run_mixed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WITH_FLASH = pytest.mark.skipif(why_no_flash_attn() is not None, reason=f"{why_no_flash_attn()}")
BACKENDS = ["torch", "triton", pytest.param("flash", marks=WITH_FLASH)]


def settings(model_dir: Path, attention: str, dtype: str) -> RunnerSettings:
    block_size = PAGE_TOKENS if attention == "flash" else 16
    return RunnerSettings(
        model_dir, device="cuda", dtype=dtype, num_blocks=64, block_size=block_size, attention=attention
    )


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_fp32(tmp_path: Path, family: str, attention: str) -> None:
    model_dir = build_checkpoint(family, tmp_path)
    check_parity(model_dir, load_model_runner(settings(model_dir, attention, "float32")))


@pytest.mark.parametrize("form", FORMS)
def test_encoder_decoder_fp32(tmp_path: Path, form: str) -> None:
    model_dir = build_encoder_decoder(form, tmp_path)
    theirs = EncoderDecoderReference.load(model_dir)
    for run in run_mixed(load_model_runner(settings(model_dir, "torch", "float32"))):
        require_same(run, theirs)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window", "qwen3", "bloom", "gemma2", "gpt2"])
def test_fp16(tmp_path: Path, family: str, attention: str) -> None:
    model_dir = build_checkpoint(family, tmp_path)
    check_half_precision(model_dir, settings(model_dir, attention, "float16"), half_tolerance(family, "float16"))


@pytest.mark.parametrize("attention", BACKENDS)
def test_bf16(tmp_path: Path, attention: str) -> None:
    model_dir = build_checkpoint("llama", tmp_path)
    check_half_precision(model_dir, settings(model_dir, attention, "bfloat16"), half_tolerance("llama", "bfloat16"))


def test_kv_round_trip(tmp_path: Path) -> None:
    model_dir = build_checkpoint("llama", tmp_path)
    check_round_trip(settings(model_dir, "torch", "float32"))
