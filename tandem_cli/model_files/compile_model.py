"""The work of `tandem compile`, which needs the engine."""

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from checkpoint.source import ModelSource
from decode_worker.settings import DecodeSettings
from engine.compiled_code import COMBINATIONS, CompiledCode, compile_code, why_not_kept
from engine.kernels.cpu.compilation.compiler import code_folder
from engine.kernels.cpu.machine import why_no_loops
from engine.loading.load_runner import draft_settings
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.logs import quiet_logs
from mesh.settings import as_flags, flag_name, load_settings
from tandem_cli.compile import SETTINGS
from tandem_cli.configuration.up_settings import UpSettings
from tandem_cli.local_mesh.deployment import find_draft
from tandem_cli.local_mesh.hardware import available_cores
from tandem_cli.model_files.model_folders import find_model, load_format_of
from tandem_cli.parser import given
from worker.load_engine import load_runner_with_ranks
from worker.runner_settings import base_runner_settings


def compile_model(args: argparse.Namespace) -> int:
    """Compile the code, or find that it is there. Returns the exit status."""
    chosen = given(args, SETTINGS)
    if args.all and chosen:
        raise ConfigurationError(f"--all takes all the usual types: leave {flag_name(next(iter(chosen)))} out")
    torch.set_num_threads(len(available_cores()))
    folder = code_folder()
    for name, settings in _all_settings(args, chosen):
        with quiet_logs(logging.WARNING):
            code = compile_code(settings, load_runner_with_ranks)
        _report(name, code, folder, as_json=args.json)
    if (reason := why_not_kept()) is not None:
        raise ConfigurationError(f"{reason}: give a folder with room in NUMBA_CACHE_DIR")
    return 0


def _all_settings(args: argparse.Namespace, chosen: dict[str, str]) -> Iterator[tuple[str, RunnerSettings]]:
    """The settings to compile for, each with a name."""
    if not args.all:
        yield from _model_settings(args.model, chosen)
        return
    if (reason := why_no_loops()) is not None:
        sys.stderr.write(f"tandem: nothing is compiled on this CPU: {reason}\n")
    model_dir = find_model(ModelSource(args.model))
    for types in COMBINATIONS:
        name = ", ".join(f"{name} {value}" for name, value in types.items())
        options = {**types, "load_format": "dummy", "compile_all": True}
        yield name, RunnerSettings(model_dir, **options)  # type: ignore[arg-type]


def _model_settings(model: str, chosen: dict[str, str]) -> Iterator[tuple[str, RunnerSettings]]:
    """The settings of the model as its worker has them, and those of what drafts beside it."""
    adapters = {"adapter": ",".join(chosen["adapter"])} if isinstance(chosen.get("adapter"), list) else {}
    values = chosen | adapters
    model_dir = find_model(ModelSource(model, values.get("revision", "")))
    find_draft(values, UpSettings())
    flags = as_flags(**values | {"model": model_dir, "revision": "", "registry_address": "none"})
    worker = load_settings(DecodeSettings, flags, prog="decode_worker").values
    load_format = worker.load_format if load_format_of(model_dir) == "auto" else "dummy"
    settings = replace(base_runner_settings(worker), load_format=load_format)
    yield model, settings
    if (draft := draft_settings(worker.speculation(), settings)) is not None:
        yield "multi-token prediction" if draft.is_mtp else f"draft model {draft.model_dir.name}", draft


def _report(name: str, code: CompiledCode, folder: str | None, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"name": name, **asdict(code), "folder": folder}) + "\n")
        return
    verdict = "hit" if code.is_hit else "miss"
    sys.stdout.write(
        f"{name}: {verdict}, {code.num_loaded} functions loaded, {code.num_compiled} compiled, "
        f"{code.seconds:.1f} s; key {code.key}\n"
    )
