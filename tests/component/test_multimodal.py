"""Multimodal checkpoints are served as their text part, whatever their tensors are called."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoConfig

from checkpoint.multimodal import TEXT_MODELS
from engine.loading.load_runner import load_model_runner
from engine.models.adapters import load_adapter
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from tandem_cli.main import main
from tests.component.arms import settings
from tests.component.lora.adapters import PREFIX, read_adapters, write_adapter
from tests.component.multimodal import CASES, build_multimodal, multimodal, text_alone
from tests.component.parity import expect, prompts, require_same, run_mixed
from tests.component.weights.quantized import quantize_checkpoint


@pytest.mark.parametrize("case", CASES)
def test_text_part_says_what_transformers_says(tmp_path: Path, case: str) -> None:
    """transformers' whole model, without images: all axes of Qwen's positions are equal."""
    model_dir = build_multimodal(case, tmp_path)
    with capture_logs() as logs:
        runner = load_model_runner(settings(model_dir))
    for run, prompt in zip(run_mixed(runner), prompts(), strict=True):
        require_same(run, expect(multimodal(case), prompt))
    not_read = next(line["tensors_not_read"] for line in logs if "tensors_not_read" in line)
    assert not_read.keys() & {"vision_tower", "visual", "vision_model"}
    assert not [line for line in logs if "does not use" in line["event"]]


def test_gemma_3n_as_published(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers' whole model needs another library for images, so the text model's tensors are renamed."""
    text, whole = checkpoint("gemma3n"), Path(shutil.copytree(checkpoint("gemma3n"), tmp_path / "whole"))
    tensors = load_file(whole / "model.safetensors")
    tensors = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    for part in ("vision_tower.timm_model", "audio_tower.conformer.0", "embed_vision", "embed_audio"):
        tensors[f"model.{part}.weight"] = torch.ones(4, 4)
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    raw = json.loads((whole / "config.json").read_text())
    published = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": raw, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps(published))
    with capture_logs() as logs:
        require_equal(whole, text)
    not_read = next(line["tensors_not_read"] for line in logs if "tensors_not_read" in line)
    assert not_read.keys() == {"vision_tower", "audio_tower", "embed_vision", "embed_audio"}
    assert not [line for line in logs if "does not use" in line["event"]]


def test_experts_as_published(tmp_path: Path) -> None:
    """Qwen 3 VL MoE's files have inputs first, what transformers saves outputs."""
    saved = build_multimodal("qwen3_vl_moe", tmp_path / "saved")
    published = Path(shutil.copytree(saved, tmp_path / "published"))
    tensors = load_file(saved / "model.safetensors")
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    require_equal(published, saved)


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A multimodal checkpoint, and its text part as a checkpoint of its own."""
    model_dir = build_multimodal("llava", tmp_path / "whole")
    return model_dir, text_alone(model_dir, tmp_path / "text")


def require_equal(whole: Path, text: Path) -> None:
    ours, expected = (run_mixed(load_model_runner(settings(folder))) for folder in (whole, text))
    assert [(run.tokens, run.prompt_logprobs) for run in ours] == [
        (run.tokens, run.prompt_logprobs) for run in expected
    ]


@pytest.mark.parametrize("form", ["awq", "fp8", "w4a16-32"])
def test_quantised_by_others(both: tuple[Path, Path], tmp_path: Path, form: str) -> None:
    whole, text = (quantize_checkpoint(folder, tmp_path / f"{folder.name}-{form}", form) for folder in both)
    raw = json.loads((whole / "config.json").read_text())
    for group in raw["quantization_config"].get("config_groups", {}).values():
        group["targets"] = [r"re:model\.language_model\.layers.*"]  # as transformers calls the modules
        raw["quantization_config"]["ignore"] = ["lm_head", "re:.*vision_tower.*", "re:^(?!.*language_model).*"]
    (whole / "config.json").write_text(json.dumps(raw))
    require_equal(whole, text)


def test_quantised_by_us(both: tuple[Path, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"token_ids": [1, 2, 3, 4 + i]}) + "\n" for i in range(8)))
    for folder in both:
        out = tmp_path / f"{folder.name}-made"
        assert main(["quantize", str(folder), str(out), "--scheme=w8a8", f"--data={data}"]) == 0
    whole, text = tmp_path / "whole-made", tmp_path / "text-made"
    require_equal(whole, text)
    ignored = json.loads((whole / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"re:.*vision_tower.*", "re:.*multi_modal_projector.*"} <= set(ignored)


def test_adapters_name_modules_as_transformers_does(both: tuple[Path, Path], tmp_path: Path) -> None:
    plain, renamed = (write_adapter(both[0], tmp_path / name) for name in ("plain", "renamed"))
    tensors = load_file(renamed / "adapter_model.safetensors")
    prefix = f"{PREFIX}model."
    tensors = {name.replace(prefix, f"{prefix}language_model."): tensor for name, tensor in tensors.items()}
    other_parts = {"model.visual.patch_embed.proj": (4, 3, 2, 2), "vision_tower.layers.0.q_proj": (4, 64)}
    tensors |= {f"{PREFIX}{module}.lora_A.weight": torch.ones(shape) for module, shape in other_parts.items()}
    save_file(tensors, renamed / "adapter_model.safetensors")
    specs = parameter_specs(load_decoder_config(both[0]))
    first, second = (load_adapter(adapter, specs) for adapter in read_adapters(plain, renamed))
    assert first.keys() == second.keys(), "parts that are not served do not matter"
    assert all(torch.equal(a.b, b.b) for name in first for a, b in zip(first[name], second[name], strict=True))


def test_partitioned(both: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["partition", str(both[0]), str(tmp_path / "out")]) == 0
    require_equal(tmp_path / "out", both[1])


@pytest.mark.parametrize("kind", [kind for kind, model in TEXT_MODELS.items() if model.defaults])
def test_what_text_config_leaves_out_is_transformers_default(tmp_path: Path, kind: str) -> None:
    """But if the output matrix is tied, which they do not agree on among themselves."""
    configs = []
    stated = AutoConfig.for_model(kind).to_dict()
    stated.pop("tie_word_embeddings", None)
    for text_config in ({"model_type": kind}, stated):
        raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text_config}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        configs.append(load_config(tmp_path))
    assert configs[0] == configs[1]
