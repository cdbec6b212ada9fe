"""LoRA adapters over ranks, and on experts: the answers of one rank, and of transformers with the adapter merged."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.loading.resolve import resolve
from engine.models.adapters import adapter_shapes
from engine.models.packed_adapters import PackedAdapters
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.models.share import adapter_specs, rank_share
from engine.ranks.messages import MAX_MESSAGE_BYTES, plain_settings, read_settings
from engine.ranks.remote import require_remote
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tests.component.arms import load_arm, settings
from tests.component.lora.adapters import (
    PREFIX,
    check_adapters,
    four_adapters,
    merged_reference,
    read_adapters,
    run_together,
    write_adapter,
)
from tests.component.lora.test_adapters import add_tensor
from tests.component.parity import TOLERANCE, expect, prompts
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(3), Degrees(1, 2), Degrees(2, 2)], ids=str)
def test_ranks_equal_one_rank_to_the_bit(checkpoint: Checkpoint, tmp_path: Path, degrees: Degrees) -> None:
    """Also a batch beside rows of the base model, and beside that of another number of rows."""
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters), "", adapters[0].digest]))
    alone = load_arm(model_dir, "compiled", adapters=adapters)
    expected = [run_together(alone, {number: digest})[0] for number, digest in digests.items()]
    with ranked_runner(model_dir, degrees, adapters=adapters) as runner:
        require_equal(run_together(runner, digests), expected)
        require_equal(run_together(runner, {2: digests[2]}), expected[2:3])


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}], ids=str)
def test_types_of_weights(checkpoint: Checkpoint, tmp_path: Path, options: dict[str, str]) -> None:
    model_dir = checkpoint("llama-biases")
    adapters = four_adapters(model_dir, tmp_path)
    digests = dict(enumerate(adapter.digest for adapter in adapters))
    expected = run_together(load_arm(model_dir, "compiled", adapters=adapters, **options), digests)
    with ranked_runner(model_dir, Degrees(2), adapters=adapters, **options) as runner:
        require_equal(run_together(runner, digests), expected)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_ranks_read_adapters_when_requests_need_them(checkpoint: Checkpoint, tmp_path: Path, eager: bool) -> None:
    model_dir = checkpoint("llama")
    adapters = four_adapters(model_dir, tmp_path)
    wanted = {"adapters": adapters, "enforce_eager": eager}
    with (
        ranked_runner(model_dir, Degrees(2, 2), **wanted) as whole,
        ranked_runner(model_dir, Degrees(2, 2), max_loaded_adapters=1, **wanted) as runner,
    ):
        for number in (3, 0, 2, 1, 3):
            asked = {number: adapters[number].digest}
            require_equal(run_together(runner, asked), run_together(whole, asked))


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon-40b", "gptj", "phi3", "mixtral", "qwen2-moe"])
def test_ranks_that_sum(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Products cut by inputs, fused and grouped matrices cut by heads, experts shared out."""
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine", rank=5))
    with ranked_runner(model_dir, Degrees(2, 2), adapters=adapters, enforce_eager=True) as runner:
        check_adapters(model_dir, runner, adapters, 10 * TOLERANCE)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_parity_of_experts(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    model_dir = checkpoint(family)
    adapters = read_adapters(
        write_adapter(model_dir, tmp_path / "all", rank=5),
        write_adapter(model_dir, tmp_path / "attention", targets="self_attn", seed=2),
        write_adapter(model_dir, tmp_path / "experts", targets="experts", seed=3),
    )
    check_adapters(model_dir, load_arm(model_dir, "torch", adapters=adapters), adapters, 10 * TOLERANCE)


def test_experts_in_a_mixed_batch_are_near_each_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("qwen2-moe")
    names = ("a", "b")
    adapters = read_adapters(*(write_adapter(model_dir, tmp_path / n, seed=ord(n), targets="expert") for n in names))
    runner = load_arm(model_dir, "torch", adapters=adapters)
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters), "", adapters[0].digest]))
    for (number, digest), run in zip(digests.items(), run_together(runner, digests), strict=True):
        alone = run_together(runner, {number: digest})[0]
        assert run.token_ids == alone.token_ids
        assert [t.logprob for t in run.tokens] == pytest.approx([t.logprob for t in alone.tokens], abs=1e-5)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.layers.0.block_sparse_moe.gate", "cannot have an adapter, only the matrices of attention, MLPs and"),
        ("model.layers.0.block_sparse_moe.experts", "the model has no module"),
    ],
)
def test_what_experts_do_not_have(checkpoint: Checkpoint, tmp_path: Path, module: str, reason: str) -> None:
    """The router, and all experts of a layer as one matrix, as PEFT's `target_parameters` writes them."""
    folder = write_adapter(checkpoint("mixtral"), tmp_path / "mine")
    for part in ("lora_A", "lora_B"):
        add_tensor(folder, f"{PREFIX}{module}.{part}.weight", 4, 4)
    with pytest.raises(ConfigurationError, match=f"adapter mine: .*{module}.*{reason}|adapter mine: {reason}"):
        load_arm(checkpoint("mixtral"), "torch", adapters=read_adapters(folder))


