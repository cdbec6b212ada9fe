"""How the matrices of a checkpoint are stored. Needs no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from checkpoint.multimodal import names_in_programs
from engine.kernels.cpu.machine import INT4_GROUPS, MINIMA_GROUP

_Ternary = Literal["bitlinear", "autobitlinear", "bitnet-online"]
_E2m1 = Literal["mxfp4", "mxfp4-packed", "mxfp4-plain", "nvfp4-packed", "nvfp4-plain"]
GgufFormat = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
_Other = Literal["awq", "gptq", "packed", "plain", "bnb-4bit", "bnb-8bit", "hqq", "torchao"]
Format = _Other | _E2m1 | _Ternary | GgufFormat
_TERNARY: tuple[Format, ...] = ("bitlinear", "autobitlinear", "bitnet-online")
_IN_INT8_GROUPS: tuple[Format, ...] = ("Q4_0", "Q5_0", "Q8_0")
BYTES: tuple[Format, ...] = ("plain", "bnb-8bit", "torchao")
"""Formats that store an int8 or fp8 matrix as it is."""
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers that may share a scale in files of bitsandbytes."""


@dataclass(frozen=True, slots=True)
class MatrixStorage:
    """How a matrix is stored. Each scale is for `block_rows` outputs and `block_inputs` inputs; 0: for all of them.

    A matrix that is not symmetric has zeros, too. With `has_group_index` a tensor says which group an input belongs to.
    `int8_rows`: the matrix was made to be multiplied with activations in int8. `has_real_zeros`: zeros are no integers.
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
    has_real_zeros: bool = field(default=False, repr=False)  # fingerprints of older workers have no such member

    @property
    def is_ternary(self) -> bool:
        """True if the numbers of the matrix are -1, 0 or 1 times one scale."""
        return self.format in _TERNARY

    @property
    def is_int8(self) -> bool:
        """True if the matrix is int8 with a scale for each output, as our encoding "int8" has it."""
        per_output = self.block_rows in (0, 1) and self.block_inputs == 0 and self.is_symmetric
        is_int8 = per_output and self.format in BYTES and (self.num_bits, self.is_float) == (8, False)
        return self.is_ternary or is_int8

    @property
    def is_mxfp4(self) -> bool:
        return self.format in ("mxfp4", "mxfp4-packed", "mxfp4-plain")

    @property
    def int4_group(self) -> int | None:
        """Inputs that share a scale in int4 of the compiled decoder, as our encoding "int4" has it: as many as here, or
        fewer. Integers of 2 and 3 bits are some of 4. None if the matrix is in another form.
        """
        if self.num_bits > 4 or self.is_float or self.block_rows > 1:
            return None
        groups = (MINIMA_GROUP,) if self.has_real_zeros else INT4_GROUPS
        return max((group for group in groups if self.block_inputs % group == 0), default=None)

    @property
    def is_for_int4(self) -> bool:
        """True if the matrix has as few bits as int4, and is neither ternary nor one that GGUF has in fewer."""
        return self.num_bits == 4 or (self.num_bits < 4 and not self.is_ternary and not self.is_gguf)

    @property
    def is_gguf(self) -> bool:
        return self.format in get_args(GgufFormat)

    @property
    def has_minima(self) -> bool:
        """True if something that is no multiple of the scale is taken from the numbers of each group."""
        return self.has_real_zeros or (self.is_gguf and not self.is_symmetric)

    @property
    def fits_int8_groups(self) -> bool:
        """True if the matrix is as our encoding "int8 in groups" has it, in groups of `block_inputs`."""
        return self.format in _IN_INT8_GROUPS


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that are stored alike: by name, by "re:" and a pattern of names, or "Linear" for all. Without a `storage`
    they are not quantised.
    """

    targets: tuple[str, ...]
    storage: MatrixStorage | None


_Found = tuple[str, MatrixStorage | None]
"""A target, and the storage of the modules that it describes."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is quant_method of config.json, with the format if the method has several."""

    method: str
    groups: tuple[ModuleGroup, ...]
    ignored: tuple[str, ...] = ()
    _ignored: "_Targets" = field(init=False, repr=False, compare=False)
    _targets: "_Targets" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ignored = _Targets.of([(target, None) for target in self.ignored])
        targets = _Targets.of([(target, group.storage) for group in self.groups for target in group.targets])
        object.__setattr__(self, "_ignored", ignored)
        object.__setattr__(self, "_targets", targets)

    def storage_of(self, module: str) -> MatrixStorage | None:
        """The storage of the matrix of a module, by its name in the file; None if it is not quantised. Names go before
        patterns, these before kinds of modules. The name of all experts of a layer stands for each, as in files of
        modelopt.
        """
        if self._ignored.find((module,)) is not None:
            return None
        names = tuple(dict.fromkeys(names_in_programs(module)))
        experts = tuple(f"{name.partition('.experts.')[0]}.experts" for name in names if ".experts." in name)
        found = self._targets.find(names, experts)
        return None if found is None else found[1]

    @property
    def is_w8a8(self) -> bool:
        """True if all quantised matrices are int8 and expect activations in int8."""
        storages = [group.storage for group in self.groups if group.storage is not None]
        return bool(storages) and all(storage.is_int8 and storage.int8_rows for storage in storages)

    @property
    def is_bitsandbytes(self) -> bool:
        return self.method.startswith("bitsandbytes")

    @property
    def is_mxfp4(self) -> bool:
        """True if all quantised matrices are in MXFP4, whose numbers bf16 holds."""
        storages = [group.storage for group in self.groups if group.storage is not None]
        return bool(storages) and all(storage.is_mxfp4 for storage in storages)

    @property
    def is_ternary(self) -> bool:
        return self.method == "bitnet"

    def __str__(self) -> str:
        bits = sorted({group.storage.num_bits for group in self.groups if group.storage is not None})
        return f"{self.method}, {' and '.join(map(str, bits))} bits"


class _Targets(NamedTuple):
    """Targets of compressed-tensors with what they describe, ready to be looked up: mixtures have tens of thousands of
    modules, and descriptions thousands of targets. The first of two targets alike counts.
    """

    by_name: Mapping[str, _Found]
    patterns: tuple[tuple[re.Pattern[str], _Found], ...]
    of_all: _Found | None

    @classmethod
    def of(cls, targets: Sequence[_Found]) -> "_Targets":
        names, patterns, of_all = dict[str, _Found](), list[tuple[re.Pattern[str], _Found]](), None
        for found in targets:
            target = found[0]
            if target.startswith("re:"):
                patterns.append((re.compile(target.removeprefix("re:")), found))
            elif target == "Linear":
                of_all = of_all or found
            else:
                names.setdefault(target, found)
        return cls(names, tuple(patterns), of_all)

    def find(self, names: Sequence[str], more_names: Sequence[str] = ()) -> _Found | None:
        """The target that describes a module most closely: its name, or one of `more_names`, or the first pattern of
        its name, or "Linear".
        """
        by_name = next((name for name in (*names, *more_names) if name in self.by_name), None)
        if by_name is not None:
            return self.by_name[by_name]
        for pattern, found in self.patterns:
            for name in names:
                if pattern.match(name):
                    return found
        return self.of_all
