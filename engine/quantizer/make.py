"""Makes a quantised checkpoint in one pass through the model.

Three streams of prompts go through each layer before the next is read: calibration prompts through the quantised
layers, which gives each matrix the inputs that it will have; and the held-out prompts through both, for the report. In
memory are the residuals of all prompts, and one after the other: the embedding in fp32; each layer in fp32, its
quantised matrices and statistics, beside a file of the result; and the output matrix in fp32.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoint.config_json import read_json
from checkpoint.files import copy_other_files
from checkpoint.multimodal import other_part
from checkpoint.new_folder import new_folder
from engine.finite import is_finite
from engine.loading.mapped_files import read_stored
from engine.loading.weights import WeightsTarget, load_weights
from engine.memory import return_freed_memory
from engine.models.decoder import Embedding, Output
from engine.models.encodings import OUTPUT
from engine.models.mtp import mtp_tensors
from engine.models.parameters import ParameterSpec, Source, tied_names
from engine.models.per_layer import LayerInputs
from engine.models.recurrent.parameters import UNQUANTIZED
from engine.models.rope import ropes_of
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantizer.compressed import describe, stored_tensors
from engine.quantizer.float_checkpoint import STORED_DTYPES, FloatCheckpoint, names_of
from engine.quantizer.grids import RoundRows
from engine.quantizer.layer import FloatLayer, FloatLinear, KeptKV, Observe, PackedPrompts, pack_prompts
from engine.quantizer.quality import Quality, QualityMeter
from engine.quantizer.rare_experts import find_rare, settle_rare
from engine.quantizer.schemes import Factors, Scheme
from engine.quantizer.shards import ShardWriter
from engine.quantizer.smoothing import fold, folding_order, require_norms, tie
from engine.quantizer.statistics import InputStatistics
from mesh.domain.errors import ConfigurationError

_GROUP_SIZES = (128, 64, 32, 16)
_TARGET = WeightsTarget(torch.device("cpu"), torch.float32)
_PLACES_AT_ONCE = 128
"""Places whose logits are in memory."""

Progress = Callable[[int], None]
"""Receives the number of finished layers."""
TokenIds = Sequence[int]
_Stored = dict[str, Tensor]
"""The tensors of a matrix, by the last part of their names."""


def require_fit(checkpoint: FloatCheckpoint, scheme: Scheme) -> None:
    """Raise ConfigurationError if the scheme cannot fold factors into the model's norms, or if its groups do not divide
    a matrix.
    """
    if scheme.factors is not None:
        require_norms(checkpoint.config)
    quantized = [spec for spec in checkpoint.specs if _is_quantized(spec)]
    group_size, divisor = scheme.weights.block_inputs, gcd(*(spec.shape[1] for spec in quantized))
    for spec in quantized:
        if group_size and spec.shape[1] % group_size:
            name = names_of(spec, checkpoint.stored)[0].removesuffix(".weight")
            fitting = " or ".join(str(size) for size in _GROUP_SIZES if divisor % size == 0)
            raise ConfigurationError(
                f"groups of {group_size} do not divide the {spec.shape[1]} inputs of {name}: choose another "
                f"--group-size, such as {fitting or divisor}, which divides the inputs of all matrices"
            )


def _is_quantized(spec: ParameterSpec) -> bool:
    return spec.is_matrix and spec.name.startswith("layers.")


@dataclass(frozen=True, slots=True)
class Quantized:
    """The facts of a checkpoint that was made: `num_bytes` of its weights, and the number of experts of all layers
    that the calibration prompts hardly reached (engine/quantizer/rare_experts.py).
    """

    quality: Quality
    num_bytes: int
    num_rare_experts: int


def quantize_checkpoint(
    checkpoint: FloatCheckpoint,
    out: Path,
    scheme: Scheme,
    calibration: Sequence[TokenIds],
    held_out: Sequence[TokenIds],
    on_progress: Progress,
) -> Quantized:
    """Write the quantised checkpoint to `out`, which appears when it is complete. Raises ConfigurationError."""
    with new_folder(out) as unfinished, torch.inference_mode():
        _require_room(unfinished, out, expected_bytes(checkpoint, scheme))
        copy_other_files(checkpoint.folder, unfinished)
        raw = read_json(checkpoint.folder / "config.json")
        raw["quantization_config"] = describe(scheme.weights, scheme.activations, _kept_modules(checkpoint))
        (unfinished / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        writer = ShardWriter(unfinished)
        maker = _Maker(checkpoint, scheme, writer, calibration, held_out)
        for index in range(checkpoint.config.num_layers):
            checkpoint.files.require_unchanged()
            maker.make_layer(index)
            on_progress(index + 1)
        _copy_rest(checkpoint, writer, maker.replaced)
        writer.flush()  # the output matrix takes this memory
        quality = maker.quality()
        writer.finish()
        checkpoint.files.require_unchanged()
    return Quantized(quality, writer.num_bytes, maker.num_rare_experts)


def expected_bytes(checkpoint: FloatCheckpoint, scheme: Scheme) -> int:
    """The size of the result's weights, without scales of outputs."""
    quantized = [spec for spec in checkpoint.specs if _is_quantized(spec)]
    names = {name for spec in quantized for name in names_of(spec, checkpoint.stored)}
    names |= {f"{name}_{part}" for name in names for part in ("blocks", "scales")}
    others = sum(tensor.num_bytes for name, tensor in checkpoint.stored.items() if name not in names)
    group_size = scheme.weights.block_inputs
    number_bytes = scheme.weights.num_bits / 8 + (scheme.scales_dtype.itemsize / group_size if group_size else 0)
    return others + int(sum(prod(spec.shape) for spec in quantized) * number_bytes)


