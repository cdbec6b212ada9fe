"""Parity of all model families with transformers, through a mesh, as one table:

    python -m tests.parity                  all families: some minutes
    python -m tests.parity bloom gemma2     these
    python -m tests.parity --tensor-parallel 2 [FAMILY ...]     over ranks, without a mesh
    python -m tests.parity --quantized [FAMILY ...]             from quantised checkpoints, without a mesh

Each family has a small random checkpoint (checkpoints.py and encoder_decoders.py in tests/component). A router, a
prefill and a decode worker serve it in this process, over real sockets with KV really moving; then a router and a
decode worker alone (colocated). Prompts of many lengths run at once, in chunks, longer than windows and blocks. Every
token must be transformers' own greedy choice after those before it; shown is the largest difference of a log-prob,
which has a tolerance.

With --tensor-parallel each family is computed by so many processes: over shared memory where the compiled decoder can
run it, and over gloo by the eager decoder. What ranks cannot divide is listed with the reason.

With --quantized each family is read in every type of weights: fp32, bf16, rounded to int8 as it is loaded, and from
checkpoints in several quantised formats (quantized.py in tests/component). transformers runs the numbers that they mean
in fp32. int8 and int4 also round activations, int8 weights too, and bf16 activations where the CPU multiplies it, so
there log-probs have a wider tolerance and tokens may differ. Mixtures have other routers there, which choose the same
experts before and after rounding (steady_routing.py in tests/component): between experts that rank close to each other
rounding would choose. A type that a family cannot have is named below its row with the reason.
"""

import argparse
import asyncio
import contextlib
import gc
import io
import os
import random
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mesh.interrupts import run_async, run_program

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForImageTextToText

import tandem
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout, resolve, why_eager
from engine.models.model_config import ModelConfig
from engine.models.read_config import load_config, load_decoder_config
from engine.ranks.launch import load_ranked_runner
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.tokens import SampledToken
from mesh.logs import configure_logging
from tests.component.arms import settings as runner_settings
from tests.component.checkpoints import FAMILIES, MIXED_FAMILIES, OTHER_FAMILIES, RECURRENT_FAMILIES, build_checkpoint
from tests.component.driving import Run
from tests.component.encoder_decoders import FORMS, EncoderDecoderReference, build_encoder_decoder
from tests.component.multimodal import CASES as MULTIMODAL
from tests.component.multimodal import build_multimodal
from tests.component.parity import expect, run_mixed
from tests.component.parity import prompts as mixed_prompts
from tests.component.remote_families import REMOTE_FAMILIES
from tests.component.steady_routing import steady
from tests.component.weights.quantized import (
    BITSANDBYTES,
    INT4_FORMS,
    MIXED_FORMS,
    TERNARY_FORMS,
    quantize_checkpoint,
    twin_of,
)
from tests.component.weights.test_half_weights import copy_narrow
from tests.e2e.reference import TOLERANCE, Reference
from tests.mesh_in_process import mesh_in_process, moved_kv

Scores = Callable[[list[int], list[int]], torch.Tensor]
"""(prompt, tokens) -> transformers' log-probs [len(tokens), vocab_size] at each token's place."""


@dataclass(frozen=True)
class Row:
    """How a checkpoint is made, and what transformers says of it. Both take its folder."""

    build: Callable[[Path], Path]
    reference: Callable[[Path], Scores]


def _decoder_only(model_dir: Path) -> Scores:
    return _scores(model_dir, Reference.load(model_dir))


def _multimodal(model_dir: Path) -> Scores:
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return _scores(model_dir, Reference(model))


def _scores(model_dir: Path, theirs: Reference) -> Scores:
    if load_config(model_dir).shareable_prefixes:
        return lambda prompt, ids: theirs.logprobs(prompt + ids)[len(prompt) - 1 : -1]
    return lambda prompt, ids: expect(theirs.model, prompt, len(ids), ids).logprobs[len(prompt) - 1 :]


def _encoder_decoder(model_dir: Path) -> Scores:
    return EncoderDecoderReference.load(model_dir).logprobs


