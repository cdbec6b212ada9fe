"""Time of one engine step without a mesh, and of its phases: a prompt, and decode steps of several sizes.

    python -m bench.step [--dtype float32 bfloat16 float16] [--quantize none int8] [--kv-dtype auto] [--threads 1 2]
                         [--ranks 2] [--batch 1 8 32] [--context 256] [--parts] [--decoder compiled eager]
                         [--shape 135m|lfm2-350m|qwen3.5-0.8b|granite4-h-350m|deepseek-v2-lite-6]
                         [--checkpoints FOLDER ...]

Weights are random. Variants take turns, and medians are printed. With one thread, times are CPU times of the engine's
thread, which other load on the machine disturbs less than wall-clock time. A step of one sequence reads all weights, so
its bandwidth is printed beside the memory bandwidth in the same rounds. `--ranks` measures tensor-parallel ranks of one
thread beside as many threads of one process, and prints the ratio of their times. `--parts` adds a table with the
phases of a step, the speed of products as a share of the machine's limits, and the speed of attention. The prompt has
`--context` tokens, and so has each sequence before its decode steps; more than 2,000 need a long shape:
`--shape 135m-long --context 8192 --batch 1 4 --repeats 1 --parts`. `--decoder` compares the compiled decoder with the
eager one. All shapes are in `bench/shapes.py`. `--checkpoints` measures model folders besides, such as those that
`tandem quantize` writes, each in the arithmetic in which `tandem up` serves it, and calls them by their names.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.arithmetic import operations_per_s
from bench.shapes import write_shape
from engine.kernels.cpu.threads.phases import ATTENTION, DOWN, GATE_UP, LOGITS, OUTPUT, PHASES, QKV
from engine.loading.resolve import resolve
from engine.loading.stored_parameters import rounds_to_steps
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.runner_settings import RunnerSettings
from engine.settings import DTYPES, QUANTIZATIONS
from mesh.interrupts import run_program, showing
from tandem_cli.capacity.measurement import EngineSteps, StepWorkload, read_bytes_per_s
from tandem_cli.capacity.model_size import ModelSize, model_size
from tandem_cli.capacity.ranks import precision_of
from tandem_cli.capacity.roofline import STEP_BYTES, Precision

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PROMPT = 0
_ONE = 1
_ATTENTION = PHASES[ATTENTION]
_PRODUCTS = [PHASES[phase] for phase in (QKV, OUTPUT, GATE_UP, DOWN, LOGITS)]
_ARITHMETIC = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}
"""Of products, by the type of weights; others are widened to fp32."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of the engine: types of weights and KV, and numbers of threads and ranks."""

    weights: str | Path  # a dtype, a quantization, or the folder of a checkpoint that is measured in place of the shape
    kv_dtype: str
    num_threads: int
    num_ranks: int = 1
    is_eager: bool = False

    def __str__(self) -> str:
        kv = "" if self.kv_dtype == "auto" else f", KV {self.kv_dtype}"
        threads = "" if self.num_threads == 1 else f", {self.num_threads} threads"
        threads = threads if self.num_ranks == 1 else f", {self.num_ranks} ranks"
        name = self.weights.resolve().name if isinstance(self.weights, Path) else self.weights
        return f"{_SHORT.get(name, name)}{kv}{threads}{', eager' if self.is_eager else ''}"

    @property
    def checkpoint(self) -> Path | None:
        return self.weights if isinstance(self.weights, Path) else None

    @property
    def quantize(self) -> str:
        return "none" if isinstance(self.weights, Path) or self.weights in DTYPES else self.weights

    @property
    def dtype(self) -> str:
        return self.weights if isinstance(self.weights, str) and self.weights in DTYPES else "auto"


