"""Ternary checkpoints (BitNet), computed as transformers' BitLinear and AutoBitLinear do: in int8, and in 4 bits."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint.partition_manifest import read_partition
from engine.kernels.cpu.machine import knows_vnni
from engine.loading.load_runner import load_model_runner
from engine.loading.memory_needs import weights_bytes
from engine.loading.resolve import resolve
from engine.loading.stored_parameters import specs_of
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.encodings import IN_STEPS, OUTPUT, LinearParameters, Parameters
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.capacity.ranks import precision_of
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import llama_like, randomise, save_tokenizer
from tests.component.driving import Run
from tests.component.parity import expect, prompts, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal, whole_kv
from tests.made_once import made_once
from tests.mesh_in_process import mesh_in_process
from tests.parity import ask

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where functions are decorated to be compiled
    from transformers.integrations.bitnet import WeightQuant, pack_weights, unpack_weights

KINDS = ("bitlinear", "autobitlinear", "online")
USUAL = "int4" if knows_vnni() else "int8"
ALONE = "-1"
DOWN = "model.layers.1.mlp.down_proj"

Ternary = Callable[[str, str], Path]


def make(model_type: str, kind: str, folder: Path, **facts: Any) -> None:
    """A random model whose tensors transformers has packed. Its output matrix is in fp16, which is widened: CPUs that
    multiply bf16 round what they multiply with it, see `test_output_matrices_in_bf16`.
    """
    torch.manual_seed(0)
    model = llama_like(model_type, **facts)
    randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if kind != "online":
            weight = tensors[name].float()
            mean = weight.abs().mean()
            tensors[name] = pack_weights((weight / mean).round().clamp(-1, 1))
            tensors[f"{name}_scale"] = (1 / mean if kind == "bitlinear" else mean).reshape(1).bfloat16()
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    linear_class = "bitlinear" if kind == "bitlinear" else "autobitlinear"
    mode = "online" if kind == "online" else "offline"
    describe(folder, quant_method="bitnet", linear_class=linear_class, quantization_mode=mode)


def describe(folder: Path, **quantization: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    known = raw.get("quantization_config", {})
    path.write_text(json.dumps(raw | {"dtype": "bfloat16", "quantization_config": known | quantization}))


@pytest.fixture(scope="module")
def ternary(tmp_path_factory: pytest.TempPathFactory) -> Ternary:
    """`ternary(model_type, kind)` is a folder of such a model; with ALONE behind its type it has one layer."""

    def make_once(model_type: str, kind: str) -> Path:
        facts = {"num_hidden_layers": 1} if model_type.endswith(ALONE) else {}
        build = partial(make, model_type.removesuffix(ALONE), kind, **facts)
        return made_once(tmp_path_factory, f"{model_type}-{kind}", build)

    return make_once


@pytest.fixture(autouse=True, scope="module")
def eager_functions() -> Iterator[None]:
    """Functions of transformers' BitNet are compiled otherwise, which takes a C++ compiler and minutes."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def reference(model_dir: Path) -> Any:
    """transformers' model, computed in fp32: it keeps the types of a quantised file."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    for values in (*model.parameters(), *model.buffers()):
        if values.is_floating_point():
            values.data = values.data.float()
    return model


def differences(model_dir: Path, runs: list[Run]) -> Tensor:
    """Of the log-probs of all prompts and answers from those of transformers."""
    model = reference(model_dir)
    found: list[float] = []
    for prompt, run in zip(prompts(), runs, strict=True):
        rows = expect(model, prompt, len(run.tokens), run.token_ids).logprobs
        following = torch.tensor([*prompt[1:], *run.token_ids])
        ours = [each.logprob for each in (*run.prompt_logprobs, *run.tokens)]
        found += (torch.tensor(ours) - rows.gather(1, following[:, None])[:, 0]).abs().tolist()
    assert len(found) == sum(map(len, prompts())) - 3 + 30
    return torch.tensor(found)


def require_near(found: Tensor) -> None:
    """Of a model of one layer. Sums in another order change numbers in their last bits, and a few in a hundred thousand
    are then rounded to the other side. So a few log-probs differ; in further layers more would.
    """
    assert float((found < 2e-5).float().mean()) > 0.8
    assert float(found.max()) < 0.2


@pytest.mark.parametrize("model_type", ["bitnet", "llama"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("arm", "asked"), [("compiled", "none"), ("compiled", "int8"), ("cpu", "none")])
def test_models_say_what_transformers_says(ternary: Ternary, model_type: str, kind: str, arm: str, asked: str) -> None:
    model_dir = ternary(f"{model_type}{ALONE}", kind)
    require_near(differences(model_dir, run_mixed(load_arm(model_dir, arm, quantize=asked, kv_dtype="float32"))))


@pytest.mark.parametrize("is_tied", [False, True])
def test_output_matrices_in_bf16(tmp_path: Path, *, is_tied: bool) -> None:
    """They are not rounded. CPUs that multiply bf16 round what they are multiplied with to it, as transformers does."""
    model_dir = tmp_path / "model"
    make("bitnet", "bitlinear", model_dir, tie_word_embeddings=is_tied, num_hidden_layers=1)
    tensors = load_file(model_dir / "model.safetensors")
    tensors = {name: tensor.bfloat16() if name == "lm_head.weight" else tensor for name, tensor in tensors.items()}
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    runners = {arm: load_arm(model_dir, arm, kv_dtype="float32") for arm in ("compiled", "cpu")}
    found = {arm: differences(model_dir, run_mixed(runner)) for arm, runner in runners.items()}
    require_near(found["cpu"])
    assert float(found["compiled"].mean()) < 0.004
    model = runners["compiled"].model
    assert isinstance(model, CompiledDecoder)
    assert model._model.output.packed.dtype == np.int16


async def test_a_mesh_says_what_transformers_says(ternary: Ternary) -> None:
    model_dir = ternary("bitnet", "autobitlinear")
    model = reference(model_dir)
    small = {"kv_dtype": "float32"}
    async with mesh_in_process(
        model_dir, colocated=False, router={"prefill_overflow": 0}, prefill=small, decode=small
    ) as client:
        outcome = await ask(
            client, lambda prompt, ids: expect(model, prompt, len(ids), ids).logprobs[len(prompt) - 1 :]
        )
    assert outcome.moved_kv
    assert outcome.num_wrong <= outcome.num_tokens // 20
    assert outcome.mean < 0.01


@pytest.mark.parametrize(
    ("changes", "quantize", "kv_dtype"),
    [
        ({}, USUAL, "float16"),
        ({"enforce_eager": True}, "int8", "float16"),
        ({"quantize": "int8"}, "int8", "float16"),
        ({"kv_dtype": "int8"}, USUAL, "int8"),
        ({"dtype": "float32"}, USUAL, "float16"),
        ({"dtype": "bfloat16", "kv_dtype": "float16"}, "none", "float16"),
    ],
)
def test_the_arithmetic_is_that_of_training(
    ternary: Ternary, changes: dict[str, Any], quantize: str, kv_dtype: str
) -> None:
    model_dir = ternary("bitnet", "bitlinear")
    assert resolve(settings(model_dir, **changes))[0].quantize == quantize
    runner = load_model_runner(settings(model_dir, **changes))
    assert runner.kv_cache.layout.dtype == kv_dtype


def test_it_is_int8_where_a_matrix_is_not_ternary(ternary: Ternary, tmp_path: Path) -> None:
    """In 4 bits that matrix would be rounded."""
    model_dir = Path(shutil.copytree(ternary("llama", "bitlinear"), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    del tensors[f"{DOWN}.weight_scale"]
    tensors[f"{DOWN}.weight"] = 0.1 * torch.randn(64, 96)
    save_file(tensors, model_dir / "model.safetensors")
    assert resolve(settings(model_dir))[0].quantize == "int8"
    in_steps = parameters(model_dir, IN_STEPS).take_linear("layers.1.down")
    assert in_steps.lows is not None
    assert len(in_steps.lows.unique()) > 1


def parameters(model_dir: Path, encoding: str) -> Parameters:
    specs = parameter_specs(load_decoder_config(model_dir))
    return load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32, encoding, is_packed=True))


def numbers(matrix: LinearParameters) -> Tensor:
    """The numbers of a matrix as the docstring of LinearParameters defines them."""
    weight = matrix.weight.float()
    if matrix.encoding == "float":
        return weight
    assert matrix.scales is not None
    if matrix.encoding == "int8":
        return weight * matrix.scales[:, None]
    if matrix.encoding == "int4":
        assert matrix.zeros is not None
        zeros, scales = (each.repeat_interleave(32, 1) for each in (matrix.zeros.float(), matrix.scales))
        return (weight - zeros) * scales
    assert matrix.steps is not None
    assert matrix.lows is not None
    lows, steps = (each.float().repeat_interleave(32, 1) for each in (matrix.lows, matrix.steps))
    return (lows + steps * weight) * matrix.scales[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ["int8", "int4", IN_STEPS])
def test_every_encoding_has_the_numbers_of_the_file(ternary: Ternary, kind: str, encoding: str) -> None:
    model_dir = ternary("bitnet", kind)
    ours, exact = parameters(model_dir, encoding), parameters(model_dir, "float")
    for spec in parameter_specs(load_decoder_config(model_dir)):
        if spec.is_matrix:
            matrix = ours.take_linear(spec.name)
            expected = "float" if spec.name == OUTPUT else IN_STEPS if encoding != "int8" and knows_vnni() else encoding
            assert matrix.encoding == expected
            assert torch.equal(numbers(matrix), exact.take_linear(spec.name).weight.float()), spec.name


def test_master_weights_are_rounded_as_in_training(ternary: Ternary) -> None:
    model_dir = ternary("bitnet", "online")
    stored = load_file(model_dir / "model.safetensors")
    theirs: Tensor = WeightQuant.apply(stored[f"{DOWN}.weight"].float())
    assert len(theirs.unique()) == 3
    assert torch.equal(parameters(model_dir, "float").take_linear("layers.1.down").weight, theirs)


def test_ternary_numbers_may_be_stored_as_floats(ternary: Ternary, tmp_path: Path) -> None:
    """transformers reads such files for AutoBitLinear, too."""
    packed = ternary(f"bitnet{ALONE}", "autobitlinear")
    shutil.copytree(packed, tmp_path / "saved")
    tensors = load_file(packed / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight")]
    unpacked = {name: unpack_weights(tensors[name], torch.bfloat16) for name in names}
    save_file(tensors | unpacked, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    assert resolve(settings(tmp_path / "saved"))[0].quantize == USUAL
    ours, theirs = (run_mixed(load_arm(folder, "compiled")) for folder in (tmp_path / "saved", packed))
    require_equal(ours, theirs)
    require_near(
        differences(tmp_path / "saved", run_mixed(load_arm(tmp_path / "saved", "compiled", kv_dtype="float32")))
    )


@pytest.mark.parametrize("quantize", ["int8", USUAL])
def test_ranks_and_partitions_equal_one_rank(ternary: Ternary, tmp_path: Path, quantize: str) -> None:
    model_dir, out = ternary("bitnet", "autobitlinear"), tmp_path / "out"
    asked = {} if quantize == USUAL else {"quantize": quantize}
    alone = load_arm(model_dir, "compiled", **asked)
    expected = run_mixed(alone)
    flags = [f"--quantize={name}" for name in asked.values()]
    assert main(["partition", str(model_dir), str(out), "--tensor-parallel=2", *flags]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert partition.quantize == quantize
    for folder, degrees in ((model_dir, Degrees(2, 2)), (out, Degrees(2))):
        with ranked_runner(folder, degrees, **asked) as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == whole_kv(alone)
            assert runner.kv_cache.layout == alone.kv_cache.layout


def test_the_plan_counts_the_output_matrix_as_it_is_stored(ternary: Ternary) -> None:
    resolved, config = resolve(RunnerSettings(ternary("bitnet", "autobitlinear")))
    precision = precision_of(resolved, config)
    assert (precision.weights, precision.output, precision.output_bytes) == (USUAL, "bfloat16", 2)
    specs = [spec for spec in specs_of(resolved, config) if spec.name == OUTPUT]
    assert weights_bytes(resolved, specs, config, is_packed=True) == 264 * 64 * 2


Tensors = dict[str, Tensor]


def put(part: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{DOWN}.{part}": tensor})


def cut(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("bitlinear", cut("weight_scale"), r"cannot be read without .*weight_scale, which is missing: download"),
        (
            "bitlinear",
            put("weight", torch.full((16, 96), 255, dtype=torch.uint8)),
            r"down_proj: .* not -1, 0 or 1: the",
        ),
        ("bitlinear", put("weight", torch.ones((16, 96), dtype=torch.int8)), r"weight has dtype I8, .* stores as U8"),
        (
            "bitlinear",
            put("weight", torch.ones((17, 96), dtype=torch.uint8)),
            r"\[17, 96\], config.json implies \[16, 9",
        ),
        ("bitlinear", put("weight", torch.ones((64, 96))), r"dtype F32, and .*weight_scale is there beside it"),
        ("bitlinear", put("weight_scale", torch.zeros(1)), r"down_proj.* NaN or infinite"),
        ("autobitlinear", put("weight_scale", torch.full((1,), torch.nan)), r"down_proj.* NaN or infinite"),
        ("autobitlinear", put("weight_scale", torch.ones(64, 1)), r"weight_scale has shape \[64, 1\]"),
        ("autobitlinear", put("weight_scale", torch.ones(1, dtype=torch.int32)), r"weight_scale has dtype I32"),
        ("autobitlinear", put("weight", torch.full((64, 96), 0.5)), r"not all -1, 0 or 1.*need quantization_mode onl"),
        (
            "autobitlinear",
            put("weight", torch.ones((64, 96), dtype=torch.uint8)),
            r"has bytes \[64, 96\], and those of",
        ),
        (
            "autobitlinear",
            put("weight", torch.ones((16, 96))),
            r"has floats \[16, 96\], config.json implies \[64, 96\]",
        ),
        ("autobitlinear", put("bias", torch.ones(64)), r"with a bias in linear_class autobitlinear"),
        ("online", put("weight", torch.full((64, 96), torch.inf)), r"down_proj.* NaN or infinite"),
        ("online", put("weight_scale", torch.ones(1)), None),
    ],
)
@pytest.mark.parametrize("encoding", ["int8", IN_STEPS])
def test_broken_files_are_refused(
    ternary: Ternary,
    tmp_path: Path,
    kind: str,
    change: Callable[[Tensors], object],
    words: str | None,
    encoding: str,
) -> None:
    model_dir = Path(shutil.copytree(ternary("llama", kind), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")
    if words is None:  # an unused tensor
        parameters(model_dir, encoding).read_all()
        return
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir, encoding).read_all()


@pytest.mark.parametrize(
    ("kind", "members", "words"),
    [
        ("bitlinear", {"linear_class": "bitlinear2"}, "bitnet: linear_class 'bitlinear2' is not supported; supported:"),
        ("bitlinear", {"quantization_mode": "later"}, "bitnet: quantization_mode 'later' is not supported"),
        ("bitlinear", {"use_rms_norm": True}, "bitnet: use_rms_norm, .* is not supported"),
        ("bitlinear", {"modules_to_not_convert": ["down_proj"]}, r"config.json says that .*down_proj is not \(bitnet"),
        ("bitlinear", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of strings"),
        ("online", {"modules_to_not_convert": ["*x"]}, "modules_to_not_convert: .* is no regular expression"),
        ("online", {"modules_to_not_convert": []}, "does not name lm_head"),
        ("online", {"linear_class": "bitlinear"}, "no matrix is quantised, though config.json says so"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    ternary: Ternary, tmp_path: Path, kind: str, members: dict[str, Any], words: str
) -> None:
    model_dir = Path(shutil.copytree(ternary("llama", kind), tmp_path / "model"))
    describe(model_dir, **members)
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir, "int8").read_all()


def test_master_weights_of_named_modules_are_not_rounded(ternary: Ternary, tmp_path: Path) -> None:
    """Names as transformers reads them: their ends, or a pattern of their beginnings."""
    model_dir = Path(shutil.copytree(ternary("llama", "online"), tmp_path / "model"))
    describe(model_dir, modules_to_not_convert=["lm_head", "o_proj", "model.layers.1"])
    stored, ours = load_file(model_dir / "model.safetensors"), parameters(model_dir, "float")
    for name, is_kept in (("0.self_attn.o_proj", True), ("1.mlp.down_proj", True), ("0.mlp.down_proj", False)):
        layer, _, kind = name.partition(".")
        matrix = ours.take_linear(f"layers.{layer}.{kind.rpartition('.')[2].removesuffix('_proj')}").weight
        assert torch.equal(matrix, stored[f"model.layers.{name}.weight"].float()) == is_kept, name


def test_a_ternary_output_matrix_is_refused(ternary: Ternary, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(ternary("llama", "bitlinear"), tmp_path / "model"))
    describe(model_dir, modules_to_not_convert=["embed_tokens"])
    tensors = load_file(model_dir / "model.safetensors")
    tensors |= {"lm_head.weight": torch.zeros(66, 64, dtype=torch.uint8), "lm_head.weight_scale": torch.ones(1)}
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight is ternary .* not supported for output matrices"):
        parameters(model_dir, "int8")


def test_experts_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint("mixtral"), tmp_path / "model"))
    describe(model_dir, quant_method="bitnet", linear_class="autobitlinear", quantization_mode="online")
    with pytest.raises(ConfigurationError, match=r"is ternary .* not supported for routers, experts"):
        parameters(model_dir, "int8")