ROWS: dict[str, Row] = {
    family: Row(partial(build_checkpoint, family), _decoder_only)
    for family in (*FAMILIES, *OTHER_FAMILIES, *RECURRENT_FAMILIES, *MIXED_FAMILIES)
} | {form: Row(partial(build_encoder_decoder, form), _encoder_decoder) for form in FORMS}
ROWS |= {f"{case}-multimodal": Row(partial(build_multimodal, case), _multimodal) for case in MULTIMODAL}
PROMPT_LENGTHS = (1, 9, 16, 17, 28, 45, 64, 100, 150)
NUM_NEW = 24
INT8_TOLERANCE = 0.75
BF16_TOLERANCE = 0.3
MEAN_TOLERANCE = 0.2
"""Of log-probs that differ because weights or activations are rounded."""
_SMALL_STEPS = 64


@dataclass(frozen=True)
class Outcome:
    """The result of one mesh: tokens that were not greedy choices, the largest and the mean difference of a log-prob,
    and whether KV moved for all requests, none of them replayed.
    """

    num_tokens: int
    num_wrong: int
    largest: float
    mean: float
    moved_kv: bool

    @property
    def ok(self) -> bool:
        return self.num_wrong == 0 and self.largest <= TOLERANCE

    def __str__(self) -> str:
        equal = "all equal" if not self.num_wrong else f"{self.num_wrong} differ"
        return f"{self.num_tokens} tokens, {equal}, {self.largest:.1e}"


