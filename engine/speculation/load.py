"""Composition of a Speculator from what an operator asks for."""

from collections.abc import Callable
from dataclasses import replace

from engine.batch import Runner
from engine.load import RunnerSettings, kv_layout
from engine.models.config import load_decoder_config
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import NgramDrafter
from engine.speculation.settings import Speculation
from engine.speculation.speculator import Speculator
from mesh.domain.errors import ConfigurationError
from mesh.model_files import read_model_facts

LoadRunner = Callable[[RunnerSettings], Runner]


def draft_block_bytes(speculation: Speculation, model: RunnerSettings) -> int:
    """Memory that each KV block of `model` takes in the draft model's cache. ConfigurationError if they do not fit."""
    settings = _draft_settings(speculation, model)
    return 0 if settings is None else kv_layout(load_decoder_config(settings.model_dir), settings).block_bytes


def load_speculator(
    speculation: Speculation, model: RunnerSettings, load: LoadRunner, *, max_batch_tokens: int
) -> Speculator | None:
    """None if nothing is guessed. `model`: of the large model, with the number of its blocks."""
    if speculation.kind == "none":
        return None
    settings = _draft_settings(speculation, model)
    drafter: Drafter = NgramDrafter()
    if settings is not None:
        max_model_len = load_decoder_config(settings.model_dir).max_model_len
        drafter = DraftModel(load(settings), max_model_len=max_model_len, max_batch_tokens=max_batch_tokens)
    return Speculator(drafter, speculation.max_drafts)


def _draft_settings(speculation: Speculation, model: RunnerSettings) -> RunnerSettings | None:
    """How the draft model is loaded beside `model`; None without one."""
    if speculation.draft_model is None:
        return None
    for model_dir in (model.model_dir, speculation.draft_model):
        load_decoder_config(model_dir)
    facts, own = read_model_facts(model.model_dir), read_model_facts(speculation.draft_model)
    for name in ("vocab_size", "tokenizer_fingerprint"):
        theirs, ours = getattr(own, name), getattr(facts, name)
        if theirs != ours:
            raise ConfigurationError(
                f"draft_model {speculation.draft_model} does not fit {model.model_dir}: {name} {theirs}, not {ours}"
            )
    if facts.eos_token_ids and not own.eos_token_ids:
        raise ConfigurationError(f"draft_model {speculation.draft_model} names no eos_token_id; {model.model_dir} does")
    return replace(model, model_dir=speculation.draft_model)
