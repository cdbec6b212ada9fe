"""The quantisation of a checkpoint as config.json describes it: the format of each module's matrix. Needs no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from checkpoint.config_json import read_config, read_json
from checkpoint.multimodal import names_in_programs
from engine.kernels.cpu.machine import INT4_GROUPS
from mesh.domain.errors import ConfigurationError

Format = Literal["awq", "gptq", "packed", "plain", "mxfp4"]
RawConfig = Mapping[str, Any]
_COMPRESSED_FORMATS: Mapping[str, Format] = {
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "pack-quantized": "packed",
}


@dataclass(frozen=True, slots=True)
class MatrixStorage:
    """How a matrix is stored. Each scale is for `block_rows` outputs and `block_inputs` inputs; 0: for all of them.

    A matrix that is not symmetric has zeros, too. With `has_group_index` a tensor says which group an input belongs to.
    `int8_rows`: the matrix was made to be multiplied with activations in int8.
    """

    format: Format
    num_bits: int
    block_rows: int = 1
    block_inputs: int = 0
    is_float: bool = False
    is_symmetric: bool = True
    has_group_index: bool = False
    zeros_minus_one: bool = False
    int8_rows: bool = False

    @property
    def is_int8(self) -> bool:
        """True if the matrix is int8 with a scale for each output, as our encoding "int8" has it."""
        per_output = self.block_rows in (0, 1) and self.block_inputs == 0 and self.is_symmetric
        return per_output and (self.format, self.num_bits, self.is_float) == ("plain", 8, False)

    @property
    def int4_group(self) -> int | None:
        """Inputs that share a scale in int4 of the compiled decoder, as our encoding "int4" has it: as many as here, or
        fewer. None if the matrix is in another form.
        """
        if (self.num_bits, self.is_float) != (4, False) or self.block_rows > 1:
            return None
        return max((group for group in INT4_GROUPS if self.block_inputs % group == 0), default=None)


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that are stored alike: by name, by "re:" and a pattern of names, or "Linear" for all. Without a `storage`
    they are not quantised.
    """

    targets: tuple[str, ...]
    storage: MatrixStorage | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is quant_method of config.json, with the format if the method has several."""

    method: str
    groups: tuple[ModuleGroup, ...]
    ignored: tuple[str, ...] = ()

    def storage_of(self, module: str) -> MatrixStorage | None:
        """The storage of the matrix of a module, by its name in the file; None if it is not quantised. Names go before
        patterns, these before kinds of modules.
        """
        if any(_rank(target, module) for target in self.ignored):
            return None
        names = names_in_programs(module)
        targets = [(target, group.storage) for group in self.groups for target in group.targets]
        ranked = [(max(_rank(target, name) for name in names), storage) for target, storage in targets]
        best = max(ranked, key=lambda pair: pair[0], default=(0, None))
        return best[1] if best[0] else None

    @property
    def is_w8a8(self) -> bool:
        """True if all quantised matrices are int8 and expect activations in int8."""
        storages = [group.storage for group in self.groups if group.storage is not None]
        return bool(storages) and all(storage.is_int8 and storage.int8_rows for storage in storages)

    @property
    def is_mxfp4(self) -> bool:
        return self.method == "mxfp4"

    def __str__(self) -> str:
        bits = sorted({group.storage.num_bits for group in self.groups if group.storage is not None})
        return f"{self.method}, {' and '.join(map(str, bits))} bits"


def _rank(target: str, module: str) -> int:
    """How closely a target of compressed-tensors describes a module; 0: not at all."""
    if target.startswith("re:"):
        return 2 if re.match(target.removeprefix("re:"), module) else 0
    return 3 if target == module else 1 if target == "Linear" else 0


def read_quantization(model_dir: Path) -> Quantization | None:
    """The quantisation of the checkpoint in a folder; None if it has none. Raises ConfigurationError."""
    path = model_dir / "config.json"
    config = read_config(model_dir)
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        path = model_dir / "quantize_config.json"  # of AutoGPTQ
        raw = read_json(path, optional=True)
        if not raw:
            return None
        raw = {"quant_method": "gptq", **raw}
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigurationError(
            f"{path}: quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}: serve a checkpoint "
            "in one of these, or the original one"
        )
    try:
        return _METHODS[method](raw)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {method}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise ConfigurationError(f"{path}: the description of the quantisation is broken: {error!r}") from error


def _require(raw: RawConfig, name: str, *accepted: object, default: object = None) -> Any:
    value = raw.get(name, default)
    value = value.lower() if isinstance(value, str) else value
    if not any(value == each and type(value) is type(each) for each in accepted):  # 4.0 and True are no sizes
        listed = ", ".join(map(str, accepted))
        raise ConfigurationError(f"{name} {value!r} is not supported; supported: {listed}")
    return value


def _flag(raw: RawConfig, name: str, *, default: bool) -> bool:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be true or false, got {value!r:.100}")
    return value


def _object(raw: RawConfig, name: str) -> RawConfig:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be an object, got {value!r:.100}")
    return value


def _group_size(raw: RawConfig) -> int:
    """Inputs that share a scale; 0: all of them."""
    size = raw.get("group_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0):
        raise ConfigurationError(f"group_size must be > 0, or -1 for one group, got {size!r}")
    return size if size and size > 0 else 0


def _awq(raw: RawConfig) -> Quantization:
    # What is absent has the older name of llm-awq, or is what transformers and AutoAWQ take.
    raw = {"bits": raw.get("w_bit", 4), "group_size": raw.get("q_group_size", 128), **raw}
    layout = "format" if raw.get("version") is None else "version"  # transformers reads both, "version" first
    _require({layout: raw.get(layout) or "gemm"}, layout, "gemm")
    storage = MatrixStorage(
        "awq",
        _require(raw, "bits", 4),
        block_inputs=_group_size(raw),
        is_symmetric=not _flag(raw, "zero_point", default=True),
    )
    return Quantization("awq", (ModuleGroup(("Linear",), storage),))


def _gptq(raw: RawConfig) -> Quantization:
    version = "checkpoint_format" if raw.get("checkpoint_format") is not None else "format"  # GPTQModel's later name
    kind = _require(raw, version, "gptq", "gptq_v2", default="gptq")
    _require(raw, "pack_dtype", "int32", default="int32")
    if _flag(raw, "is_marlin_format", default=False):
        raise ConfigurationError("is_marlin_format is not supported: serve the checkpoint that it was made from")

    def storage(facts: RawConfig) -> MatrixStorage:
        return MatrixStorage(
            "gptq",
            _require(facts, "bits", 4, 8),
            block_inputs=_group_size(facts),
            is_symmetric=_flag(facts, "sym", default=False),
            has_group_index=_flag(facts, "desc_act", default=False),
            zeros_minus_one=kind == "gptq",
        )

    groups = [ModuleGroup(("Linear",), storage(raw))]
    # GPTQModel: patterns of modules, "-:" for those that are not quantised, the others with their own facts.
    dynamic = _object(raw, "dynamic") if raw.get("dynamic") else {}
    for pattern in dynamic:
        own = None if pattern.startswith("-:") else storage({**raw, **_object(dynamic, pattern)})
        targets = _targets([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], "dynamic")
        groups.append(ModuleGroup(targets, own))
    return Quantization(str(kind), tuple(groups))


def _fp8(raw: RawConfig) -> Quantization:
    rows, inputs = (0, 0) if raw.get("weight_block_size") is None else _block(raw, "weight_block_size")
    storage = MatrixStorage("plain", 8, block_rows=rows, block_inputs=inputs, is_float=True)
    return Quantization("fp8", (ModuleGroup(("Linear",), storage),))


def _fbgemm_fp8(raw: RawConfig) -> Quantization:
    return Quantization("fbgemm_fp8", (ModuleGroup(("Linear",), MatrixStorage("plain", 8, is_float=True)),))


def _mxfp4(raw: RawConfig) -> Quantization:
    storage = MatrixStorage("mxfp4", 4, block_inputs=32, is_float=True)
    return Quantization("mxfp4", (ModuleGroup((r"re:.*\.experts\.",), storage),))


def _compressed_tensors(raw: RawConfig) -> Quantization:
    if raw.get("transform_config"):
        raise ConfigurationError("transform_config is not supported: serve a checkpoint without transforms")
    _require(raw.get("sparsity_config") or {}, "format", "dense", default="dense")
    groups, formats = [], set()
    stated = _object(raw, "config_groups")
    for group in stated:
        facts = _object(stated, group)
        if facts.get("weights") is None:
            groups.append(ModuleGroup(_targets(facts.get("targets")), None))
            continue
        source = facts if facts.get("format") else raw
        formats.add(name := _require(source, "format", *_COMPRESSED_FORMATS))
        storage = replace(_weights(_object(facts, "weights"), name), int8_rows=_has_int8_inputs(facts))
        groups.append(ModuleGroup(_targets(facts.get("targets")), storage))
    method = f"compressed-tensors {' and '.join(sorted(formats))}"
    return Quantization(method, tuple(groups), _targets(raw.get("ignore") or [], "ignore"))


def _targets(targets: object, member: str = "targets") -> tuple[str, ...]:
    """Names of modules, and patterns of names. Raises ConfigurationError."""
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigurationError(f"{member} must be a list of strings, got {targets!r:.100}")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise ConfigurationError(f"{member}: {target!r:.100} is no regular expression: {error}") from error
    return tuple(targets)


def _weights(weights: RawConfig, name: str) -> MatrixStorage:
    """The storage that compressed-tensors' QuantizationArgs describe."""
    kind = _require(weights, "type", *_KINDS[name], default="int")
    num_bits = _require(weights, "num_bits", *((4, 8) if name == "pack-quantized" else (8,)), default=8)
    size = _group_size(weights)
    inferred = "group" if size else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = _require({"strategy": weights.get("strategy") or inferred}, "strategy", *_STRATEGIES)
    if strategy == "group" and not size:
        raise ConfigurationError("strategy 'group' needs a group_size > 0")
    rows, inputs = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}.get(strategy) or _block(
        weights, "block_structure"
    )
    order = weights.get("actorder")
    return MatrixStorage(
        _COMPRESSED_FORMATS[name],
        num_bits,
        rows,
        inputs,
        is_float=kind == "float",
        is_symmetric=_flag(weights, "symmetric", default=True),
        # Any other order was used while the matrix was rounded, and is not that of the file.
        has_group_index=order is True or str(order).lower() in ("group", "dynamic"),
    )


_STRATEGIES = ("tensor", "channel", "group", "block")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "int-quantized": ("int",),
    "pack-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}


def _block(raw: RawConfig, name: str) -> tuple[int, int]:
    """Rows and inputs that share a scale: a list, or a text such as 128x128."""
    value = raw.get(name)
    sizes = [int(size) for size in value.split("x") if size.isdecimal()] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigurationError(f"{name} must be two sizes above 0, rows and inputs, got {value!r:.100}")
    return sizes[0], sizes[1]


def _has_int8_inputs(group: RawConfig) -> bool:
    if group.get("input_activations") is None:
        return False
    activations = _object(group, "input_activations")
    return (activations.get("type", "int"), activations.get("num_bits", 8)) == ("int", 8)


_METHODS: Mapping[str, Callable[[RawConfig], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
}
