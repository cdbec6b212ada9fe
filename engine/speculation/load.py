"""Builds a Speculator and its drafter from settings."""

from collections.abc import Callable
from dataclasses import replace

from checkpoint.model_files import read_model_facts
from checkpoint.rope_override import NO_ROPE_OVERRIDE
from engine.batch import Runner
from engine.load import RunnerSettings, kv_layout
from engine.models.config import load_decoder_config
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import NgramDrafter
from engine.speculation.settings import Speculation
from engine.speculation.speculator import Speculator
from mesh.domain.errors import ConfigurationError

LoadRunner = Callable[[RunnerSettings], Runner]


def draft_block_bytes(speculation: Speculation, model: RunnerSettings) -> int:
    """Bytes of a KV block in the draft model's cache; 0 without one. ConfigurationError if the models do not match."""
    settings = _draft_settings(speculation, model)
    return 0 if settings is None else kv_layout(load_decoder_config(settings.model_dir), settings).block_bytes


def load_speculator(
    speculation: Speculation, model: RunnerSettings, load: LoadRunner, *, max_batch_tokens: int
) -> Speculator | None:
    """Build the speculator; None if speculation is off. `model`: settings of the large model, with `num_blocks` set."""
    if speculation.kind == "none":
        return None
    settings = _draft_settings(speculation, model)
    drafter: Drafter = NgramDrafter()
    if settings is not None:
        max_model_len = load_decoder_config(settings.model_dir).max_model_len
        drafter = DraftModel(load(settings), max_model_len=max_model_len, max_batch_tokens=max_batch_tokens)
    return Speculator(drafter, speculation.max_drafts)


def _draft_settings(speculation: Speculation, model: RunnerSettings) -> RunnerSettings | None:
    """Settings of the draft model beside `model`; None without one. ConfigurationError if the models do not match."""
    if speculation.draft_model is None:
        return None
    for model_dir in (model.model_dir, speculation.draft_model):
        load_decoder_config(model_dir)
    facts, draft_facts = read_model_facts(model.model_dir), read_model_facts(speculation.draft_model)
    for name in ("vocab_size", "tokenizer_fingerprint"):
        actual, expected = getattr(draft_facts, name), getattr(facts, name)
        if actual != expected:
            raise ConfigurationError(
                f"draft_model {speculation.draft_model} does not fit {model.model_dir}: {name} {actual}, not {expected}"
            )
    if facts.eos_token_ids and not draft_facts.eos_token_ids:
        raise ConfigurationError(f"draft_model {speculation.draft_model} names no eos_token_id; {model.model_dir} does")
    # It is small: one rank computes it.
    return replace(model, model_dir=speculation.draft_model, rope=NO_ROPE_OVERRIDE, tensor_parallel=1)