def test_processes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    folder = write_adapter(model_dir, tmp_path / "mine")
    command = [sys.executable, "-m", "tests.component.ranks.ranked", str(model_dir), str(folder)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300).stdout
    adapted = expect(merged_reference(model_dir, folder), prompts()[1]).token_ids
    assert json.loads(answer)[1] == adapted


def test_ranks_know_the_adapters_of_their_leader(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without reading all of them again for their digests."""
    [adapter] = read_adapters(write_adapter(checkpoint("llama"), tmp_path / "mine"))
    own = RunnerSettings(checkpoint("llama"), adapters=(adapter,), tensor_parallel=2)
    plain = json.loads(json.dumps(plain_settings(own)))
    assert read_settings(plain).adapters == (adapter,)
    plain["adapters"][0][-1] = "a digest that is believed"
    assert read_settings(plain).adapters[0].digest == "a digest that is believed"


def test_ranks_without_shared_memory_have_none(checkpoint: Checkpoint, tmp_path: Path) -> None:
    adapters = read_adapters(write_adapter(checkpoint("llama"), tmp_path / "mine"))
    wanted = settings(checkpoint("llama"), adapters=adapters, tensor_parallel=2, enforce_eager=True)
    with pytest.raises(ConfigurationError, match="adapter mine: ranks that share no memory have no adapters"):
        require_remote(*resolve(wanted))


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(2), Degrees(2, 2)], ids=str)
def test_a_rank_packs_its_own_layers_and_heads(checkpoint: Checkpoint, tmp_path: Path, degrees: Degrees) -> None:
    model_dir = checkpoint("llama")
    config, adapters = load_decoder_config(model_dir), read_adapters(write_adapter(model_dir, tmp_path / "a", rank=16))
    sizes = []
    for rank in range(degrees.num_ranks):
        share = rank_share(config, rank, degrees)
        specs = adapter_specs(parameter_specs(config), config, share, "outputs")
        sizes.append(PackedAdapters(config, adapter_shapes(adapters, specs), 1, share).pieces.packed.nbytes)
    of_heads = 16 * 4 * config.num_layers * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    whole = sum(matrix.rank * (matrix.a.shape[1] + matrix.b.shape[0]) for matrix in adapters[0].matrices.values()) * 4
    assert sum(sizes) == degrees.tensor * (whole - of_heads) + of_heads


def test_settings_that_are_too_long_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from engine.ranks.launch import RankProcesses

    [adapter] = read_adapters(write_adapter(checkpoint("llama"), tmp_path / "mine"))
    many = (adapter,) * (MAX_MESSAGE_BYTES // len(adapter.digest))
    with pytest.raises(ConfigurationError, match="give workers with several ranks fewer adapters"):
        RankProcesses(settings(checkpoint("llama"), adapters=many, tensor_parallel=2), 8, "info")
