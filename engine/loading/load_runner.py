"""Loads a ModelRunner of one rank from its settings, and a Speculator beside it."""

from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from checkpoint.adapters import AdapterFiles
from checkpoint.model_facts import read_model_facts
from checkpoint.rope_override import NO_ROPE_OVERRIDE
from engine.adapter_slots import AdapterSlots
from engine.attention.views import block_parts
from engine.compiled_code import compile_helpers, reported_code
from engine.devices import find_device
from engine.kv.cache import KVCache
from engine.loading.activation_memory import step_bytes
from engine.loading.graphs import graph_bytes, load_graphs
from engine.loading.load_phases import load_phase
from engine.loading.memory_needs import enter_ledger, kv_blocks, weights_bytes
from engine.loading.resolve import freed_windows, kv_layout, resolve, why_eager
from engine.loading.runner_parts import assemble_runner, decoder_memory, load_packed, load_parameters
from engine.loading.stored_parameters import specs_of
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.models.adapters import adapter_shapes, load_adapter
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.decoder import Decoder
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encoder_decoder.model import EncoderDecoder
from engine.models.model_config import ModelConfig
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from engine.models.share import ALONE, rank_share
from engine.runner import Runner
from engine.runner_settings import RunnerSettings
from engine.settings import Speculation
from engine.speculation.drafters import Drafter, DraftModel, NgramDrafter
from engine.speculation.speculator import Speculator
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

log = structlog.get_logger(__name__)

_AnyModel = CompiledDecoder | Decoder | EncoderDecoder


