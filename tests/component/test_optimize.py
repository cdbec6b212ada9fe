"""What `tandem optimize` computes with the engine: the quality of a precision, checkpoints, and what can be tried."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.loading.load_runner import load_model_runner
from engine.quantizer.quality import Quality
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.errors import ConfigurationError
from tandem_cli.main import main
from tandem_cli.optimization.candidate_trial import Judged, compare_distributions, runner_settings
from tandem_cli.optimization.candidates import BASE
from tandem_cli.optimization.command import only_run
from tandem_cli.optimization.questions import Question, read_questions
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.optimization.search import State
from tandem_cli.optimization.subject import Checkpoints, Subject
from tests.component.arms import settings
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.parity import expect, load_reference, prompts
from tests.fakes.requests import make_request
from tests.small_disk import on_small_disk

Checkpoint = Callable[[str], Path]


def base(model_dir: Path) -> RunnerSettings:
    return runner_settings(model_dir, {"dtype": "float32"})


def test_logits_of_a_prompt_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("llama")
    reference, runner = load_reference(model_dir), load_model_runner(settings(model_dir))
    for prompt in prompts():
        request = SequenceState(make_request("r", prompt))
        request.block_table = list(range(len(prompt) // 16 + 1))
        places = range(3, len(prompt))
        logprobs = runner.prompt_logits(request, places).log_softmax(-1)
        expected = expect(reference, prompt, 1).logprobs[3:]
        assert (logprobs - expected).abs().max() < 1e-4


def test_perplexity_is_that_of_the_answers(checkpoint: Checkpoint) -> None:
    """Places before the answer do not count; a model beside itself is the same."""
    model_dir = checkpoint("llama")
    judged = [Judged(tuple(prompt), len(prompt) - 4) for prompt in prompts()]
    quality = compare_distributions(base(model_dir), base(model_dir), judged)
    reference, total = load_reference(model_dir), 0.0
    for prompt in prompts():
        logprobs = expect(reference, prompt, 1).logprobs
        total += sum(float(logprobs[place - 1, prompt[place]]) for place in range(len(prompt) - 4, len(prompt)))
    assert (quality.num_prompts, quality.num_tokens) == (3, 12)
    assert (quality.top1_agreement, quality.mean_kl) == (1.0, 0.0)
    assert quality.base_perplexity == quality.perplexity == pytest.approx(math.exp(-total / 12), rel=1e-3)


def test_int4_is_further_from_the_base_than_int8(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("llama")
    judged = [Judged(tuple(prompt), 1) for prompt in prompts()]

    def beside(quantize: str) -> Quality:
        return compare_distributions(base(model_dir), runner_settings(model_dir, {"quantize": quantize}), judged)

    int8, int4 = beside("int8"), beside("int4")
    assert 0 < int8.mean_kl < int4.mean_kl
    assert int8.top1_agreement >= int4.top1_agreement


def questions(tmp_path: Path, count: int = 4) -> list[Question]:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"question {number}", "reference": "yes" if number % 2 else None} for number in range(count)]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if v}) + "\n" for line in lines))
    return read_questions(path, 16)


def test_a_checkpoint_is_made_once_with_groups_that_fit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = checkpoint("llama")
    subject = Subject.open(str(model_dir), questions(tmp_path))
    checkpoints = Checkpoints(model_dir, subject.calibration(2), tmp_path / "work")
    made = checkpoints.make("w4a16")
    stored = json.loads((made / "config.json").read_text())["quantization_config"]
    assert "32" in json.dumps(stored), "groups of 128 and 64 do not divide the matrices"
    before = (made / "config.json").stat().st_mtime_ns
    assert checkpoints.make("w4a16") == made
    assert (made / "config.json").stat().st_mtime_ns == before


def test_calibration_leaves_out_what_is_judged_by(checkpoint: Checkpoint, tmp_path: Path) -> None:
    subject = Subject.open(str(checkpoint("llama")), questions(tmp_path, 50))
    assert len(subject.calibration(10)) == 40
    assert subject.calibration(10)[0][: len(subject.prompts[10])] == subject.prompts[10]
    assert len(subject.calibration(30)) == 50, "too few would be left"
    assert subject.references[0] == ()
    assert len(subject.references[1]) == len("yes"), "a token for each byte"


def test_what_is_tried(checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked = questions(tmp_path)
    subject = Subject.open(str(checkpoint("llama")), asked)
    checkpoints = Checkpoints(subject.folder, subject.calibration(2), tmp_path / "work")
    demand = subject.demand(asked, 8)
    assert demand.tokens == max(map(len, subject.prompts)) + 16
    tried, pruned = subject.candidates(Recipe(precisions=("int8", "gptq")), demand, checkpoints.require)
    assert tried[0].name == "base, 1 prefill + 1 decode"
    assert {candidate.precision for candidate in tried} == {BASE, "int8", "gptq"}
    assert not any("ranks" in candidate.name for candidate in pruned)
    small = replace(subject, machine=replace(subject.machine, memory_bytes=1000.0))
    with pytest.raises(ConfigurationError, match=r"needs 0\.0 GB for weights and 8 sequences"):
        small.candidates(Recipe(precisions=("int8",)), demand, checkpoints.require)
    with pytest.raises(ConfigurationError, match="precision fp8: CPUs have no fp8 arithmetic"):
        subject.candidates(Recipe(precisions=("fp8",)), demand, checkpoints.require)


def test_schemes_that_a_family_does_not_allow_are_left_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked = questions(tmp_path)
    subject = Subject.open(str(checkpoint("opt-350m")), asked)
    checkpoints = Checkpoints(subject.folder, subject.calibration(2), tmp_path / "work")
    tried, pruned = subject.candidates(Recipe(), subject.demand(asked, 8), checkpoints.require)
    reasons = {candidate.precision: reason for candidate, reason in pruned.items()}
    assert {candidate.precision for candidate in tried} == {BASE, "int8"}, "int4 needs the compiled decoder"
    assert "no norm is before the matrices" in reasons["smoothquant"]


def test_all_files_of_a_model_but_its_weights_are_told_apart(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    subject = Subject.open(str(model_dir), questions(tmp_path))
    before = subject.other_files()
    assert before.keys() == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "another"}))
    (model_dir / "generation_config.json").write_text('{"eos_token_id": 7}')
    (model_dir / "chat_template.jinja").write_text("one more")
    after = subject.other_files()
    assert after.keys() - before.keys() == {"chat_template.jinja"}
    assert {name for name in before if before[name] != after[name]} == {
        "tokenizer_config.json",
        "generation_config.json",
    }


def test_a_run_of_a_model_with_other_files_is_not_resumed(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "state.json").write_text(json.dumps({"version": 0, "about": {"chat_template.jinja": "a hash"}}))
    refusal = said(capsys, str(checkpoint("llama")), f"--data={tmp_path / 'data.jsonl'}", f"--out={out}")
    assert f"{out} holds a run with another chat_template.jinja and " in refusal
    assert all(f" and {name} and " in refusal for name in ("config.json", "generation_config.json", "tokenizer.json"))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["optimize", *words]) == 2
    return capsys.readouterr().err


def test_bad_input_of_the_command_is_named(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions(tmp_path)
    empty, data, out = tmp_path / "empty.jsonl", tmp_path / "data.jsonl", tmp_path / "out"
    empty.write_text("\n")
    model = str(checkpoint("llama"))
    assert "has no lines" in said(capsys, model, f"--data={empty}", f"--out={out}")
    assert "there is no model folder" in said(capsys, str(tmp_path / "x"), f"--data={data}", f"--out={out}")
    encoder = build_encoder_decoder("t5", tmp_path / "t5")
    assert "has an encoder" in said(capsys, str(encoder), f"--data={data}", f"--out={out}")
    assert "--judge must be a Python file" in said(capsys, model, f"--data={data}", f"--out={out}", "--judge=none.py")
    for line, reason in (
        ({"token_ids": [1, 999]}, "token 999 is not in the model's vocabulary of 264"),
        ({"messages": [{"role": "user", "content": 3}]}, "role and content of messages must be texts"),
    ):
        (bad := tmp_path / "bad.jsonl").write_text(data.read_text() + json.dumps(line) + "\n")
        number = len(bad.read_text().splitlines())
        assert f"--data, prompt {number}: {reason}" in said(capsys, model, f"--data={bad}", f"--out={out}")
    assert f"{tmp_path} is not empty" in said(capsys, model, f"--data={data}", f"--out={tmp_path}")
    for unwritable, reason in (
        (data, "File exists"),
        (data / "out", "Not a directory"),
        (Path("/proc/out"), "No such"),
    ):
        refusal = said(capsys, model, f"--data={data}", f"--out={unwritable}")
        assert f"cannot write {unwritable}: {reason}" in refusal
        assert "candidates" not in refusal, "nothing has begun"
    assert not out.exists()


def test_another_run_in_the_same_folder_is_refused_and_one_after_it_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    state = State.open(out / "state.json", {}, [])
    with only_run(state, out / "work"):
        again = State.open(out / "state.json", {}, [])
        with pytest.raises(
            ConfigurationError, match=f"^another run is writing {out}: wait for its end, or choose another"
        ):
            only_run(again, out / "work").__enter__()
    with only_run(State.open(out / "state.json", {}, []), out / "work"):
        pass


def test_a_disk_that_gets_full_is_named_and_the_same_command_goes_on(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """OUT is whole or no model at all; what was measured and saved is not measured again."""
    questions(tmp_path)
    (disk := tmp_path / "disk").mkdir()
    words = (str(checkpoint("llama")), str(tmp_path / "data.jsonl"), str(disk))
    program = (*on_small_disk(disk), sys.executable, "-m", "tests.component.full_disk_optimize", *words)
    ended = subprocess.run(program, capture_output=True, text=True, timeout=900, check=True)
    every = ["base", "w4a16", "base", "w4a16", "w4a16", "base"]
    measured = {  # by the run that finds the disk full, and by the one after it
        "the first state": ([], every),
        "a measurement": (["base"], every),
        "a checkpoint": (["base"], every[1:]),
        "the reports": (every, []),
        "the choice": (every, []),
        "the properties": (every, []),
        "the last state": (every, []),
    }
    runs = json.loads(ended.stdout)
    assert {name: (first["measured"], second["measured"]) for name, (first, second) in runs.items()} == measured
    whole = {"config.json", "model.safetensors", "serving.properties", "report.json", "report.md", "plot.svg"}
    for first, second in runs.values():
        assert (first["status"], second["status"]) == (2, 0)
        assert f"tandem: cannot write {disk / 'out'}: " in first["said"]
        assert "No space left on device" in first["said"]
        assert first["said"].endswith("; once there is room, the same command goes on\n")
        assert not whole & set(first["names"])
        assert whole <= set(second["names"])
        assert not [name for name in second["names"] if name.endswith(".part") or name == "work"]
