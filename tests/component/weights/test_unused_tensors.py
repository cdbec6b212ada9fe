"""What a checkpoint holds beside the model's parameters: harmless, named, or refused; and numbers that are none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from mesh.domain.errors import ConfigurationError
from tests.component.test_load import edit_weights, load
from tests.defects import Repaired

Checkpoint = Callable[[str], Path]


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    """`copy(family)` is a checkpoint that a test may break."""
    return lambda family: Path(shutil.copytree(checkpoint(family), tmp_path / family))


def add(model_dir: Path, **tensors: torch.Tensor) -> None:
    edit_weights(model_dir, lambda stored: stored.update({name.replace("__", "."): t for name, t in tensors.items()}))


def warnings_of(model_dir: Path, **changes: str) -> list[str]:
    with capture_logs() as logs:
        load(model_dir, **changes)
    return [str(line["tensors"]) for line in logs if "does not use" in line["event"]]


def test_tensors_that_nobody_uses_are_named(copy: Checkpoint, repaired: Repaired) -> None:
    model_dir = copy("llama")
    extra = {f"model__layers__{layer}__self_attn__k_scale": torch.ones(1) for layer in range(3)}
    add(model_dir, adapter__weight=torch.ones(3), **extra)
    assert warnings_of(model_dir) == ["adapter.weight, model.layers.*.self_attn.k_scale (3)"]
    assert warnings_of(model_dir, kv_dtype="fp8") == ["adapter.weight"], "KV in fp8 is scaled by the others"
    repaired("M9", "tensors that the model does not use are named in one line of the log")


def test_what_is_known_to_be_harmless_is_not_named(copy: Checkpoint) -> None:
    model_dir = copy("llama-tied")
    embedding: list[torch.Tensor] = []
    edit_weights(model_dir, lambda stored: embedding.append(stored["model.embed_tokens.weight"].clone()))
    add(
        model_dir,
        lm_head__weight=embedding[0],
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        model__layers__0__self_attn__masked_bias=torch.ones(1),
        model__norm__bias=torch.zeros(64),
    )
    assert warnings_of(model_dir) == []


@pytest.mark.parametrize("name", ["lm_head__weight", "lm_head__qweight"])
def test_an_output_matrix_of_its_own_beside_tied_embeddings_is_refused(copy: Checkpoint, name: str) -> None:
    """transformers uses it, whatever config.json says."""
    model_dir = copy("llama-tied")
    add(model_dir, **{name: torch.ones(264, 64)})
    stated = rf"{name.replace('__', '.')} differs from model\.embed_tokens\.weight, and config\.json says that they are"
    with pytest.raises(ConfigurationError, match=f"{stated} equal: set tie_word_embeddings to false, or remove it"):
        load(model_dir)


@pytest.mark.parametrize("place", [0, 100, 264 * 64 - 1])
def test_an_output_matrix_that_differs_in_one_number_is_refused(copy: Checkpoint, place: int) -> None:
    model_dir = copy("llama-tied")

    def add_head(stored: dict[str, torch.Tensor]) -> None:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        stored["lm_head.weight"].view(-1)[place] += 1

    edit_weights(model_dir, add_head)
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(model_dir)


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "gpt2", "gpt-neox", "qwen2", "mixtral", "bloom"])
def test_plain_checkpoints_have_nothing_to_name(checkpoint: Checkpoint, family: str) -> None:
    assert warnings_of(checkpoint(family)) == []


@pytest.mark.parametrize("name", ["model__layers__0__self_attn__q_proj__bias", "model__norm__bias"])
def test_a_bias_that_nobody_announced_is_refused(copy: Checkpoint, name: str, repaired: Repaired) -> None:
    model_dir = copy("llama")
    add(model_dir, **{name: torch.full((64,), 3.0)})
    with pytest.raises(ConfigurationError, match=rf"has {name.replace('__', '.')}, which config\.json does not"):
        load(model_dir)
    repaired("M9", "a bias that config.json does not announce is refused by name; Gemma's attention_bias is used")


def test_a_bias_in_fp8_is_known_to_be_zeros_or_not(copy: Checkpoint) -> None:
    model_dir = copy("llama")
    add(model_dir, model__norm__bias=torch.zeros(64, dtype=torch.float8_e4m3fn))
    assert warnings_of(model_dir) == []
    add(model_dir, model__norm__bias=torch.ones(64).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigurationError, match=r"has model\.norm\.bias, which config\.json does not"):
        load(model_dir)


def test_a_bias_of_a_type_that_torch_lacks_is_refused(copy: Checkpoint) -> None:
    model_dir = copy("llama")
    add(model_dir, model__norm__bias=torch.zeros(48, dtype=torch.uint8))
    path = model_dir / "model.safetensors"
    stored = path.read_bytes()
    end = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:end])
    header["model.norm.bias"] |= {"dtype": "F6_E2M3", "shape": [64]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + stored[end:])
    with pytest.raises(ConfigurationError, match=r"cannot read tensor model\.norm\.bias: .*F6_E2M3"):
        load(model_dir)


def test_biases_of_a_gemma_that_says_it_has_none(copy: Checkpoint) -> None:
    model_dir = copy("gemma-biases")
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": False}))
    with pytest.raises(ConfigurationError, match=r"has .*_proj\.bias and 11 more biases"):
        load(model_dir)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_named(copy: Checkpoint, name: str, value: float, repaired: Repaired) -> None:
    model_dir = copy("llama")
    edit_weights(model_dir, lambda stored: stored[name].view(-1)[7:8].fill_(value))
    with pytest.raises(ConfigurationError, match=rf"1 of \d+ numbers of tensor {name} are NaN or infinite"):
        load(model_dir)
    repaired("M7", "a checkpoint with one NaN is refused when it is loaded, and the tensor is named")