Times = Mapping[tuple[Variant, int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Subject:
    """The model of a variant, and the types in which its matrices are multiplied."""

    size: ModelSize
    precision: Precision

    @property
    def step_bytes(self) -> float:
        """The size of the weights that a step reads."""
        precision = self.precision
        # Beside matrices in fp8 the output matrix has the checkpoint's own type, as the embedding has.
        keeps_output = precision.is_packed and precision.weights == "fp8"
        output_bytes = precision.embedding_bytes if keeps_output else precision.output_bytes
        return self.size.linear_params * precision.weight_bytes + self.size.vocabulary_params * output_bytes


@dataclass(slots=True)
class Rounds:
    """The measurements of the complete rounds. An interrupted one adds nothing."""

    times: dict[tuple[Variant, int], list[float]] = field(default_factory=dict)
    bytes_per_s: dict[Variant, list[float]] = field(default_factory=dict)
    phases_ms: dict[tuple[Variant, int], Mapping[str, float]] = field(default_factory=dict)

    def add_round(self, engines: Mapping[Variant, EngineSteps], batches: Sequence[int]) -> None:
        """Measure each engine once."""
        times: dict[tuple[Variant, int], float] = {}
        phases_ms: dict[tuple[Variant, int], Mapping[str, float]] = {}
        bytes_per_s: dict[Variant, float] = {}
        for variant, steps in engines.items():
            times[variant, _PROMPT] = steps.prompt_ms()
            phases_ms[variant, _PROMPT] = steps.take_phases_ms()
            bytes_per_s[variant] = read_bytes_per_s(variant.num_threads)
            for batch in batches:
                times[variant, batch] = steps.decode_ms(batch)
                phases_ms[variant, batch] = steps.take_phases_ms()
        for case, ms in times.items():
            self.times.setdefault(case, []).append(ms)
        for variant, speed in bytes_per_s.items():
            self.bytes_per_s.setdefault(variant, []).append(speed)
        self.phases_ms = phases_ms


def main() -> None:
    options = _options()
    variants = _variants(options)
    available = sorted(os.sched_getaffinity(0))
    if max(variant.num_threads for variant in variants) == 1:
        os.sched_setaffinity(0, {available[-1]})
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(options.shape, Path(folder))
        engines = {variant: EngineSteps(_workload(model_dir, variant, options)) for variant in variants}
        subjects = {variant: _subject(model_dir, variant) for variant in variants}
        with showing(rounds.times, lambda: _show(rounds, engines, subjects, options)):
            for _ in range(options.repeats):
                rounds.add_round(engines, options.batch)


def _subject(model_dir: Path, variant: Variant) -> Subject:
    if isinstance(variant.weights, str):
        config = load_decoder_config(model_dir)
        precision = Precision(variant.weights, "float32", is_packed=not variant.is_eager)
        if variant.weights == "int4" and rounds_to_steps(parameter_specs(config), {}):
            precision = replace(precision, group_bytes=STEP_BYTES)
        return Subject(model_size(config), precision)
    config = load_decoder_config(variant.weights)
    precision = precision_of(*resolve(RunnerSettings(variant.weights, enforce_eager=variant.is_eager)))
    return Subject(model_size(config), precision)


def _show(
    rounds: Rounds,
    engines: Mapping[Variant, EngineSteps],
    subjects: Mapping[Variant, Subject],
    options: argparse.Namespace,
) -> None:
    console, times = Console(width=140), rounds.times
    console.print(_times_table(list(engines), options, times))
    for variant in engines:
        if variant.num_ranks > 1:
            console.print(_ratios(variant, options, times))
    for variant in engines if _ONE in options.batch else ():
        bytes_per_s = statistics.median(rounds.bytes_per_s[variant])
        console.print(_speed_of_one(variant, subjects[variant], statistics.median(times[variant, _ONE]), bytes_per_s))
    if options.json:
        options.json.write_text(json.dumps(_medians(times, options.context)))
    if options.parts:
        for variant, steps in engines.items():
            console.print(_phases_table(variant, options.batch, rounds.phases_ms))
            bytes_per_s = statistics.median(rounds.bytes_per_s[variant])
            for line in _product_speeds(variant, options, subjects[variant], bytes_per_s, rounds.phases_ms):
                console.print(line)
            size = subjects[variant].size
            for line in _attention_speeds(variant, options, size, steps.kv_bytes_per_token, rounds.phases_ms):
                console.print(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="135m")
    about = "types of the weights that are not quantized (float32)"
    parser.add_argument("--dtype", nargs="+", choices=DTYPES[1:], default=["float32"], help=about)
    parser.add_argument("--quantize", nargs="+", choices=QUANTIZATIONS, default=["none", "int8"])
    parser.add_argument("--kv-dtype", nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    parser.add_argument("--decoder", nargs="+", choices=("compiled", "eager"), default=["compiled"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    about = "model folders that are measured besides"
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=[], metavar="FOLDER", help=about)
    parser.add_argument("--parts", action="store_true", help="also print the phases of a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians there")
    options = parser.parse_args()
    for folder in options.checkpoints:
        if not (folder / "config.json").is_file():
            parser.error(f"--checkpoints {folder}: it is no model folder, it has no config.json")
    names = [folder.resolve().name for folder in options.checkpoints]
    if len(set(names)) < len(names):
        parser.error(f"--checkpoints: two folders have one name ({', '.join(names)}), which stands for them in tables")
    return options


def _variants(options: argparse.Namespace) -> list[Variant]:
    """Every combination. Beside so many ranks stand as many threads."""
    weights: list[str | Path] = []
    for quantize in options.quantize:
        weights += options.dtype if quantize == "none" else [quantize]
    weights += options.checkpoints
    arms = [(threads, 1) for threads in (*options.threads, *options.ranks)]
    arms += [(ranks, ranks) for ranks in options.ranks]
    return [
        Variant(name, kv_dtype, num_threads, num_ranks, is_eager=decoder == "eager")
        for name, kv_dtype, (num_threads, num_ranks), decoder in itertools.product(
            weights, options.kv_dtype, dict.fromkeys(arms), options.decoder
        )
    ]


def _workload(model_dir: Path, variant: Variant, options: argparse.Namespace) -> StepWorkload:
    return StepWorkload(
        variant.checkpoint or model_dir,
        variant.quantize,
        max(options.batch),
        prompt_tokens=options.context,
        context_tokens=options.context,
        num_threads=variant.num_threads,
        kv_dtype=variant.kv_dtype,
        num_ranks=variant.num_ranks,
        dtype=variant.dtype,
        enforce_eager=variant.is_eager,
    )


def _times_table(variants: Sequence[Variant], options: argparse.Namespace, times: Times) -> Table:
    batches = options.batch
    table = Table("arithmetic", f"prompt of {options.context}, ms", *(f"step of {n}, ms" for n in batches))
    for variant in variants:
        cells = (times[variant, batch] for batch in (_PROMPT, *batches))
        table.add_row(str(variant), *(f"{statistics.median(ms):.1f} ({min(ms):.1f}..{max(ms):.1f})" for ms in cells))
    return table


def _medians(times: Times, context: int) -> dict[str, float]:
    names = {key: f"prompt of {context}" if key[1] == _PROMPT else f"step of {key[1]}" for key in times}
    return {f"{key[0]}, {names[key]}, ms": statistics.median(ms) for key, ms in times.items()}


def _ratios(variant: Variant, options: argparse.Namespace, times: Times) -> str:
    """The ranks' times as a multiple of those of the threads: medians of the rounds' ratios."""
    threads, batches = replace(variant, num_ranks=1), options.batch
    ratios = [
        statistics.median(a / b for a, b in zip(times[variant, column], times[threads, column], strict=True))
        for column in (_PROMPT, *batches)
    ]
    names = (f"prompt of {options.context}", *(f"step of {n}" for n in batches))
    return f"{variant} / {threads}: " + ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True)
    )


def _speed_of_one(variant: Variant, subject: Subject, step_ms: float, bytes_per_s: float) -> str:
    num_bytes = subject.step_bytes
    reached = 1000 * num_bytes / step_ms
    read = f"{num_bytes / 1e6:.0f} MB of weights at {reached / 1e9:.1f} GB/s"
    return f"{variant}: a step of 1 reads {read}, {reached / bytes_per_s:.0%} of the {bytes_per_s / 1e9:.1f} of memory"


def _product_speeds(
    variant: Variant,
    options: argparse.Namespace,
    subject: Subject,
    bytes_per_s: float,
    phases_ms: Mapping[tuple[Variant, int], Mapping[str, float]],
) -> Iterator[str]:
    """Arithmetic of the products, and their share of the roofline: the limit of arithmetic or of memory, whichever is
    lower. Of a prompt, all layers count for all tokens, though some leave the last ones out (result_rows.py).
    bytes_per_s: of memory.
    """
    limit = operations_per_s(_ARITHMETIC.get(subject.precision.weights, "float32"), variant.num_threads)
    size, num_bytes = subject.size, subject.step_bytes
    yield f"{variant}: the cores compute at most {limit / 1e9:.0f} GOP/s, memory gives {bytes_per_s / 1e9:.1f} GB/s"
    for column in (_PROMPT, *options.batch):
        ms = sum(phases_ms[variant, column].get(phase, 0.0) for phase in _PRODUCTS)
        if not ms:
            continue
        rows, last_rows = (options.context, 1) if column == _PROMPT else (column, column)
        operations = 2 * (size.active_linear_params * rows + size.vocabulary_params * last_rows)
        least_s = max(operations / limit, num_bytes / bytes_per_s)
        of = f"a prompt of {options.context}" if column == _PROMPT else f"a step of {column}"
        reached = f"{operations / ms / 1e6:.0f} GOP/s and {num_bytes / ms / 1e6:.1f} GB/s"
        yield f"{variant}: products of {of}: {reached}, {1000 * least_s / ms:.0%} of the roofline"


def _attention_speeds(
    variant: Variant,
    options: argparse.Namespace,
    size: ModelSize,
    kv_bytes: int,
    phases_ms: Mapping[tuple[Variant, int], Mapping[str, float]],
) -> Iterator[str]:
    """Arithmetic of a prompt's attention, and the KV that attention reads in steps. kv_bytes: of a token."""
    tokens = options.context
    flops = size.attention_flops(tokens, (tokens + 1) / 2)
    if prompt_ms := phases_ms[variant, _PROMPT].get(_ATTENTION):
        yield f"{variant}: attention of a prompt of {tokens} computes {flops / prompt_ms / 1e6:.0f} GFLOP/s"
    for batch in options.batch:
        if step_ms := phases_ms[variant, batch].get(_ATTENTION):
            num_bytes = batch * tokens * kv_bytes
            speed = f"{num_bytes / 1e6:.0f} MB of KV at {num_bytes / step_ms / 1e6:.1f} GB/s"
            yield f"{variant}: attention of a step of {batch} reads {speed}"


def _phases_table(
    variant: Variant, batches: Sequence[int], phases_ms: Mapping[tuple[Variant, int], Mapping[str, float]]
) -> Table:
    columns = (_PROMPT, *batches)
    table = Table("phase", "prompt, ms", *(f"step of {n}, ms" for n in batches), title=str(variant))
    for name in phases_ms[variant, _PROMPT]:
        table.add_row(name, *(f"{phases_ms[variant, column].get(name, 0.0):.2f}" for column in columns))
    return table


if __name__ == "__main__":
    run_program(main)
