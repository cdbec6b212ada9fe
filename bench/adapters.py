"""Time of a decode step with LoRA adapters beside that of the base model, in one engine without a mesh.

    python -m bench.adapters [--dtype float32 bfloat16] [--batch 8] [--adapters 4] [--rank 16] [--targets all]

Weights are random. Steps with adapters and steps of the base model take turns; medians, and the median of the ratios of
neighbours, are printed. Sequences use the adapters in turn.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.shapes import SHAPES, write_shape
from checkpoint.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterFiles, read_adapter
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec
from mesh.interrupts import run_program
from tandem_cli.capacity.measurement import clock_for

_CONTEXT_TOKENS = 256
_TARGETS = {"all": "_proj", "attention": "self_attn", "qv": "[qv]_proj"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=_TARGETS, default="all", help="modules that the adapters change")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(options.shape, Path(folder))
        adapters = [_write_adapter(model_dir, number, options) for number in range(options.adapters)]
        for dtype in options.dtype:
            sys.stdout.write(f"{dtype}: {_measure(model_dir, dtype, adapters, options)}\n")


def _write_adapter(model_dir: Path, number: int, options: argparse.Namespace) -> AdapterFiles:
    """A random adapter of Llama's modules."""
    folder = model_dir / f"adapter-{number}"
    folder.mkdir()
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for source in (source for spec in parameter_specs(load_decoder_config(model_dir)) for source in spec.sources):
        if re.search(_TARGETS[options.targets], source.name):
            outputs, inputs = source.shape
            for part, shape in (("lora_A", (options.rank, inputs)), ("lora_B", (outputs, options.rank))):
                name = f"base_model.model.{source.name.removesuffix('.weight')}.{part}.weight"
                tensors[name] = 0.01 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": options.rank, "lora_alpha": options.rank}))
    return read_adapter(folder.name, folder, options.rank)


def _measure(model_dir: Path, dtype: str, adapters: Sequence[AdapterFiles], options: argparse.Namespace) -> str:
    blocks = options.batch * (_CONTEXT_TOKENS // 16 + 1)
    runner = load_model_runner(
        RunnerSettings(
            model_dir,
            "cpu",
            dtype,
            load_format="dummy",
            num_blocks=blocks,
            quantize=options.quantize,
            adapters=tuple(adapters),
        )
    )
    base = _batch([""] * options.batch)
    adapted = _batch(sorted(islice(cycle(adapter.digest for adapter in adapters), options.batch)))
    clock, pairs = clock_for(options.threads), []
    for _ in range(options.repeats):
        pairs.append((_step_ms(runner, base, clock), _step_ms(runner, adapted, clock)))
    pairs = pairs[options.repeats // 10 :]
    base_ms, adapted_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(with_adapters / without for without, with_adapters in pairs)
    return (
        f"a step of {options.batch} takes {base_ms:.2f} ms, with {len(adapters)} adapters of rank {options.rank} "
        f"({options.targets}) {adapted_ms:.2f} ms: {ratio:.3f} times as long"
    )


def _batch(digests: Sequence[str]) -> ScheduledBatch:
    """One more token of a sequence for each digest."""
    items = []
    for number, digest in enumerate(digests):
        prompt = tuple(range(3, 3 + _CONTEXT_TOKENS))
        sampling = SamplingParams(max_new_tokens=2, seed=0, ignore_eos=True)
        sequence = SequenceState(SequenceSpec(f"r{number}", 0, prompt, len(prompt), sampling, adapter=digest))
        per_sequence = _CONTEXT_TOKENS // 16 + 1
        sequence.block_table = list(range(number * per_sequence, (number + 1) * per_sequence))
        items.append(ScheduledSequence(sequence, _CONTEXT_TOKENS - 1, 1))
    return ScheduledBatch(tuple(items))


def _step_ms(runner: ModelRunner, batch: ScheduledBatch, clock: Callable[[], float]) -> float:
    started_s = clock()
    runner.begin(batch)()
    return 1000 * (clock() - started_s)


if __name__ == "__main__":
    run_program(main)