def prompts(max_tokens: int) -> list[list[int]]:
    """Those that leave room for their answers."""
    generator = random.Random(11)
    made = [[generator.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [prompt for prompt in made if len(prompt) + NUM_NEW <= max_tokens]


def compare(
    theirs: Scores, prompt: list[int], tokens: Sequence[tandem.Token] | Sequence[SampledToken]
) -> tuple[int, torch.Tensor]:
    """Tokens that are not transformers' choice after those before them, and the differences of log-probs."""
    ids = torch.tensor([token.id for token in tokens])
    scores = theirs(prompt, ids.tolist())
    ours = torch.tensor([token.logprob for token in tokens])
    differences = (ours - scores.gather(1, ids[:, None])[:, 0]).abs()
    return int((scores.argmax(-1) != ids).sum()), differences


def outcome_of(found: Sequence[tuple[int, torch.Tensor]], *, moved_kv: bool) -> Outcome:
    """The result of several prompts."""
    differences = torch.cat([of_prompt for _, of_prompt in found])
    num_wrong, largest = sum(wrong for wrong, _ in found), float(differences.max())
    return Outcome(len(differences), num_wrong, largest, float(differences.mean()), moved_kv)


async def ask(client: tandem.AsyncClient, theirs: Scores) -> Outcome:
    given = prompts((await client.models())[0].max_total_tokens)
    results = await asyncio.gather(
        *(client.generate(token_ids=prompt, max_new_tokens=NUM_NEW, ignore_eos=True) for prompt in given)
    )
    found = [compare(theirs, prompt, result.tokens) for prompt, result in zip(given, results, strict=True)]
    return outcome_of(found, moved_kv=moved_kv(results))


class _Loop(asyncio.SelectorEventLoop):
    """Leaves signals to this program: the workers in it would take them."""

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        pass


def mesh(model_dir: Path, *, colocated: bool) -> AbstractAsyncContextManager[tandem.AsyncClient]:
    """A mesh whose steps are small, so that prompts are computed in chunks."""
    return mesh_in_process(
        model_dir,
        colocated=colocated,
        router={"prefill_overflow": 0},
        prefill={"max_batch_prefill_tokens": _SMALL_STEPS},
        decode={"max_step_tokens": _SMALL_STEPS},
    )


async def check(model_dir: Path, theirs: Scores, *, colocated: bool) -> Outcome:
    async with mesh(model_dir, colocated=colocated) as client:
        outcome = await ask(client, theirs)
    if outcome.moved_kv == colocated:
        raise RuntimeError("KV should move if, and only if, prompts are computed elsewhere")
    return outcome


@contextmanager
def quiet() -> Iterator[None]:
    """Services tell a parent process how they go, on stdout; here nobody listens."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


async def run(family: str, model_dir: Path) -> tuple[str, bool]:
    """One row of the table, and whether it is as it should be."""
    with quiet():
        ROWS[family].build(model_dir)
        theirs = ROWS[family].reference(model_dir)
        apart, together = [await check(model_dir, theirs, colocated=colocated) for colocated in (False, True)]
        attention = load_model_runner(runner_settings(model_dir)).attention_backend
    gc.unfreeze()  # each service has frozen what it found, for the life of its process
    gc.collect()
    ok = apart.ok and together.ok
    architecture = load_config(model_dir).architecture
    return f"{family:24}{architecture:28}{attention:10}{apart!s:34}{together!s:34}{'ok' if ok else 'NOT EQUAL'}", ok


_FAMILY = ("family", 24), ("architecture", 28)
_MESHES = (*_FAMILY, ("attention", 10), ("separated", 34), ("colocated", 34))
_NAMED = ("bnb-nf4 in int4", "bnb-int8 in int8")
"""Forms with the arithmetic that `--quantize` names."""
_TYPES = (
    *("fp32", "bf16", "int8", "awq", "gptq", "w8a8", "w4a16", "fp8", "nvfp4", "mxfp4", "hqq", "torchao-8"),
    *BITSANDBYTES,
    *_NAMED,
    *INT4_FORMS,
    *MIXED_FORMS,
    *TERNARY_FORMS,
)
_QUANTIZED = (*((form, 34) for form in _TYPES),)
_ROUNDED = ("bf16", "int8", "w8a8", "w8a8-mixed", *_NAMED, *INT4_FORMS, *TERNARY_FORMS)
"""Types of weights with which the compiled decoder rounds activations, or, in int8, weights too."""
_RANKS = (*_FAMILY, ("over shared memory", 34), ("over gloo", 34))
RunRow = Callable[[str, Path], Coroutine[Any, Any, tuple[str, bool]]]


async def run_all(families: Sequence[str], run_row: RunRow, columns: Sequence[tuple[str, int]]) -> int:
    """Print the table; how many rows are not as they should be."""
    sys.stdout.write("".join(title.ljust(width) for title, width in columns) + "\n")
    num_wrong = num_refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            try:
                row, ok = await run_row(family, Path(folder, family))
            except ConfigurationError as refusal:
                architecture = load_config(Path(folder, family)).architecture
                row, ok = f"{family:24}{architecture:28}not possible: {refusal}", True
                num_refused += 1
            num_wrong += not ok
            sys.stdout.write(row + "\n")
            sys.stdout.flush()
    num_run = len(families) - num_refused
    refused = f"; {num_refused} not possible" if num_refused else ""
    sys.stdout.write(f"{num_run - num_wrong} of {num_run}: tokens equal, log-probs within {TOLERANCE}{refused}\n")
    if any(name == "w8a8" for name, _ in columns):
        limits = f"{INT8_TOLERANCE} (bf16: {BF16_TOLERANCE}), in the mean within {MEAN_TOLERANCE}"
        rounded = f"log-probs within {limits}, tokens may differ"
        sys.stdout.write(f"{', '.join(_ROUNDED)}: {rounded}\n")
    return num_wrong


async def run_ranks(num_ranks: int, family: str, model_dir: Path) -> tuple[str, bool]:
    """One row of the table of ranks. Raises ConfigurationError if ranks cannot divide the model."""
    with quiet():
        ROWS[family].build(model_dir)
        theirs = ROWS[family].reference(model_dir)
    wanted = runner_settings(model_dir, tensor_parallel=num_ranks)
    resolved, config = resolve(wanted)
    reason = why_eager(resolved, config, kv_layout(config, resolved)) if isinstance(config, ModelConfig) else ""
    eager = check_ranks(replace(wanted, enforce_eager=True), theirs)
    compiled = check_ranks(wanted, theirs) if reason is None else None
    ok = eager.ok and (compiled is None or compiled.ok)
    text = str(compiled or textwrap.shorten(f"no: {reason}", 33, placeholder=" ...")).ljust(34)
    return f"{family:24}{config.architecture:28}{text}{eager!s:34}{'ok' if ok else 'NOT EQUAL'}", ok


def check_ranks(settings: RunnerSettings, theirs: Scores) -> Outcome:
    """The result of ranks in processes, for prompts in chunks and mixed batches."""

    def on_lost(reason: str) -> None:
        sys.stderr.write(f"{settings.model_dir.name}: {reason}\n")
        os._exit(1)

    with closing(load_ranked_runner(settings, on_lost=on_lost, log_level="critical")) as runner:
        runs = run_mixed(runner)
    return compare_runs(theirs, runs)


def compare_runs(theirs: Scores, runs: Sequence[Run]) -> Outcome:
    """The result of `run_mixed`."""
    found = [compare(theirs, prompt, run.tokens) for prompt, run in zip(mixed_prompts(), runs, strict=True)]
    return outcome_of(found, moved_kv=False)


async def run_quantized(family: str, model_dir: Path) -> tuple[str, bool]:
    """One row of the table of types of weights. Raises ConfigurationError for encoder-decoder models."""
    ROWS[family].build(model_dir)
    if family in FORMS:
        raise ConfigurationError("it is an encoder-decoder model: see the table of meshes")
    row, beyond = f"{family:24}{load_config(model_dir).architecture:28}", list[str]()
    refused: dict[str, list[str]] = {}  # by reason
    for form, width in _QUANTIZED:
        try:
            outcome = check_form(family, model_dir, form)
            text, (largest, mean) = str(outcome), tolerances_of(form)
            is_near = outcome.largest <= largest and outcome.mean <= mean
            if not is_near or (outcome.num_wrong and form not in _ROUNDED):
                beyond.append(f"{form} (mean {outcome.mean:.2f})")
        except ConfigurationError as refusal:
            text = "refused, see below"
            refused.setdefault(re.sub(r".*: tensor \S+: ", "", str(refusal)), []).append(form)
        row += text.ljust(width)
    below = "".join(f"\n    {', '.join(forms)}: {reason}" for reason, forms in refused.items())
    return f"{row}{'NOT EQUAL: ' + ', '.join(beyond) if beyond else 'ok'}{below}", not beyond


def check_form(family: str, model_dir: Path, form: str) -> Outcome:
    """The result of a checkpoint in one type of weights, beside transformers with the numbers that they mean."""
    if form in _ROUNDED and family not in REMOTE_FAMILIES and load_decoder_config(model_dir).experts is not None:
        model_dir = _steady(model_dir)
    folder, reference, changes = model_dir, model_dir, {}
    if form == "bf16":
        folder = reference = copy_narrow(model_dir, model_dir.with_name(f"{family}-bf16"), "bfloat16")
    elif form == "int8":
        changes = {"quantize": "int8"}
    elif form != "fp32":
        form, _, quantize = form.partition(" in ")
        changes = {"quantize": quantize or "none"}
        folder = model_dir.with_name(f"{model_dir.name}-{form}")
        folder = folder if folder.exists() else quantize_checkpoint(model_dir, folder, form)
        reference = twin_of(folder)
    with quiet():
        runs = run_mixed(load_model_runner(runner_settings(folder, **changes)))
        return compare_runs(ROWS[family].reference(reference), runs)


def _steady(model_dir: Path) -> Path:
    """The same mixture with other routers, which choose alike before and after rounding."""
    out = model_dir.with_name(f"{model_dir.name}-steady")
    return out if out.exists() else steady(model_dir, out)


def tolerances_of(form: str) -> tuple[float, float]:
    """The most by which a log-prob may differ, and all of them in the mean."""
    if form not in _ROUNDED:
        return TOLERANCE, TOLERANCE
    return BF16_TOLERANCE if form == "bf16" else INT8_TOLERANCE, MEAN_TOLERANCE


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if all are equal."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity")
    parser.add_argument("names", nargs="*", metavar="FAMILY")
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--tensor-parallel", type=int, metavar="N", help="number of ranks")
    table.add_argument("--quantized", action="store_true", help="checkpoints in several quantised formats")
    options = parser.parse_args(argv)
    names: list[str] = options.names
    if unknown := set(names) - set(ROWS):
        sys.stderr.write(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}\n")
        return 2
    configure_logging("parity", level="critical", json=False)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    run_row: RunRow = run
    columns: Sequence[tuple[str, int]] = _MESHES
    if options.quantized:
        run_row, columns = run_quantized, (*_FAMILY, *_QUANTIZED)
    elif options.tensor_parallel is not None:
        run_row, columns = partial(run_ranks, options.tensor_parallel), _RANKS
    return 1 if run_async(run_all(names or list(ROWS), run_row, columns), _Loop) else 0


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
