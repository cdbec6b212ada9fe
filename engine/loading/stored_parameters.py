"""The tensors and quantised modules that a checkpoint has for a model, and whether the compiled decoder can multiply
them without conversion. Reads headers only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from checkpoint.multimodal import possible_names
from checkpoint.tensors import StoredTensor, open_checkpoint
from engine.kernels.cpu.machine import IN_BF16, IN_FP32, STEP_GROUP, knows_vnni
from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.encoder_decoder.parameters import encoder_decoder_specs
from engine.models.encodings import OUTPUT, Forms, StoredMatrices
from engine.models.parameters import ParameterSpec, Source, Stack, parameter_specs
from engine.quantized_formats.config import read_quantization
from engine.quantized_formats.gguf_config import GGUF_GROUP
from engine.quantized_formats.modules import QuantizedModule, find_module, find_stacked, stores_quantized
from engine.quantized_formats.storage import Quantization
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError

_DTYPES = ("F64", "F32", "BF16", "F16")
_STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def stored_name(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """The name under which the checkpoint stores tensor `name`."""
    return next((other for other in possible_names(name) if other in stored), name)


_STACKED_SCALES = ("_scale_inv", "_scale", ".weight_scale_inv", ".weight_scale")
"""Suffixes of the names of scales, after the name of the tensor that stacks the matrices of experts."""


def specs_of(settings: RunnerSettings, config: AnyConfig) -> list[ParameterSpec]:
    """The model's parameters, whole. Reads the headers of an encoder-decoder's checkpoint."""
    if not isinstance(config, EncoderDecoderConfig):
        return parameter_specs(config)
    # config.json does not state reliably whether the output matrix is tied.
    own_lm_head = settings.load_format != "dummy" and "lm_head.weight" in open_checkpoint(settings.model_dir)
    return encoder_decoder_specs(config, own_lm_head=own_lm_head)


def open_stored(model_dir: Path, specs: Iterable[ParameterSpec]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name. Instead of those that stack experts it has the parts of each expert, under
    the names of their sources; so it has their scales. Raises ConfigurationError.
    """
    stored = dict(open_checkpoint(model_dir))
    members, stacks = dict[str, StoredTensor](), set[str]()
    for source in (source for spec in specs for source in spec.sources):
        if source.stack is None or stored_name(source.name, stored) in stored:
            continue
        name = stored_name(source.stack.name, stored)
        if name in stored:
            members[source.name] = _member(stored[name], name, source.stack, source.shape)
            stacks.add(name)
            for scales in (
                scales for end in _STACKED_SCALES if (scales := name.removesuffix(".weight") + end) in stored
            ):
                of_member = _member_scales(stored[scales], scales, source.stack, source.shape[0], stored[name].shape)
                members[f"{source.name.removesuffix('.weight')}.weight_scale"] = of_member
                stacks.add(scales)
    return {name: tensor for name, tensor in stored.items() if name not in stacks} | members


def _member(whole: StoredTensor, name: str, stack: Stack, shape: tuple[int, ...]) -> StoredTensor:
    members, rows, columns = stack.shape
    is_transposed = stack.may_be_transposed and whole.shape == (members, columns, rows)
    if whole.shape != stack.shape and not is_transposed:
        raise ConfigurationError(
            f"{whole.path}: tensor {name} has shape {list(whole.shape)}, config.json implies {list(stack.shape)}"
        )
    itemsize = whole.num_bytes // prod(whole.shape)
    first = stack.member * rows * columns + stack.first_row * (1 if is_transposed else columns)
    return replace(
        whole,
        shape=shape,
        offset=whole.offset + first * itemsize,
        num_bytes=prod(shape) * itemsize,
        whole=name,
        first=first,
        column_step=rows if is_transposed else 0,
    )


