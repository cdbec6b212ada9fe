"""Loads a ModelRunner of one rank from its settings, and a Speculator beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
from engine.loading.resolve import config_of, kv_layout, require_mtp, resolve, why_eager
from engine.loading.runner_parts import assemble_runner, decoder_memory, load_packed, load_parameters
from engine.loading.stored_parameters import specs_of
from engine.loading.weights import Progress
from engine.model import Model
from engine.model_runner import ModelRunner
from engine.models.adapters import adapter_shapes, load_adapter
from engine.models.compiled_decoder import CompiledDecoder
from engine.models.decoder import Decoder
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encoder_decoder.model import EncoderDecoder
from engine.models.model_config import ModelConfig
from engine.models.mtp import MtpInput, input_specs, own_specs
from engine.models.norms import Norm
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from engine.models.share import ALONE, rank_share
from engine.runner import Runner
from engine.runner_settings import RunnerSettings
from engine.settings import NO_GRAPHS, Speculation
from engine.speculation.drafters import Drafter, DraftModel, NgramDrafter
from engine.speculation.mtp import MtpDrafter
from engine.speculation.speculator import Speculator
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

log = structlog.get_logger(__name__)

_AnyModel = CompiledDecoder | Decoder | EncoderDecoder


def load_model_runner(
    settings: RunnerSettings, on_progress: Progress | None = None, large: Model | None = None
) -> ModelRunner:
    """Load weights, allocate the KV cache, choose the attention backend. For one rank: see load_ranked_runner in
    `engine/ranks/launch.py`. A layer of multi-token prediction shares weights with the `large` model that has it.
    Raises ConfigurationError.
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
    build = _load_model(settings, config, layout, on_progress, large)
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
    runner = assemble_runner(settings, model, cache, adapters=adapters, graphs=graphs)
    if settings.is_mtp:
        runner.result_norm = load_result_norm(settings)
    return runner


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
    settings: RunnerSettings,
    config: AnyConfig,
    layout: KVLayout,
    on_progress: Progress | None,
    large: Model | None,
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
    reason, mtp_input = why_eager(settings, config, layout), _load_mtp_input(settings)
    # An adapter that does not fit is refused before the model is read.
    shapes = adapter_shapes(settings.adapters, parameter_specs(config))
    if reason is None:
        tables = large.tables(getattr(torch, settings.dtype)) if isinstance(large, CompiledDecoder) else None
        packed = load_packed(settings, config, rank_share(config), on_progress, tables)
        return lambda cache: CompiledDecoder(
            config,
            packed,
            cache,
            adapter_shapes=shapes,
            num_adapter_slots=settings.num_adapter_slots,
            compile_all=settings.compile_all,
            mtp_input=mtp_input,
        )
    log.info("decoder not compiled", reason=reason)
    shared = large if isinstance(large, Decoder) else None
    specs = parameter_specs(config) if shared is None else own_specs(config)
    parameters = load_parameters(settings, config, specs, on_progress)
    return lambda cache: Decoder(
        config,
        parameters,
        decoder_memory(settings, config, cache),
        adapter_shapes=shapes,
        mtp_input=mtp_input,
        shared=shared,
    )


def _load_mtp_input(settings: RunnerSettings) -> MtpInput | None:
    """The input of the layer; None for other models."""
    if not settings.is_mtp:
        return None
    config = load_config(settings.model_dir, settings.rope)
    assert isinstance(config, ModelConfig)
    return MtpInput.take(load_parameters(settings, config, input_specs(config)), config)


def load_result_norm(settings: RunnerSettings) -> Norm:
    """The final norm of a decoder, in fp32."""
    resolved, config = resolve(settings)
    assert isinstance(config, ModelConfig)
    specs = [replace(spec, in_fp32=True) for spec in parameter_specs(config) if spec.name == "final_norm"]
    # As a part of the checkpoint: nothing is said of tensors that are not used.
    parameters = load_parameters(replace(resolved, is_mtp=True), config, specs)
    return Norm(parameters.take("final_norm"), None, config.norm_eps)


def draft_block_bytes(speculation: Speculation, settings: RunnerSettings) -> int:
    """Bytes of a KV block in the drafter's cache; 0 if it has none. ConfigurationError if the models do not match."""
    draft = draft_settings(speculation, settings)
    return 0 if draft is None else kv_layout(config_of(draft), draft).block_bytes


