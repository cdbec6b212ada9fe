"""Sizes of batches, passes and blocks: what fits by itself, and what is refused in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import decode_worker.__main__
import prefill_worker.__main__
import worker.worker
from decode_worker.settings import DecodeSettings
from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings
from prefill_worker.settings import PrefillSettings
from tests.defects import Repaired
from worker.load_engine import LoadedEngine

Checkpoint = Callable[[str], Path]


class _LoadedError(Exception):
    """Ends a worker once its engine is there."""


async def loaded(monkeypatch: pytest.MonkeyPatch, program: Any, settings: Any) -> LoadedEngine:
    """The engine that a worker's own program builds from its settings."""
    engines: list[LoadedEngine] = []
    load = worker.worker.download_and_load_engine

    def load_and_stop(*args: Any) -> None:
        engines.append(load(*args))
        raise _LoadedError

    monkeypatch.setattr(worker.worker, "download_and_load_engine", load_and_stop)
    with pytest.raises(_LoadedError):
        await program.serve(settings)
    return engines[0]


def given(cls: type, model_dir: Path, *argv: str, **environ: str) -> Any:
    base = ("--model", str(model_dir), "--registry-address", "none", "--device", "cpu", "--kv-cache-bytes", "8000000")
    return load_settings(cls, (*base, *argv), prog="worker", environ=environ).values


@pytest.mark.parametrize("batch", [257, 512])
async def test_large_batches_start(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, batch: int, repaired: Repaired
) -> None:
    settings = given(DecodeSettings, checkpoint("llama"), OPTION_MAX_ROLLING_BATCH_SIZE=str(batch))
    config = (await loaded(monkeypatch, decode_worker.__main__, settings)).scheduler.config
    assert (config.max_num_seqs, config.max_batch_tokens) == (batch, batch)
    repaired("M8", "batches of 257 and 512 sequences start: a step takes as many tokens")


@pytest.mark.parametrize("tokens", [1, 16, 63])
async def test_short_passes_start(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tokens: int, repaired: Repaired
) -> None:
    settings = given(PrefillSettings, checkpoint("llama"), MAX_BATCH_PREFILL_TOKENS=str(tokens))
    config = (await loaded(monkeypatch, prefill_worker.__main__, settings)).scheduler.config
    assert (config.max_num_seqs, config.max_batch_tokens) == (tokens, tokens)
    repaired("M8", "MAX_BATCH_PREFILL_TOKENS of 1 to 63 start: as many prompts at a time")


@pytest.mark.parametrize(
    ("cls", "flag", "value"),
    [
        (DecodeSettings, "block_size", "0"),
        (PrefillSettings, "block_size", "-16"),
        (DecodeSettings, "layers_per_group", "0"),
        (DecodeSettings, "max_rolling_batch_size", "0"),
        (DecodeSettings, "max_step_tokens", "0"),
        (DecodeSettings, "max_batch_total_tokens", "-1"),
        (PrefillSettings, "max_batch_prefill_tokens", "0"),
        (PrefillSettings, "max_num_prompts", "-1"),
        (DecodeSettings, "max_model_len", "-1"),
        (DecodeSettings, "kv_cache_bytes", "-1"),
        (DecodeSettings, "layer_group_bytes", "-1"),
        (DecodeSettings, "num_threads", "-1"),
        (DecodeSettings, "drain_grace_s", "nan"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path: Path, cls: type, flag: str, value: str, repaired: Repaired) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag} must be >= [01], got {value}"):
        given(cls, tmp_path, f"--{flag.replace('_', '-')}", value)
    repaired("M16", "block size 0 and the like: refused by name before anything is loaded")