def _member_scales(
    whole: StoredTensor, name: str, stack: Stack, num_rows: int, matrices: tuple[int, ...]
) -> StoredTensor:
    """The scales of a member's `num_rows` rows: one, one for each row, or some for each block of rows. They are
    transposed if the stacked `matrices` of this shape are; scales of single rows may not be.
    """
    members, all_rows, _ = stack.shape
    own = (*whole.shape[1:], 1, 1)[:2]
    is_transposed = matrices != stack.shape and own[0] != all_rows
    rows, columns = own[::-1] if is_transposed else own
    first, count = (0, all_rows) if rows == 1 else (stack.first_row * rows, num_rows * rows)
    if first % all_rows or count % all_rows or whole.shape != (members, *own)[: len(whole.shape)]:
        raise ConfigurationError(
            f"{whole.path}: tensor {name} has shape {list(whole.shape)}, which is not that of scales of {members} "
            f"experts with rows {stack.first_row} to {stack.first_row + num_rows - 1} apart from others"
        )
    scales = Stack(name, (members, rows, columns), stack.member, first // all_rows, is_transposed)
    return _member(replace(whole, shape=(members, *own)), name, scales, (count // all_rows, columns))


def find_modules(
    specs: Iterable[ParameterSpec], stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> dict[str, QuantizedModule]:
    """The quantised modules that the model uses, by the names of their sources. Raises ConfigurationError, also if
    config.json promises quantised modules and the checkpoint has none.
    """
    modules: dict[str, QuantizedModule] = {}
    promised: str | None = None
    for spec, source in ((each, source) for each in specs for source in each.sources):
        if source.member is not None and len(source.shape) == 3:
            count, num_inputs, num_outputs = source.shape
            names: tuple[str, ...] = (source.name, source.name.partition(".")[2])
            found = (find_stacked(name, count, (num_outputs, num_inputs), stored, quantization) for name in names)
        elif len(source.shape) == 2 and source.name.endswith(".weight"):
            as_stored = stored_name(source.name, stored)
            if promised is None and as_stored in stored and quantization is not None:
                is_promised = quantization.storage_of(as_stored.removesuffix(".weight")) is not None
                promised = as_stored if is_promised else None
            rows, columns = source.shape[::-1] if source.transposed else source.shape
            names = possible_names(source.name.removesuffix(".weight"))
            found = (find_module(name, (rows, columns), stored, quantization) for name in names)
        else:
            continue
        if (module := next(filter(None, found), None)) is None:
            continue
        if module.storage.is_ternary:
            if not spec.is_matrix and not spec.name.startswith("layers."):
                continue  # a table of tokens, beside matrices that are rounded
            has_scaled_bias = module.storage.format == "autobitlinear" and f"{module.name}.bias" in stored
            _require_linear(spec, source, has_scaled_bias=has_scaled_bias)
        modules[source.name] = module
    if promised is not None and not modules and not stores_quantized(stored):
        raise ConfigurationError(
            f"{stored[promised].path.parent}: no matrix is quantised, though config.json says so ({quantization}): "
            "remove its quantization_config to serve the weights as they are, or take the quantised files"
        )
    return modules


def _require_linear(spec: ParameterSpec, source: Source, *, has_scaled_bias: bool) -> None:
    """Raise ConfigurationError for a ternary matrix that is not multiplied with rows rounded to int8, or that
    transformers would not make ternary. `has_scaled_bias`: transformers multiplies its bias by its scale, too.
    """
    where = f"{source.name} is ternary (quant_method bitnet), which is not supported for"
    if spec.name == OUTPUT:
        raise ConfigurationError(f"{where} output matrices: serve a checkpoint whose modules_to_not_convert names it")
    if has_scaled_bias:
        raise ConfigurationError(f"{where} modules with a bias in linear_class autobitlinear: serve the original model")
    if not spec.is_matrix or source.transposed or source.stack is not None or ".experts." in spec.name:
        raise ConfigurationError(f"{where} routers, experts, latents and transposed matrices: serve the original model")


def require_tensors(
    model_dir: Path,
    specs: list[ParameterSpec],
    stored: Mapping[str, StoredTensor],
    modules: Mapping[str, QuantizedModule],
) -> None:
    """Raise ConfigurationError for tensors that are missing or have another shape or dtype; find_module has checked
    those of quantised modules.
    """
    for source in (source for spec in specs for source in spec.sources if source.name not in modules):
        name = stored_name(source.name, stored)
        if name not in stored:
            files = sorted({tensor.path.name for tensor in stored.values()})
            raise ConfigurationError(
                f"{model_dir}: tensor {name} is missing: {', '.join(files) or 'some file'} must have it"
            )
        if stored[name].dtype not in _DTYPES:
            raise ConfigurationError(
                f"{stored[name].path}: tensor {name} has dtype {stored[name].dtype}, not one of {', '.join(_DTYPES)}: "
                "only matrices that quantization_config of config.json describes may be quantised"
            )
        if stored[name].shape != source.shape:
            raise ConfigurationError(
                f"{stored[name].path}: tensor {name} has shape {list(stored[name].shape)}, "
                f"config.json implies {list(source.shape)}"
            )


def is_exact(model_dir: Path, specs: list[ParameterSpec], dtype: str) -> bool:
    """True if a checkpoint stores its matrices in this dtype and they are used as they are, so that loading rounds
    nothing. Reads headers. Raises ConfigurationError.
    """
    stored = open_stored(model_dir, specs)
    matrices = [spec for spec in specs if len(spec.shape) > 1 and not spec.in_fp32]
    sources = {source.name for spec in matrices for source in spec.sources}
    if (quantization := read_quantization(model_dir)) is not None:
        modules = find_modules(specs, stored, quantization)
        if any(not module.is_mxfp4 for module in modules.values()):  # whatever dtype packed numbers are said to have
            return False
        sources -= modules.keys() if dtype == "bfloat16" else set()  # which holds any number of MXFP4
    names = {stored_name(name, stored) for name in sources}
    if any(name not in stored or stored[name].dtype != _STORED_NAMES[dtype] for name in names):
        return False
    return all((spec.offset, spec.unit_rows) == (0.0, False) for spec in matrices)


def stored_in_int4(model_dir: Path, specs: Sequence[ParameterSpec]) -> StoredMatrices | None:
    """See `int4_of`. Reads headers. Raises ConfigurationError."""
    return int4_of(specs, read_modules(model_dir, specs))


def read_modules(model_dir: Path, specs: Sequence[ParameterSpec]) -> Mapping[str, QuantizedModule]:
    """The quantised modules of a checkpoint. Reads headers. Raises ConfigurationError."""
    return find_modules(specs, open_stored(model_dir, specs), read_quantization(model_dir))


def stored_in_fp8(model_dir: Path, specs: list[ParameterSpec]) -> StoredMatrices | None:
    """See `fp8_of`. Reads headers. Raises ConfigurationError."""
    stored = open_stored(model_dir, specs)
    return fp8_of(specs, stored, find_modules(specs, stored, read_quantization(model_dir)))


def fp8_of(
    specs: Iterable[ParameterSpec], stored: Mapping[str, StoredTensor], modules: Mapping[str, QuantizedModule]
) -> StoredMatrices | None:
    """How to multiply the matrices of a checkpoint in fp8; None unless some matrices of layers are in fp8 as the
    compiled decoder multiplies them. Others keep their type, or are in fp32.
    """
    forms: dict[str, Forms] = {}
    for spec in specs:
        if spec.is_matrix and spec.is_held:
            rows = [(source.num_rows, _form(spec, source, stored, modules)) for source in spec.held_sources()]
            forms[spec.name] = tuple(rows)
    of_layers = {form for name, rows in forms.items() if name != OUTPUT for _, form in rows}
    return StoredMatrices(forms=forms) if of_layers - {IN_FP32, IN_BF16} else None


def _form(
    spec: ParameterSpec, source: Source, stored: Mapping[str, StoredTensor], modules: Mapping[str, QuantizedModule]
) -> int:
    """The form in which the outputs of a source are stored, one that holds all of their numbers exactly."""
    if spec.unit_rows or spec.offset or spec.factor != 1.0:
        return IN_FP32
    if (module := modules.get(source.name)) is not None:
        return module.fp8_group or IN_FP32
    tensor = stored.get(stored_name(source.name, stored))
    return IN_BF16 if tensor is not None and tensor.dtype == "BF16" else IN_FP32


def rounded_beside_int8(specs: Iterable[ParameterSpec], modules: Mapping[str, QuantizedModule]) -> frozenset[str]:
    """The matrices of layers that are rounded to int8 beside some that a checkpoint has in it."""
    in_int8 = {name for name, module in modules.items() if module.storage.is_int8}
    matrices = [spec for spec in specs if in_int8 and spec.is_matrix and spec.name != OUTPUT]
    return frozenset(spec.name for spec in matrices if not in_int8 >= {source.name for source in spec.sources})


def rounds_to_steps(specs: Sequence[ParameterSpec], modules: Mapping[str, QuantizedModule]) -> bool:
    """Whether matrices that are rounded to int4 get steps of int8: if the inputs of each are whole groups, none is in 4
    bits already, and the CPU multiplies bytes (VNNI). Without that, groups with scales take fewer instructions.
    """
    if not knows_vnni() or any(module.is_mxfp4 for module in modules.values()):
        return False
    are_whole = all(spec.shape[1] % STEP_GROUP == 0 for spec in specs if spec.is_matrix)
    return are_whole and int4_of(specs, modules) is None


def int4_of(specs: Iterable[ParameterSpec], modules: Mapping[str, QuantizedModule]) -> StoredMatrices | None:
    """How to multiply the matrices of a checkpoint in int4; None unless matrices of layers are in at most 4 bits as the
    compiled decoder multiplies them, and the others in 8 bits or more, or in blocks of GGUF with any number of bits.
    """
    matrices = [spec for spec in specs if spec.is_matrix and spec.name != OUTPUT]
    if any(spec.unit_rows or spec.offset for spec in matrices):
        return None
    groups: list[int | None] = []
    in_int8: set[str] = set()
    with_minima: set[str] = set()
    for spec in matrices:
        stored = [module for source in spec.sources if (module := modules.get(source.name)) is not None]
        in_int4 = [module.int4_group for module in stored if module.storage.is_for_int4]
        groups += in_int4
        if len(in_int4) < len(spec.sources):
            in_int8.add(spec.name)
        elif any(module.storage.has_minima for module in stored):
            with_minima.add(spec.name)
        if any(module.storage.is_gguf for module in stored):
            groups.append(GGUF_GROUP)
    known = [group for group in groups if group is not None]
    kept = StoredMatrices(min(known), frozenset(in_int8), frozenset(with_minima)) if known else None
    return kept if len(known) == len(groups) else None