def draft_bytes(speculation: Speculation, settings: RunnerSettings) -> int:
    """Memory of a GPU that the drafter takes for weights and graphs; 0 without a model, and on CPU, where free memory
    is shared with everything else anyway. Raises ConfigurationError.
    """
    draft = draft_settings(speculation, settings)
    if draft is None or find_device(draft.device).type == "cpu":
        return 0
    resolved, config = resolve(draft)
    return draft_weights_bytes(draft) + graph_bytes(resolved, config, kv_layout(config, resolved))


def draft_weights_bytes(draft: RunnerSettings) -> int:
    """Memory of the weights that a drafter has for itself; see `draft_settings`. Raises ConfigurationError."""
    draft, config = resolve(draft)
    if draft.is_mtp and isinstance(config, ModelConfig):
        whole = load_config(draft.model_dir, draft.rope)
        assert isinstance(whole, ModelConfig)
        return weights_bytes(draft, [*own_specs(config), *input_specs(whole)], config)
    return weights_bytes(draft, specs_of(draft, config), config)


def load_speculator(
    speculation: Speculation,
    settings: RunnerSettings,
    runner: Runner,
    load_draft: Callable[[RunnerSettings], Runner],
    *,
    max_batch_tokens: int,
) -> Speculator | None:
    """Build the speculator; None if speculation is off.

    `settings`, `runner`: those of the large model, with `num_blocks` set. `load_draft` loads what drafts, if that is a
    model.
    """
    if speculation.kind == "none":
        return None
    draft = draft_settings(speculation, settings)
    drafter: Drafter = NgramDrafter()
    if draft is not None:
        layout = kv_layout(load_decoder_config(settings.model_dir), settings)
        limits = {"max_model_len": config_of(draft).max_model_len, "max_batch_tokens": max_batch_tokens}
        if draft.is_mtp:
            if not isinstance(runner, ModelRunner):
                raise ConfigurationError(
                    "speculative=mtp needs the model's hidden states: this worker only paces steps"
                )
            runner.result_norm = load_result_norm(settings)
            drafter = MtpDrafter(load_model_runner(draft, large=runner.model), layout, **limits)
        else:
            drafter = DraftModel(load_draft(draft), layout, **limits)
    return Speculator(drafter, speculation.max_drafts)


def draft_settings(speculation: Speculation, settings: RunnerSettings) -> RunnerSettings | None:
    """Settings of the model that drafts beside that of `settings`; None without one. ConfigurationError if the two
    differ in what they must share.
    """
    if speculation.kind == "mtp":
        require_mtp(settings)
        draft = replace(settings, is_mtp=True, graphs=NO_GRAPHS)
    elif speculation.draft_model is not None:
        _require_fitting(speculation.draft_model, settings)
        graphs = replace(settings.graphs, max_drafts=0)
        draft = replace(settings, model_dir=speculation.draft_model, rope=NO_ROPE_OVERRIDE, graphs=graphs)
    else:
        return None
    # It is small: one rank computes it.
    return replace(draft, adapters=(), companion_bytes=0, keep_all_kv=True, tensor_parallel=1, pipeline_parallel=1)


def _require_fitting(draft_model: Path, settings: RunnerSettings) -> None:
    """Raise ConfigurationError for a draft model that cannot draft for that of `settings`."""
    model_dir = settings.model_dir
    config = load_config(model_dir)
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(
            f"draft_model {draft_model} does not fit {config.architecture}: draft models are for decoder-only models; "
            "leave it out (speculative=ngram fits)"
        )
    if load_decoder_config(draft_model).recurrent is not None:
        raise ConfigurationError(
            f"draft_model {draft_model} cannot draft: its recurrent states cannot go back behind a wrong draft; choose "
            "another"
        )
    facts, draft_facts = read_model_facts(model_dir), read_model_facts(draft_model)
    for name in ("vocab_size", "tokenizer_fingerprint"):
        actual, expected = getattr(draft_facts, name), getattr(facts, name)
        if actual != expected:
            raise ConfigurationError(
                f"draft_model {draft_model} does not fit {model_dir}: {name} {actual}, not {expected}"
            )
    if facts.eos_token_ids and not draft_facts.eos_token_ids:
        raise ConfigurationError(f"draft_model {draft_model} names no eos_token_id; {model_dir} does")
