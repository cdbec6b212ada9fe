"""Tokens per second with and without speculative decoding, by kind of text, on an engine without a mesh.

    python -m bench.speculative                      # the bundled pair of models
    python -m bench.speculative --extra-layers 60    # the same answers from a slower model
    python -m bench.speculative --model DIR          # DIR by bench.mtp_layer: with a layer of multi-token prediction

The bundled model is so small that a step is mostly overhead. With extra layers that do not change the output
(`write_deeper`), it gives the same answers at the cost of a larger model. All arms answer the same questions, in turn
in each round. The table has medians of the rounds, with the lowest and highest value. The program stops if the tokens
of two arms differ.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from decode_worker.settings import DecodeSettings
from demo_model.questions import draw
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec, mint_id
from mesh.interrupts import run_program, showing
from router.text.chat import ChatMessage, ChatTemplate
from router.text.tokenizer import Tokenizer
from tandem_cli.capacity.measurement import clock_for
from tandem_cli.model_files.model_folders import BUNDLED, BUNDLED_MODELS
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

_ARMS = ("none", "ngram", "draft", "mtp")
_MAX_NEW_TOKENS = 96
_SEED = 5
_LAYER = "model.layers.{}."
_OUTPUT_MATRICES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Output matrices of a layer. If they are zero, the layer does not change the residual stream."""


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text: the kinds of questions that produce it, or the start of a free text, and the temperature."""

    kinds: tuple[str, ...] = ()
    beginning: str = ""
    temperature: float = 0.0


_TEXTS: Mapping[str, Text] = {
    "lists, counting": Text(("counting", "table", "listing")),
    "copying, looking up": Text(("repeating", "lookup")),
    "explanations": Text(("explanation",)),
    "stories": Text(("story",)),
    "stories, drawn at 1.0": Text(("story",), temperature=1.0),
    "free text, drawn at 1.0": Text(beginning="Once there was", temperature=1.0),
}


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run of one arm: the tokens of each answer, the speed, and the number of drafted and accepted tokens."""

    answers: list[list[int]]
    tokens_per_s: float
    drafted: int
    accepted: int


class Engine:
    """An engine with one method of speculation, which the arm names."""

    def __init__(self, model_dir: Path, arm: str, options: argparse.Namespace) -> None:
        settings = DecodeSettings(
            model=str(model_dir),
            registry_address="none",
            quantize=options.quantize,
            num_threads=1,
            prefix_caching=False,
            speculative=arm,
            draft_model=str(options.draft_model) if arm == "draft" else "",
            num_speculative_tokens=options.num_speculative_tokens,
        )
        limits = EngineLimits(settings.max_step_tokens, 64, 1 << 14, settings.speculation())
        loaded = load_engine(settings, limits)
        self._scheduler = loaded.scheduler
        self._engine = loaded.engine()
        self._clock = clock_for(1)

    def answer(self, prompts: Sequence[list[int]], eos: frozenset[int], temperature: float) -> ArmRun:
        """Answer all prompts in one batch. The time includes the prefill."""
        order = {}
        before = self._scheduler.load()
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, seed=_SEED + index, temperature=temperature)
            spec = SequenceSpec(mint_id(), 0, tuple(prompt), len(prompt), sampling, eos)
            order[spec.request_id] = index
            self._scheduler.add(SequenceState(spec))
        answers: list[list[int]] = [[] for _ in prompts]
        started = self._clock()
        while self._scheduler.has_work:
            for output in self._engine.step().outputs:
                answers[order[output.request_id]] += [token.id for token in output.tokens]
        spent = self._clock() - started
        after = self._scheduler.load()
        return ArmRun(
            answers,
            sum(map(len, answers)) / spent,
            after.drafted_tokens - before.drafted_tokens,
            after.accepted_tokens - before.accepted_tokens,
        )