def _require_room(folder: Path, out: Path, num_bytes: int) -> None:
    """Raise ConfigurationError, before hours of work, if the disk has too little room."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigurationError(
            f"{out} takes about {num_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free there: make room, or "
            "write elsewhere"
        )


def _kept_modules(checkpoint: FloatCheckpoint) -> list[str]:
    """Modules that are matrices to other readers and are not quantised: the output matrix, routers of experts, what
    attention projects from latents, a layer of multi-token prediction, and all of a multimodal model that is not its
    text part.
    """
    # transformers' module of the output matrix is lm_head, whatever the tensor's name.
    kept = [checkpoint.config.tensors.lm_head, "lm_head"]
    for spec in checkpoint.specs:
        is_kept = spec.name.endswith((".router", ".shared_gate", ".key_up", ".value_up"))
        is_kept = is_kept or (spec.is_matrix and not _is_quantized(spec))
        names = zip(spec.sources, names_of(spec, checkpoint.stored), strict=True)
        kept += [name.removesuffix(".weight") for source, name in names if is_kept or source.name.endswith(UNQUANTIZED)]
    kept += [name.removesuffix(".weight") for name in sorted(mtp_tensors(checkpoint.config, checkpoint.stored))]
    kept += [f"re:.*{part}.*" for name in sorted(checkpoint.stored) if (part := other_part(name)) is not None]
    return list(dict.fromkeys(kept))


@dataclass(slots=True)
class _Prompts:
    """Prompts on their way through a model: the residual [tokens, hidden_size] before the next layer, KV that later
    layers read, and the residual before the first layer if all layers read it.
    """

    pack: PackedPrompts
    residual: Tensor
    kept: KeptKV
    embedded: Tensor | None


class _Maker:
    """The pass through the model: layers in order, then `quality`. `replaced`: tensors of the checkpoint that the
    result has in another form. `num_rare_experts`: of the layers that are done.
    """

    def __init__(
        self,
        checkpoint: FloatCheckpoint,
        scheme: Scheme,
        writer: ShardWriter,
        calibration: Sequence[TokenIds],
        held_out: Sequence[TokenIds],
    ) -> None:
        config = checkpoint.config
        self.replaced: set[str] = set()
        self.num_rare_experts = 0
        self._checkpoint, self._scheme, self._writer = checkpoint, scheme, writer
        self._parameters = load_weights(checkpoint.folder, checkpoint.specs, _TARGET, tied=tied_names(config))
        embedding = Embedding(self._parameters, config)
        self._ropes = ropes_of(config, _TARGET.device, _TARGET.dtype)
        has_inputs = config.per_layer is not None and config.per_layer.input_width
        self._layer_inputs = LayerInputs(self._parameters, config) if has_inputs else None
        self._num_held_out = len(held_out)
        judging, calibrating = list(pack_prompts(held_out)), list(pack_prompts(calibration))
        # Through the original, and the result.
        self._base, self._judged = self._stream(judging, embedding), self._stream(judging, embedding)
        self._calibrating = self._stream(calibrating if scheme.needs != "nothing" else [], embedding)

    def _stream(self, packs: list[PackedPrompts], embedding: Embedding) -> list["_Prompts"]:
        embedded = [embedding(pack.token_ids, pack.positions) for pack in packs]
        read_later = embedded if self._layer_inputs is not None else [None] * len(packs)
        return [_Prompts(pack, rows, {}, later) for pack, rows, later in zip(packs, embedded, read_later, strict=True)]

    def make_layer(self, index: int) -> None:
        """Quantise and write a layer, and take all prompts through it."""
        layer = FloatLayer(self._parameters, index, self._checkpoint.config, self._checkpoint.product_factors)
        self._take_through(layer, self._base)
        matrices = self._quantize(layer)
        self._write(layer, matrices)
        rounding = self._scheme.round_rows
        self._take_through(layer, self._judged, rounding)
        self._take_through(layer, self._calibrating, rounding)

    def _take_through(self, layer: FloatLayer, stream: list["_Prompts"], rounding: RoundRows | None = None) -> None:
        for prompts in stream:
            prompts.residual = self._forward(layer, prompts, round_rows=rounding)
        if not all(is_finite(prompts.residual) for prompts in stream):
            raise ConfigurationError(
                f"layer {layer.index}: activations of the prompts are NaN or infinite: check that the original model "
                "answers them, or use other prompts"
            )

    def _forward(
        self,
        layer: FloatLayer,
        prompts: "_Prompts",
        observe: Observe | None = None,
        round_rows: RoundRows | None = None,
    ) -> Tensor:
        pack, inputs = prompts.pack, None
        if self._layer_inputs is not None and prompts.embedded is not None:
            inputs = self._layer_inputs(pack.token_ids, prompts.embedded)[layer.index]
        return layer.forward(prompts.residual, pack, self._ropes, prompts.kept, inputs, observe, round_rows)

    def quality(self) -> Quality:
        """Compare both models' logits of the held-out prompts."""
        output, meter = self._output(), QualityMeter()
        for base, judged in zip(self._base, self._judged, strict=True):
            pack, residuals = base.pack, (base.residual, judged.residual)
            has_next = (pack.prompts[1:] == pack.prompts[:-1]).nonzero()[:, 0]
            for places in torch.split(has_next, _PLACES_AT_ONCE):
                meter.add(pack.token_ids[places + 1], *(output(residual[places]) for residual in residuals))
        return meter.quality(self._num_held_out)

    def _output(self) -> Output:
        """Reads the output matrix, also if it is the embedding, which the layers did without. It is not packed, which
        would take as much memory again.
        """
        return_freed_memory()  # of layers
        checkpoint, embedding = self._checkpoint, torch.empty(0)
        if checkpoint.config.tied:
            specs = [spec for spec in checkpoint.specs if spec.name == "embed"]
            of_files = {tensor.whole or name for name, tensor in checkpoint.stored.items()}
            embedding = load_weights(checkpoint.folder, specs, _TARGET, used_elsewhere=of_files).take("embed")
        return Output(self._parameters, checkpoint.config, embedding, lambda matrix: FloatLinear(OUTPUT, matrix, 1.0))

    def _quantize(self, layer: FloatLayer) -> dict[str, QuantizedMatrix]:
        """Round the matrices of a layer, after folding factors into it."""
        statistics = self._observe(layer)
        rare = find_rare(statistics) if self._calibrating else set()
        self.num_rare_experts += len(rare)
        if self._scheme.factors is not None:
            self._fold(layer, statistics, self._scheme.factors, rare)
        settle_rare(statistics, rare)
        rounded: dict[str, QuantizedMatrix] = {}
        for name, linear in layer.linears.items():
            try:
                rounded[name] = self._scheme.round(linear.weight, statistics[name])
            except ConfigurationError as error:
                raise ConfigurationError(f"layer {layer.index}, {name}: {error}") from error
        return rounded

    def _fold(
        self, layer: FloatLayer, statistics: Mapping[str, InputStatistics], find: Factors, rare: Set[str]
    ) -> None:
        """Fold factors into a layer, and divide the statistics by them. The inner channels of rare experts get none."""
        vectors = [spec for spec in self._checkpoint.layer_specs(layer.index) if not spec.is_matrix]
        dtypes = {spec.name.rpartition(".")[2]: self._checkpoint.dtype_of(spec) for spec in vectors}
        without_factors = {f"{expert}.down" for expert in rare}
        for names in folding_order(layer):
            if names[0] in without_factors:
                continue
            weights, seen = [layer.linears[name].weight for name in names], [statistics[name] for name in names]
            folded = fold(layer, names, find(weights, seen, partial(tie, layer, names[0])), dtypes)
            for one in seen:
                one.divide(folded)

    def _observe(self, layer: FloatLayer) -> dict[str, InputStatistics]:
        needs_gram = self._scheme.needs == "gram"
        statistics = {
            name: InputStatistics(linear.weight.shape[1], needs_gram=needs_gram)
            for name, linear in layer.linears.items()
        }
        for prompts in self._calibrating:
            self._forward(layer, prompts, lambda name, x: statistics[name].add(x))
        return statistics

    def _write(self, layer: FloatLayer, matrices: Mapping[str, QuantizedMatrix]) -> None:
        """Write a layer, and give it the numbers that readers of the file will have."""
        stacks: dict[str, list[_Stored]] = {}
        for spec in self._checkpoint.layer_specs(layer.index):
            name = spec.name.removeprefix(f"layers.{layer.index}.")
            if spec.is_matrix:
                linear = layer.linears[name]
                linear.weight = self._write_matrix(spec, linear.weight, matrices[name], stacks)
            elif name in layer.changed:
                vector = layer.changed[name]
                for _, tensor, rows in self._replace(spec):
                    vector[rows] = self._write_float(tensor, vector[rows])
        for tensor, members in stacks.items():
            for kind in members[0].keys() - {"weight_shape"}:
                self._writer.add(f"{tensor}.{kind}", torch.stack([parts[kind] for parts in members]))

    def _write_matrix(
        self, spec: ParameterSpec, numbers: Tensor, matrix: QuantizedMatrix, stacks: dict[str, list[_Stored]]
    ) -> Tensor:
        """Write the tensors that a matrix was read from. Returns it as it will be read. Experts that the file has in
        one tensor are not written here: `stacks` gets their parts, by the tensor's name.
        """
        as_read = matrix.dequantized()
        for source, tensor, rows in self._replace(spec):
            if source.name.endswith(UNQUANTIZED):
                as_read[rows] = self._write_float(tensor, numbers[rows])
                continue
            parts = stored_tensors(matrix.select(rows), self._scheme.weights, self._scheme.scales_dtype)
            if source.member is not None:
                stacks.setdefault(tensor, []).append(parts)
                continue
            for kind, values in parts.items():
                part = f"{tensor.removesuffix('.weight')}.{kind}"
                if part not in self._writer.names:  # keys may be values, too
                    self._writer.add(part, values)
        return as_read

    def _write_float(self, tensor: str, numbers: Tensor) -> Tensor:
        """Write numbers in the type that the tensor has in the checkpoint. Returns them as they will be read."""
        values = numbers.to(STORED_DTYPES[self._checkpoint.stored[tensor].dtype])
        self._writer.add(tensor, values)
        return values.float()

    def _replace(self, spec: ParameterSpec) -> Iterator[tuple[Source, str, Tensor]]:
        """The sources of a parameter, the names of their tensors, and their rows in it in the order of the file. The
        result has these tensors in another form.
        """
        stored, first = self._checkpoint.stored, 0
        for source, tensor in zip(spec.sources, names_of(spec, stored), strict=True):
            self.replaced |= {tensor, f"{tensor}_blocks", f"{tensor}_scales"} & stored.keys()
            yield source, tensor, first + _file_order(source)
            first += source.num_rows


def _file_order(source: Source) -> Tensor:
    """The rows of `source` in its parameter, in the order of the file. A row that is repeated counts once."""
    if source.rows is None:
        return torch.arange(source.num_rows)
    return torch.from_numpy(np.unique(source.rows, return_index=True)[1])


def _copy_rest(checkpoint: FloatCheckpoint, writer: ShardWriter, replaced: Set[str]) -> None:
    """Copy the tensors that are not replaced, also those that are no part of the model."""
    for name in sorted(checkpoint.stored.keys() - replaced):
        writer.add(name, read_stored(checkpoint.stored[name].path, name))
