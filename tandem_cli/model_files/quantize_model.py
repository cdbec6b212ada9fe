"""The work of `tandem quantize`, which needs the engine."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from shlex import quote

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from checkpoint.files import require_other_files
from checkpoint.new_folder import require_absent
from checkpoint.source import ModelSource
from engine.models.model_config import ModelConfig
from engine.quantizer import IN_GROUPS
from engine.quantizer.float_checkpoint import FloatCheckpoint, open_float_checkpoint
from engine.quantizer.make import quantize_checkpoint, require_fit
from engine.quantizer.quality import Quality
from engine.quantizer.rare_experts import MIN_TOKENS
from engine.quantizer.schemes import Scheme, make_scheme
from mesh.domain.errors import ConfigurationError
from tandem_cli.model_files.calibration import CalibrationPrompts, read_prompts
from tandem_cli.model_files.model_folders import find_model
from tandem_cli.quantize import DEFAULT_ALPHA, DEFAULT_GROUP_SIZE
from tandem_cli.terminal import FittingTable, error_console, progress_bar, wide_console

_TELL_EVERY_S = 30.0
_LONG = 1e6
"""Larger perplexities are printed with an exponent."""


def quantize_model(args: argparse.Namespace) -> int:
    """Quantise the model, and print the report. Returns the exit status."""
    began_s = time.monotonic()
    _check_options(args)
    require_absent(args.out)
    model_dir = find_model(ModelSource(args.model))
    require_other_files(model_dir)
    checkpoint = open_float_checkpoint(model_dir)
    scheme = _scheme(args, checkpoint)
    require_fit(checkpoint, scheme)
    config = checkpoint.config
    prompts = read_prompts(
        args.data,
        checkpoint.folder,
        vocab_size=config.vocab_size,
        max_prompts=args.max_prompts,
        max_tokens=min(args.max_tokens, config.max_model_len),
    )
    console = error_console()
    console.print(_about(prompts, min(args.max_tokens, config.max_model_len)), soft_wrap=True)
    with progress_bar(console, MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        made = quantize_checkpoint(
            checkpoint,
            args.out,
            scheme,
            prompts.calibration,
            prompts.held_out,
            _layer_progress(console, bar, config.num_layers),
        )
    if args.json:
        facts = {"scheme": args.scheme, "base_bytes": checkpoint.num_bytes, "bytes": made.num_bytes}
        facts |= {"rare_experts": made.num_rare_experts}
        sys.stdout.write(json.dumps(facts | asdict(made.quality), indent=2) + "\n")
    else:
        wide_console().print(FittingTable(_table(made.quality, checkpoint.num_bytes, made.num_bytes)))
        sys.stdout.write(_about_rare(made.num_rare_experts, config))
        sys.stdout.write(
            f"{args.out}: {args.scheme} in {time.monotonic() - began_s:.1f} s; "
            f"serve it with: tandem up {quote(str(args.out))}\n"
        )
    return 0


def _layer_progress(console: Console, bar: Progress, num_layers: int) -> Callable[[int], None]:
    """Shows finished layers and the time left: in a log, which has no bar, by a line now and then."""
    task = bar.add_task("layers", total=num_layers)
    began_s = told_s = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told_s
        bar.update(task, completed=done)
        now_s = time.monotonic()
        if not console.is_terminal and now_s - told_s >= _TELL_EVERY_S:
            told_s, left_s = now_s, (now_s - began_s) / done * (num_layers - done)
            console.print(
                f"{done} of {num_layers} layers, about {timedelta(seconds=round(left_s))} left", soft_wrap=True
            )

    return tell


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for options out of range, or of other schemes."""
    if args.group_size is not None and args.scheme not in IN_GROUPS:
        raise ConfigurationError(f"--group-size is for {', '.join(IN_GROUPS)}: {args.scheme} has a scale per output")
    if args.alpha is not None and args.scheme != "smoothquant":
        raise ConfigurationError(f"--alpha is for smoothquant, not for {args.scheme}")
    if args.alpha is not None and not 0 <= args.alpha <= 1:
        raise ConfigurationError(f"--alpha must be from 0 to 1, got {args.alpha:g}")
    if args.group_size is not None and args.group_size < 1:
        raise ConfigurationError(f"--group-size must be > 0, got {args.group_size}")
    if args.max_prompts < 2 or args.max_tokens < 2:
        raise ConfigurationError("--max-prompts and --max-tokens must be at least 2")


def _scheme(args: argparse.Namespace, checkpoint: FloatCheckpoint) -> Scheme:
    group_size = DEFAULT_GROUP_SIZE if args.group_size is None else args.group_size
    alpha = DEFAULT_ALPHA if args.alpha is None else args.alpha
    return make_scheme(args.scheme, group_size=group_size, alpha=alpha, dtype=checkpoint.dtype)


def _about(prompts: CalibrationPrompts, max_tokens: int) -> str:
    phrases = [f"{len(prompts.calibration)} prompts to calibrate with, {len(prompts.held_out)} held out to judge by"]
    phrases += [f"{prompts.num_cut} cut to {max_tokens} tokens (--max-tokens)"] if prompts.num_cut else []
    phrases += [f"{prompts.num_left} not used (--max-prompts)"] if prompts.num_left else []
    return "; ".join(phrases)


def _table(quality: Quality, base_bytes: int, num_bytes: int) -> Table:
    table = Table("", "original", "quantised", box=None, pad_edge=False)
    table.add_row("weights", _size(base_bytes), _size(num_bytes))
    table.add_row("perplexity", _perplexity(quality.base_perplexity), _perplexity(quality.perplexity))
    table.add_row("same most probable token", "", f"{quality.top1_agreement:.2%}")
    table.add_row("mean KL divergence, nats", "", f"{quality.mean_kl:.5f}")
    table.add_row("mean difference of log-probs", "", f"{quality.logprob_difference:.5f}")
    table.caption = f"{quality.num_prompts} held-out prompts, {quality.num_tokens} tokens"
    return table


def _about_rare(num_rare: int, config: ModelConfig) -> str:
    """A line about experts that the calibration prompts hardly reach, if there are some."""
    if not num_rare or config.experts is None:
        return ""
    num_experts = config.experts.num_experts * sum(config.experts.layers)
    return (
        f"{num_rare} of {num_experts} experts got fewer than {MIN_TOKENS} tokens to calibrate with: their gate and up "
        "took the statistics of the layer, their down was rounded to nearest; give more prompts\n"
    )


def _perplexity(value: float) -> str:
    return f"{value:.4f}" if value < _LONG else f"{value:.4g}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