def main() -> None:
    """Load the engines of all arms, measure, and print the table."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = options.model
        if options.extra_layers:
            model_dir = write_deeper(model_dir, options.extra_layers, Path(folder))
        has_layer = "num_nextn_predict_layers" in json.loads((model_dir / "config.json").read_text())
        engines = {arm: Engine(model_dir, arm, options) for arm in (_ARMS if has_layer else _ARMS[:-1])}
        table = _table(model_dir, options, *(["mtp"] if has_layer else []))
        with showing(table.rows, lambda: Console(width=150).print(table)):
            for name, text in _TEXTS.items():
                for num_prompts in options.batch:
                    prompts, eos = _prompts(options.model, text, num_prompts)
                    table.add_row(name, str(num_prompts), *_cells(engines, (prompts, eos, text.temperature), options))
                table.add_section()


def write_deeper(model_dir: Path, num_extra: int, folder: Path) -> Path:
    """Copy a Llama checkpoint, or one by bench.mtp_layer, and add `num_extra` layers with the shapes of the last layer;
    returns the new folder.
    """
    deeper = folder / f"{model_dir.name}+{num_extra}"
    shutil.copytree(model_dir, deeper)
    config = json.loads((model_dir / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    tensors = load_file(model_dir / "model.safetensors")
    last_layer = {name: tensor for name, tensor in tensors.items() if name.startswith(_LAYER.format(num_layers - 1))}
    behind = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_LAYER.format(num_layers))}
    new_stem, old_stem = _LAYER.format(num_layers + num_extra), _LAYER.format(num_layers)
    tensors |= {new_stem + name.removeprefix(old_stem): tensor for name, tensor in behind.items()}
    for extra in range(num_extra):
        for name, tensor in last_layer.items():
            part = name.removeprefix(_LAYER.format(num_layers - 1))
            tensors[_LAYER.format(num_layers + extra) + part] = (
                torch.zeros_like(tensor) if part in _OUTPUT_MATRICES else tensor.clone()
            )
    save_file(tensors, deeper / "model.safetensors", metadata={"format": "pt"})
    changed = {"num_hidden_layers": num_layers + num_extra}
    if "first_k_dense_replace" in config:
        changed["first_k_dense_replace"] = num_layers + num_extra + 1
    (deeper / "config.json").write_text(json.dumps(config | changed))
    return deeper


def _cells(
    engines: Mapping[str, Engine], workload: tuple[list[list[int]], frozenset[int], float], options: argparse.Namespace
) -> list[str]:
    runs: dict[str, list[ArmRun]] = {arm: [] for arm in engines}
    for turn in range(options.repeats + 1):
        for arm, engine in engines.items():
            run_of_arm = engine.answer(*workload)
            if run_of_arm.answers != (runs["none"] or [run_of_arm])[0].answers:
                raise RuntimeError(f"{arm}: the tokens differ from those without speculation")
            if turn > 0 or arm == "none":  # the first round warms up
                runs[arm].append(run_of_arm)
    del runs["none"][0]
    plain = statistics.median(run.tokens_per_s for run in runs["none"])
    return [_cell(runs[arm], plain) for arm in engines]


def _cell(runs: list[ArmRun], plain: float) -> str:
    speeds = [run.tokens_per_s for run in runs]
    median, drafted = statistics.median(speeds), sum(run.drafted for run in runs)
    text = f"{median:.0f} ({min(speeds):.0f}..{max(speeds):.0f})"
    if drafted:
        text += f"  x{median / plain:.2f}, {sum(run.accepted for run in runs) / drafted:.0%} accepted"
    elif median != plain:
        text += f"  x{median / plain:.2f}, no drafts"
    return text


def _prompts(model_dir: Path, text: Text, count: int) -> tuple[list[list[int]], frozenset[int]]:
    eos = frozenset() if text.beginning else frozenset({2})
    tokenizer = Tokenizer.load(model_dir, eos)
    if text.beginning:
        return [tokenizer.encode(text.beginning, add_special_tokens=True)] * count, eos
    template = ChatTemplate.load(model_dir)
    if template is None:
        raise SystemExit(f"{model_dir} has no chat template")
    rng = random.Random(_SEED)
    samples = [draw(text.kinds[index % len(text.kinds)], rng, held_out=True) for index in range(count)]
    chats = [template.render([ChatMessage("user", sample.turns[0][0])]) for sample in samples]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats], eos


def _table(model_dir: Path, options: argparse.Namespace, *others: str) -> Table:
    title = f"{model_dir.name}, {options.quantize}; one core, tokens/s (lowest..highest of {options.repeats})"
    return Table("text", "at once", "without", "ngram", f"draft: {options.draft_model.name}", *others, title=title)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speculative", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--draft-model", type=Path, default=BUNDLED_MODELS / "tandem-draft")
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
