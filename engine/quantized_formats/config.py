"""The quantisation of a checkpoint as config.json describes it: the format of each module's matrix. Needs no torch."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from checkpoint.config_json import read_config, read_json
from engine.quantized_formats.auto_round_config import auto_round
from engine.quantized_formats.bitnet_config import bitnet
from engine.quantized_formats.compressed_tensors_config import compressed_tensors
from engine.quantized_formats.gguf_config import GGUF, gguf
from engine.quantized_formats.hqq_config import hqq
from engine.quantized_formats.members import RawConfig, block_sizes, flag, group_size, member, require, target_names
from engine.quantized_formats.modelopt_config import modelopt
from engine.quantized_formats.quark_config import quark
from engine.quantized_formats.storage import MatrixStorage, ModuleGroup, Quantization
from engine.quantized_formats.torchao_config import torchao
from engine.quantized_formats.unread import METHODS as UNREAD
from mesh.domain.errors import ConfigurationError


def read_quantization(model_dir: Path) -> Quantization | None:
    """The quantisation of the checkpoint in a folder; None if it has none. Raises ConfigurationError."""
    path = model_dir / "config.json"
    config = read_config(model_dir)
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        path, raw = _read_own_file(model_dir)
        if not raw:
            return None
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if isinstance(method, str) and method in UNREAD:
        raise ConfigurationError(f"{path}: quant_method {method} is not supported: {UNREAD[method]}")
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigurationError(
            f"{path}: quant_method {method!r:.100} is not supported; supported: {', '.join(_METHODS)}: serve a "
            "checkpoint in one of these, or the original one"
        )
    try:
        return _METHODS[method](raw)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {method}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise ConfigurationError(f"{path}: the description of the quantisation is broken: {error!r:.200}") from error


def _read_own_file(model_dir: Path) -> tuple[Path, RawConfig]:
    """The description of a quantisation that is not in config.json, and its file; empty if there is none."""
    path = model_dir / "hf_quant_config.json"
    if raw := read_json(path, optional=True):
        return path, {**raw, "quant_method": "modelopt"}
    path = model_dir / "quantize_config.json"  # of AutoGPTQ
    raw = read_json(path, optional=True)
    return path, {"quant_method": "gptq", **raw} if raw else {}


def _awq(raw: RawConfig) -> Quantization:
    # What is absent has the older name of llm-awq, or is what transformers and AutoAWQ take.
    raw = {"bits": raw.get("w_bit", 4), "group_size": raw.get("q_group_size", 128), **raw}
    layout = "format" if raw.get("version") is None else "version"  # transformers reads both, "version" first
    require({layout: raw.get(layout) or "gemm"}, layout, "gemm")
    storage = MatrixStorage(
        "awq",
        require(raw, "bits", 4),
        block_inputs=group_size(raw),
        is_symmetric=not flag(raw, "zero_point", default=True),
    )
    return Quantization("awq", (ModuleGroup(("Linear",), storage),))


def _gptq(raw: RawConfig) -> Quantization:
    version = "checkpoint_format" if raw.get("checkpoint_format") is not None else "format"  # GPTQModel's later name
    kind = require(raw, version, "gptq", "gptq_v2", default="gptq")
    require(raw, "pack_dtype", "int32", default="int32")
    if flag(raw, "is_marlin_format", default=False):
        raise ConfigurationError("is_marlin_format is not supported: serve the checkpoint that it was made from")

    def storage(facts: RawConfig) -> MatrixStorage:
        return MatrixStorage(
            "gptq",
            require(facts, "bits", 2, 3, 4, 8),
            block_inputs=group_size(facts),
            is_symmetric=flag(facts, "sym", default=False),
            has_group_index=flag(facts, "desc_act", default=False),
            zeros_minus_one=kind == "gptq",
        )

    groups = [ModuleGroup(("Linear",), storage(raw))]
    # GPTQModel: patterns of modules, "-:" for those that are not quantised, the others with their own facts.
    dynamic = member(raw, "dynamic") if raw.get("dynamic") else {}
    for pattern in dynamic:
        own = None if pattern.startswith("-:") else storage({**raw, **member(dynamic, pattern)})
        targets = target_names([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], "dynamic")
        groups.append(ModuleGroup(targets, own))
    return Quantization(str(kind), tuple(groups))


def _fp8(raw: RawConfig) -> Quantization:
    rows, inputs = (0, 0) if raw.get("weight_block_size") is None else block_sizes(raw, "weight_block_size")
    storage = MatrixStorage("plain", 8, block_rows=rows, block_inputs=inputs, is_float=True)
    return Quantization("fp8", (ModuleGroup(("Linear",), storage),))


def _fbgemm_fp8(raw: RawConfig) -> Quantization:
    return Quantization("fbgemm_fp8", (ModuleGroup(("Linear",), MatrixStorage("plain", 8, is_float=True)),))


def _bitsandbytes(raw: RawConfig) -> Quantization:
    in_4_bits, in_8_bits = (flag(raw, name, default=False) for name in ("load_in_4bit", "load_in_8bit"))
    if in_4_bits == in_8_bits:
        raise ConfigurationError("one of load_in_4bit and load_in_8bit must be true")
    target_names(raw.get("llm_int8_skip_modules") or [], "llm_int8_skip_modules")  # the tensors tell
    if in_8_bits:
        return Quantization("bitsandbytes", (ModuleGroup(("Linear",), MatrixStorage("bnb-8bit", 8)),))
    kind = require(raw, "bnb_4bit_quant_type", "nf4", "fp4", default="fp4")
    storage = MatrixStorage("bnb-4bit", 4, is_float=True)
    return Quantization(f"bitsandbytes {kind}", (ModuleGroup(("Linear",), storage),))


def _mxfp4(raw: RawConfig) -> Quantization:
    storage = MatrixStorage("mxfp4", 4, block_inputs=32, is_float=True)
    return Quantization("mxfp4", (ModuleGroup((r"re:.*\.experts\.",), storage),))


_METHODS: Mapping[str, Callable[[RawConfig], Quantization | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "hqq": hqq,
    "torchao": torchao,
    "bitnet": bitnet,
    GGUF: gguf,
    "modelopt": modelopt,
    "quark": quark,
}
