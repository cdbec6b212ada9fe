"""Drafts by a model's own layer of multi-token prediction: those that transformers computes; answers do not change."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import draft_settings, draft_weights_bytes, load_model_runner, load_speculator
from engine.model_runner import ModelRunner
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.decoder import Decoder
from engine.models.mtp import mtp_tensors
from engine.models.read_config import load_decoder_config
from engine.quantizer.float_checkpoint import open_float_checkpoint
from engine.quantizer.make import quantize_checkpoint
from engine.quantizer.schemes import make_scheme
from engine.sequence import SequenceState
from engine.settings import Speculation
from engine.speculation.drafters import Drafts
from engine.speculation.mtp import MtpDrafter
from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import WorkerRole
from tandem_cli.main import main
from tests.component.arms import ARMS, load_arm, settings
from tests.component.mtp import Reference
from tests.component.sampling.test_speculation import answer, ids, requests
from tests.component.weights import quantized
from tests.fakes.requests import make_request
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

Checkpoint = Callable[[str], Path]

FAMILIES = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "deepseek-v3", "glm4-moe-lite")


class NotingDrafter(MtpDrafter):
    """Notes what it drafts behind which tokens, and from which position on it has seen them."""

    noted: list[tuple[SequenceState, list[int], int, Drafts]]

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        drafts = super().draft(sequences, lengths)
        self.noted += [
            (sequence, list(sequence.token_ids), self._seen[sequence.key].first, own)
            for sequence, own in zip(sequences, drafts, strict=True)
            if own
        ]
        return drafts


def load(model_dir: Path, arm: str, **changes: object) -> tuple[ModelRunner, NotingDrafter]:
    changes = ARMS[arm] | {"num_blocks": 1200 if arm == "torch" else 400} | changes
    runner = load_arm(model_dir, arm, **changes)
    of_model = settings(model_dir, **changes)
    speculator = load_speculator(Speculation("mtp", 4), of_model, runner, load_model_runner, max_batch_tokens=64)
    assert speculator is not None
    drafter = speculator.drafter
    assert isinstance(drafter, MtpDrafter)
    drafter.__class__ = NotingDrafter
    assert isinstance(drafter, NotingDrafter)
    drafter.noted = []
    return runner, drafter


@pytest.mark.parametrize("arm", ["compiled", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_layer_in_transformers(checkpoint: Checkpoint, family: str, arm: str) -> None:
    model_dir = checkpoint(f"{family}-mtp")
    runner, drafter = load(model_dir, arm)
    asked = [request for request in requests() if request.request_id in ("greedy", "top log-probs")]
    plain, _ = answer(runner, None, asked)
    guessed, scheduler = answer(runner, drafter, asked)
    assert guessed == plain if arm == "compiled" else ids(guessed) == ids(plain)
    assert scheduler.load().drafted_tokens > 40
    reference = Reference(model_dir)
    for sequence, token_ids, first, drafts in drafter.noted:
        assert first == sequence.num_prompt_tokens
        assert drafts == reference.drafts(token_ids, first, len(drafts))


@pytest.mark.parametrize(("family", "stem"), [("exaone-moe", "mtp."), ("mellum", "mtp."), ("hy-v3", "model.layers.3.")])
def test_layers_that_are_not_read(checkpoint: Checkpoint, tmp_path: Path, family: str, stem: str) -> None:
    model_dir = Path(shutil.copytree(checkpoint(family), tmp_path / "copy"))
    path = model_dir / "model.safetensors"
    more = {f"{stem}{name}.weight": torch.ones(4) for name in ("layers.0.self_attn.q_proj", "norm")}
    save_file(load_file(path) | more, path, {"format": "pt"})
    with capture_logs() as logs:
        runner = load_arm(model_dir, "compiled")
    asked = requests()[:1]
    assert answer(runner, None, asked)[0] == answer(load_arm(checkpoint(family), "compiled"), None, asked)[0]
    assert not [line for line in logs if "does not use" in line["event"]]
    [line] = [line for line in logs if "multi-token prediction" in line["event"]]
    assert (line["tensors"], "not read" in line["event"]) == (2, True)
    with pytest.raises(ConfigurationError, match="speculative=mtp does not fit"):
        load_speculator(Speculation("mtp", 4), settings(model_dir), runner, load_model_runner, max_batch_tokens=64)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "kv_dtype": "int8", "block_size": 32},
    ],
)
@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_answers_of_all_kinds_are_as_without_drafts(
    checkpoint: Checkpoint, family: str, changes: dict[str, object]
) -> None:
    runner, drafter = load(checkpoint(f"{family}-mtp"), "compiled", **changes)
    plain, _ = answer(runner, None, requests())
    guessed, scheduler = answer(runner, drafter, requests())
    assert guessed == plain
    assert scheduler.load().drafted_tokens > 100


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "gptq"])
@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_a_quantised_model_keeps_its_layer(checkpoint: Checkpoint, tmp_path: Path, family: str, scheme: str) -> None:
    """In the type of the checkpoint, beside the output matrix of the model."""
    plain = in_bf16(checkpoint(f"{family}-mtp"), tmp_path / "plain")
    of_scheme = make_scheme(scheme, group_size=32, alpha=0.5, dtype=torch.bfloat16)
    prompts = [tuple(range(first, first + 20)) for first in range(8)]
    quantize_checkpoint(
        open_float_checkpoint(plain), tmp_path / scheme, of_scheme, prompts[:6], prompts[6:], lambda _: None
    )
    runner, drafter = load(tmp_path / scheme, "compiled")
    assert drafter._runner.model._model.weights.packed.dtype == np.int16  # type: ignore[attr-defined]
    assert runner.model._model.weights.packed.dtype != np.int16  # type: ignore[attr-defined]
    asked = requests()[:3]
    answers, scheduler = answer(runner, drafter, asked)
    assert answers == answer(runner, None, asked)[0]
    assert scheduler.load().drafted_tokens > 40


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_a_quantised_layer_is_taken_as_it_is_stored(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """In fp8 it drafts as the dequantised numbers do."""
    narrow = in_bf16(checkpoint(f"{family}-mtp"), tmp_path / "narrow")
    model_dir = quantized.quantize_checkpoint(narrow, tmp_path / "fp8", "fp8")
    stored = load_file(model_dir / "model.safetensors")
    for name in mtp_tensors(load_decoder_config(model_dir), stored):
        if stored[name].ndim == 2 and not name.endswith(("fc.weight", "eh_proj.weight", "gate.weight")):
            parts, _ = quantized.FORMS["fp8"].store(stored.pop(name).float())
            stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, model_dir / "model.safetensors", metadata={"format": "pt"})
    firsts, sizes = [], []
    for changes in ({}, {"dtype": "float32"}):
        runner, drafter = load(model_dir, "compiled", **changes)
        answer(runner, drafter, requests()[:2])
        firsts.append({tuple(token_ids): drafts[0] for _, token_ids, _, drafts in drafter.noted})
        sizes.append(drafter._runner.model._model.weights.packed.nbytes)  # type: ignore[attr-defined]
    both = firsts[0].keys() & firsts[1].keys()
    assert len(both) > 20
    assert all(firsts[0][key] == firsts[1][key] for key in both)
    assert sizes[0] < 0.5 * sizes[1]


def in_bf16(model_dir: Path, out: Path) -> Path:
    shutil.copytree(model_dir, out)
    [path] = out.glob("*.safetensors")
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return out


def test_a_sequence_that_waits_long_for_drafts_is_seen_from_its_latest_tokens_on(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.speculation.mtp._MAX_PENDING", 8)
    model_dir = checkpoint("glm4-moe-mtp")
    runner, drafter = load(model_dir, "compiled")
    request = make_request("long", [*b"to and fro"], max_new_tokens=30)
    limits = drafter.limits

    def after_a_while(sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        found = limits(sequences, max_drafts)
        return found if sequences[0].num_generated > 13 else [0] * len(found)

    monkeypatch.setattr(drafter, "limits", after_a_while)
    answer(runner, drafter, [request])
    reference = Reference(model_dir)
    assert {first for _, _, first, _ in drafter.noted} == {request.num_prompt_tokens + 8}, "the ninth was one too many"
    for _, token_ids, first, drafts in drafter.noted:
        assert drafts == reference.drafts(token_ids, first, len(drafts))


@pytest.mark.parametrize("arm", ["compiled", "cpu"])
def test_embedding_and_output_matrix_are_in_memory_once(checkpoint: Checkpoint, arm: str) -> None:
    runner, drafter = load(checkpoint("glm4-moe-mtp"), arm)
    large, layer = runner.model, drafter._runner.model  # type: ignore[attr-defined]
    if isinstance(large, CompiledDecoder):
        assert layer._embed.data_ptr() == large._embed.data_ptr()
        assert layer._model.output.packed is large._model.output.packed
    else:
        assert isinstance(large, Decoder)
        assert layer._embedding is large._embedding
        assert layer._output._lm_head is large._output._lm_head  # type: ignore[union-attr]
        assert layer._output._norm is not large._output._norm  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_its_weights_are_the_layers_tensors(checkpoint: Checkpoint, family: str) -> None:
    model_dir = checkpoint(f"{family}-mtp")
    draft = draft_settings(Speculation("mtp", 4), settings(model_dir))
    assert draft is not None
    stored = load_file(model_dir / "model.safetensors")
    names = mtp_tensors(load_decoder_config(model_dir), stored)
    assert draft_weights_bytes(draft) == sum(stored[name].nbytes for name in names)


def test_a_worker_counts_the_layers_kv(checkpoint: Checkpoint) -> None:
    """The model has three layers of KV, in blocks of 24,576 bytes."""
    found = []
    for speculation in (Speculation("mtp", 4), Speculation("ngram", 4)):
        settings = DecodeSettings(
            model=str(checkpoint("glm4-moe-mtp")), registry_address="none", kv_cache_bytes=40 * 24_576
        )
        limits = EngineLimits(64, 4, speculation=speculation)
        info = load_engine(settings, limits).worker_info(WorkerRole.DECODE, limits)
        assert info.speculative == speculation.kind
        found.append(info.num_blocks)
    assert found[0] == found[1] * 3 // 4


def test_the_command_compiles_what_it_needs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a quantised or a recurrent model, that is other code than the model's."""
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # the command's process is this one
    model_dir = str(checkpoint("qwen3.5-mtp"))
    assert main(["compile", model_dir, "--speculative", "mtp"]) == 0
    keys = {line.rpartition("key ")[2] for line in capsys.readouterr().out.splitlines()}
    assert len(keys) == 2
    assert main(["compile", model_dir]) == 0
    assert capsys.readouterr().out.count("key ") == 1


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama", "speculative=mtp does not fit LlamaForCausalLM: .* are read for Qwen3_5ForCausalLM"),
        ("glm4-moe", "has no layer of multi-token prediction: model.layers.3.eh_proj.weight is missing"),
    ],
)
def test_a_model_without_the_layer_is_refused(checkpoint: Checkpoint, family: str, message: str) -> None:
    settings = DecodeSettings(model=str(checkpoint(family)), registry_address="none")
    with pytest.raises(ConfigurationError, match=message):
        load_engine(settings, EngineLimits(64, 4, speculation=Speculation("mtp", 4)))


def test_a_layer_of_a_multimodal_models_text_part_is_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its tensors have longer names."""
    model_dir = Path(shutil.copytree(checkpoint("glm4-moe-mtp"), tmp_path / "model"))
    [path] = model_dir.glob("*.safetensors")
    longer = {name.replace("model.", "model.language_model.", 1): value for name, value in load_file(path).items()}
    save_file(longer, path, metadata={"format": "pt"})
    asked = [request for request in requests() if request.request_id == "greedy"]
    runner, drafter = load(model_dir, "compiled")
    assert answer(runner, drafter, asked)[0] == answer(load(checkpoint("glm4-moe-mtp"), "compiled")[0], None, asked)[0]
    assert drafter.noted


def test_a_layer_that_lacks_a_matrix_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint("glm4-moe-mtp"), tmp_path / "model"))
    [path] = model_dir.glob("*.safetensors")
    stored = load_file(path)
    del stored["model.layers.3.self_attn.o_proj.weight"]
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.layers\.3\.self_attn\.o_proj\.weight"):
        load(model_dir, "compiled")
