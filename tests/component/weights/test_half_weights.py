"""Weights of two bytes in the compiled decoder: results are those of the same numbers in fp32, to the bit, unless the
CPU multiplies bf16 itself (`test_other_cpus.py` runs those that do not).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.partition_manifest import read_partition
from engine.kernels.cpu.machine import knows_bf16
from engine.loading.resolve import kv_layout, resolve
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.component.arms import embedding, load_arm, settings
from tests.component.parity import check_parity, expect, expect_prompts, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal, whole_kv
from tests.component.remote_families import load_reference
from tests.made_once import made_once

Checkpoint = Callable[[str], Path]
Narrow = Callable[..., Path]


@pytest.fixture(scope="module")
def narrow(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    """`narrow(family, dtype, keep)` is that checkpoint in the dtype, but for tensors whose name ends with `keep`."""

    def get(family: str, dtype: str, keep: str = "nothing") -> Path:
        return made_once(
            tmp_path_factory, f"{family}-{dtype}-{keep}", lambda out: copy_narrow(checkpoint(family), out, dtype, keep)
        )

    return get


def copy_narrow(model_dir: Path, folder: Path, dtype: str, keep: str = "nothing") -> Path:
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):  # the checkpoint, and a reference beside it, which is read as fp32
        changed = {k: v if k.endswith(keep) else v.to(getattr(torch, dtype)) for k, v in load_file(file).items()}
        save_file(changed, file)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return folder


@pytest.mark.parametrize("family", ["llama-biases", "mistral", "granite"])
def test_fp16_is_as_exact_as_fp32(narrow: Narrow, family: str) -> None:
    model_dir = narrow(family, "float16")
    check_as_exact_as_fp32(model_dir, "float16")


@pytest.mark.skipif(knows_bf16(), reason="this CPU multiplies bf16 itself")
@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_bf16_is_as_exact_as_fp32(narrow: Narrow, family: str) -> None:
    check_as_exact_as_fp32(narrow(family, "bfloat16"), "bfloat16")


def check_as_exact_as_fp32(model_dir: Path, dtype: str) -> None:
    own, wide = load_arm(model_dir, "compiled"), load_arm(model_dir, "compiled", dtype="float32")
    assert (embedding(own).dtype, embedding(wide).dtype) == (getattr(torch, dtype), torch.float32)
    assert own.kv_cache.layout == wide.kv_cache.layout, "workers of both could not exchange KV"
    require_equal(run_mixed(own), run_mixed(wide))
    assert whole_kv(own) == whole_kv(wide)
    check_parity(model_dir, own)


@pytest.mark.skipif(not knows_bf16(), reason="the CPU has no avx512_bf16")
@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_bf16_products_are_nearer_to_fp32_than_those_of_transformers(narrow: Narrow, family: str) -> None:
    model_dir = narrow(family, "bfloat16")
    own = load_arm(model_dir, "compiled")
    model = load_reference(model_dir).to(torch.bfloat16)
    ours, theirs = [], []
    for run, expected in zip(run_mixed(own), expect_prompts(model_dir), strict=True):
        (in_bf16,) = expect(model, expected.prompt, num_new=1).logprobs[None]
        for i, (token, scored) in enumerate(zip(expected.prompt[1:], run.prompt_logprobs, strict=True)):
            exact = float(expected.logprobs[i, token])
            ours.append(abs(scored.logprob - exact))
            theirs.append(abs(float(in_bf16[i, token]) - exact))
    assert 0 < mean(ours) < 0.7 * mean(theirs)
    wide = load_arm(model_dir, "compiled", dtype="float32").kv_cache.layout.model_fingerprint
    assert own.kv_cache.layout.model_fingerprint == f"{wide}-bf16", "KV is not that of fp32"


def test_ranks_equal_one_rank(narrow: Narrow) -> None:
    model_dir = narrow("llama-tied", "bfloat16")
    alone = load_arm(model_dir, "compiled")
    expected = run_mixed(alone)
    for degrees in (Degrees(2), Degrees(2, 3)):
        with ranked_runner(model_dir, degrees) as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == whole_kv(alone)


def test_a_given_type_rounds_and_its_kv_is_not_exchanged(checkpoint: Checkpoint, narrow: Narrow) -> None:
    rounded = load_arm(checkpoint("llama"), "compiled", dtype="bfloat16")
    require_equal(run_mixed(rounded), run_mixed(load_arm(narrow("llama", "bfloat16", "norm.weight"), "compiled")))
    wide, dummy = settings(checkpoint("llama")), settings(checkpoint("llama"), load_format="dummy")
    for wanted in (wide, dummy):
        (_, config), narrow_one = (
            resolve(wanted),
            settings(wanted.model_dir, load_format=wanted.load_format, dtype="bfloat16"),
        )
        assert kv_layout(config, wanted).model_fingerprint != kv_layout(config, narrow_one).model_fingerprint


@pytest.mark.parametrize(
    ("family", "keep", "changes", "dtype"),
    [
        ("llama", "norm.weight", {}, "bfloat16"),
        ("llama", "norm.weight", {"load_format": "dummy"}, "bfloat16"),
        ("granite", "nothing", {}, "bfloat16"),  # whose products have factors
        ("llama", "down_proj.weight", {}, "float32"),  # which would be rounded
        ("llama", "", {}, "float32"),
        ("llama", "nothing", {"dtype": "float16"}, "float16"),
        ("llama", "nothing", {"quantize": "int8"}, "float32"),
        ("llama", "nothing", {"enforce_eager": True}, "float32"),
        ("llama", "nothing", {"attention": "torch"}, "float32"),
        ("llama", "nothing", {"kv_dtype": "bfloat16"}, "float32"),
        ("llama", "nothing", {"kv_dtype": "float16"}, "bfloat16"),
        ("opt-350m", "nothing", {}, "float32"),
    ],
)
def test_nothing_is_rounded_unasked(
    narrow: Narrow, family: str, keep: str, changes: dict[str, object], dtype: str
) -> None:
    if dtype == "bfloat16":
        load_arm(narrow(family, "bfloat16"), "compiled")  # or the CPU cannot
    assert resolve(settings(narrow(family, "bfloat16", keep), **changes))[0].dtype == dtype


def test_norms_stay_in_fp32(narrow: Narrow) -> None:
    model_dir = narrow("qwen3", "float16", "norm.weight")
    check_parity(model_dir, load_arm(model_dir, "compiled"))


def test_partitions(narrow: Narrow, tmp_path: Path) -> None:
    model_dir, out = narrow("llama-tied", "bfloat16"), tmp_path / "out"
    alone, asked = load_arm(model_dir, "compiled"), tmp_path / "float16"
    assert main(["partition", str(model_dir), str(out), "--tensor-parallel=2"]) == 0
    with ranked_runner(out, Degrees(2)) as runner:
        require_equal(run_mixed(runner), run_mixed(alone))
        assert runner.kv_cache.layout == alone.kv_cache.layout
    assert main(["partition", str(model_dir), str(asked), "--dtype=float16"]) == 0
    assert [partition.dtype for folder in (out, asked) if (partition := read_partition(folder))] == [
        "bfloat16",
        "float16",
    ]
    rounded = load_arm(model_dir, "compiled", dtype="float16")
    assert load_arm(asked, "compiled").kv_cache.layout == rounded.kv_cache.layout != alone.kv_cache.layout
    with pytest.raises(ConfigurationError, match=r"dtype bfloat16 and quantize none, not for .* dtype float32"):
        ranked_runner(out, Degrees(2), dtype="float32").__enter__()