def load_model_runner(settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
    """Load weights, allocate the KV cache, choose the attention backend. For one rank: see load_ranked_runner in
    `engine/ranks/launch.py`. Raises ConfigurationError.
    """
    if settings.degrees != ALONE:
        raise ConfigurationError(
            f"{settings.degrees} ranks are not supported here: set tensor_parallel and pipeline_parallel to 1"
        )
    settings, config = resolve(settings)
    device = torch.device(settings.device)
    layout = kv_layout(config, settings)
    captured_bytes = graph_bytes(settings, config, layout)
    later_bytes = captured_bytes + step_bytes(settings, config) + settings.companion_bytes
    memory_share = enter_ledger(settings, config, later_bytes)
    build = _load_model(settings, config, layout, on_progress)
    with load_phase("kv"), kv_blocks(layout, settings, memory_share) as num_blocks:
        cache = KVCache(
            layout,
            num_blocks,
            device,
            memory_share=memory_share,
            num_spare=1 if captured_bytes else 0,
            parts=block_parts(config, layout.windows) if isinstance(config, ModelConfig) else (),
        )
    with load_phase("build"), reported_code(settings, config, layout):
        model = build(cache)
        if model.borrows_cores:
            compile_helpers()
        adapters = _adapter_slots(settings, model)
        graphs = load_graphs(settings, model, cache) if isinstance(model, Decoder) else None
    return assemble_runner(settings, model, cache, adapters=adapters, graphs=graphs)


def _adapter_slots(settings: RunnerSettings, model: _AnyModel) -> AdapterSlots | None:
    """The first adapters are read here, others when they are needed."""
    if not settings.adapters:
        return None
    assert not isinstance(model, EncoderDecoder)
    specs = parameter_specs(model.config)

    def put(slot: int, adapter: AdapterFiles) -> None:
        model.put_adapter(slot, load_adapter(adapter, specs))

    return AdapterSlots(settings.adapters, settings.num_adapter_slots, put)


def _load_model(
    settings: RunnerSettings, config: AnyConfig, layout: KVLayout, on_progress: Progress | None
) -> Callable[[KVCache], _AnyModel]:
    """Load the weights. Returns the function that builds the model on its cache."""
    if isinstance(config, EncoderDecoderConfig):
        if settings.adapters:
            name = settings.adapters[0].name
            raise ConfigurationError(
                f"adapter {name}: encoder-decoder models have no adapters: merge it into its base model"
            )
        parameters = load_parameters(settings, config, specs_of(settings, config), on_progress)
        return lambda cache: EncoderDecoder(config, parameters, decoder_memory(settings, config, cache))
    reason = why_eager(settings, config, layout)
    # An adapter that does not fit is refused before the model is read.
    shapes = adapter_shapes(settings.adapters, parameter_specs(config))
    if reason is None:
        packed = load_packed(settings, config, rank_share(config), on_progress)
        return lambda cache: CompiledDecoder(
            config,
            packed,
            cache,
            adapter_shapes=shapes,
            num_adapter_slots=settings.num_adapter_slots,
            compile_all=settings.compile_all,
        )
    log.info("decoder not compiled", reason=reason)
    parameters = load_parameters(settings, config, parameter_specs(config), on_progress)
    return lambda cache: Decoder(config, parameters, decoder_memory(settings, config, cache), adapter_shapes=shapes)


def draft_block_bytes(speculation: Speculation, settings: RunnerSettings) -> int:
    """Bytes of a KV block in the draft model's cache; 0 without one. ConfigurationError if the models do not match."""
    draft = _draft_settings(speculation, settings)
    return 0 if draft is None else kv_layout(load_decoder_config(draft.model_dir), draft).block_bytes


def draft_bytes(speculation: Speculation, settings: RunnerSettings) -> int:
    """Memory of a GPU that the draft model takes for weights and graphs; 0 without a draft model, and on CPU, where
    free memory is shared with everything else anyway. Raises ConfigurationError.
    """
    draft = _draft_settings(speculation, settings)
    if draft is None or find_device(draft.device).type == "cpu":
        return 0
    draft, config = resolve(draft)
    captured_bytes = graph_bytes(draft, config, kv_layout(config, draft))
    return weights_bytes(draft, specs_of(draft, config), config) + captured_bytes


def load_speculator(
    speculation: Speculation,
    settings: RunnerSettings,
    load_draft: Callable[[RunnerSettings], Runner],
    *,
    max_batch_tokens: int,
) -> Speculator | None:
    """Build the speculator; None if speculation is off.

    `settings`: those of the large model, with `num_blocks` set. `load_draft` loads the draft model, if there is one.
    """
    if speculation.kind == "none":
        return None
    draft = _draft_settings(speculation, settings)
    drafter: Drafter = NgramDrafter()
    if draft is not None:
        config = load_decoder_config(settings.model_dir)
        drafter = DraftModel(
            load_draft(draft),
            max_model_len=load_decoder_config(draft.model_dir).max_model_len,
            max_batch_tokens=max_batch_tokens,
            windows=freed_windows(config, settings),
            state_blocks=kv_layout(config, settings).state_blocks,
        )
    return Speculator(drafter, speculation.max_drafts)


def _draft_settings(speculation: Speculation, settings: RunnerSettings) -> RunnerSettings | None:
    """Settings of the draft model beside that of `settings`; None without one. ConfigurationError if the two differ in
    what they must share.
    """
    model_dir = settings.model_dir
    config = load_config(model_dir)
    if speculation.draft_model is None:
        return None
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(
            f"draft_model {speculation.draft_model} does not fit {config.architecture}: draft models are for "
            "decoder-only models; leave it out (speculative=ngram fits)"
        )
    if load_decoder_config(speculation.draft_model).recurrent is not None:
        raise ConfigurationError(
            f"draft_model {speculation.draft_model} cannot draft: its recurrent states cannot go back behind a wrong "
            "draft; choose another"
        )
    facts, draft_facts = read_model_facts(model_dir), read_model_facts(speculation.draft_model)
    for name in ("vocab_size", "tokenizer_fingerprint"):
        actual, expected = getattr(draft_facts, name), getattr(facts, name)
        if actual != expected:
            raise ConfigurationError(
                f"draft_model {speculation.draft_model} does not fit {model_dir}: {name} {actual}, not {expected}"
            )
    if facts.eos_token_ids and not draft_facts.eos_token_ids:
        raise ConfigurationError(f"draft_model {speculation.draft_model} names no eos_token_id; {model_dir} does")
    # It is small: one rank computes it.
    return replace(
        settings,
        model_dir=speculation.draft_model,
        rope=NO_ROPE_OVERRIDE,
        adapters=(),
        graphs=replace(settings.graphs, max_drafts=0),
        companion_bytes=0,
        keep_all_kv=True,
        tensor_parallel=1,
        pipeline_parallel=1,
    )
