"""Reads LoRA adapters (Hu et al. 2022) in PEFT's format: adapter_config.json and adapter_model.safetensors.

Only headers are read here, and the bytes once for the digest. An adapter is known by its digest everywhere behind the
router: two files with one name are two adapters.
"""

import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from checkpoint.config_json import read_json, require_searchable
from checkpoint.multimodal import other_part
from checkpoint.source import home_expanded
from checkpoint.tensors import StoredTensor, read_header
from mesh.domain.errors import ConfigurationError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")
_READ_BYTES = 1 << 20
_PANEL = 16
_NUMBER_BYTES = 4
# What changes an adapter's arithmetic, with the values of a plain LoRA.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
# These begin training with a changed base model, which the adapter alone does not have.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    """The change of one module's matrix: `scale * b @ a`, with a [rank, inputs] and b [outputs, rank]."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk. The keys of `matrices` are modules, as the base model's checkpoint names them. `base` is the
    model that the adapter says it was trained on, or "". `other_parts`: parts of a multimodal model that it also
    changes, and that are not served.
    """

    name: str
    folder: Path
    digest: str
    base: str
    matrices: Mapping[str, AdapterMatrix]
    other_parts: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The highest rank of its matrices."""
        return max(matrix.rank for matrix in self.matrices.values())

    @property
    def num_packed(self) -> int:
        """Size of its matrices, in numbers, as the compiled decoder packs them: in panels of 16 outputs."""
        matrices = self.matrices.values()
        return sum(_padded(m.rank) * m.a.shape[1] + _padded(m.b.shape[0]) * m.rank for m in matrices)


def _padded(num_outputs: int) -> int:
    return -(-num_outputs // _PANEL) * _PANEL


def adapters_bytes(adapters: Sequence[AdapterFiles], num_slots: int) -> int:
    """Bytes that one rank takes for adapters when at most `num_slots` of them are loaded at once."""
    sizes = [adapter.num_packed for adapter in adapters]
    is_limited = num_slots < len(sizes)  # then the largest may have been in any slot
    return _NUMBER_BYTES * (num_slots * max(sizes) if is_limited else sum(sizes))


def find_adapters(text: str) -> dict[str, Path]:
    """The folders that a setting lists, by name: `NAME=FOLDER,...`. An item without a name is a folder of adapters,
    each in a folder of its own, whose name is the adapter's. Raises ConfigurationError.
    """
    folders: dict[str, Path] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, is_named, path = item.partition("=")
        if is_named and not path:
            raise ConfigurationError(f"adapter {item!r} has no folder: give NAME=FOLDER")
        folder = home_expanded(path if is_named else item)
        folder_of = {name: folder} if is_named else {config.parent.name: config.parent for config in _configs(folder)}
        for name, folder in folder_of.items():
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"adapter {item!r}: a name has 1 to 64 letters, digits, '.', '_' or '-': give NAME=FOLDER"
                )
            if name in folders:
                raise ConfigurationError(f"two adapters are named {name}: {folders[name]} and {folder}")
            folders[name] = folder
    return folders


def _configs(folder: Path) -> list[Path]:
    configs = sorted(folder.glob(f"*/{CONFIG_FILE}"))
    if not configs:
        raise ConfigurationError(
            f"adapter {folder}: no folder in it has {CONFIG_FILE}: name one adapter as in NAME=FOLDER"
        )
    return configs


def read_adapter(name: str, folder: Path, max_rank: int, digest: str | None = None) -> AdapterFiles:
    """Read the headers of an adapter, and all of it for its digest unless that is given. Raises ConfigurationError,
    which names the adapter and what is wrong with it.
    """
    try:
        return _read(name, folder, max_rank, digest)
    except ConfigurationError as error:
        raise ConfigurationError(f"adapter {name}: {error}") from error


def require_unchanged(adapter: AdapterFiles) -> None:
    """Raise ConfigurationError if the files of an adapter are no longer those that were read."""
    try:
        digest = _digest(adapter.folder, read_json(adapter.folder / CONFIG_FILE))
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"adapter {adapter.name} can no longer be read: {error}") from error
    if digest != adapter.digest:
        raise ConfigurationError(
            f"adapter {adapter.name}: {adapter.folder} has changed since the worker started: restart the worker, and "
            "give a changed adapter another name"
        )


def _read(name: str, folder: Path, max_rank: int, digest: str | None) -> AdapterFiles:
    require_searchable(folder)
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            hint = f"; run tandem convert {folder} OUT" if (folder / "adapter_model.bin").exists() else ""
            raise ConfigurationError(f"{folder} has no {file}{hint}")
    config = read_json(folder / CONFIG_FILE)
    _refuse_unsupported(config)
    stored = read_header(folder / WEIGHTS_FILE)
    part_of = {tensor: other_part(tensor.removeprefix(_PREFIX)) for tensor in stored}
    others = tuple(sorted({part for part in part_of.values() if part is not None}))
    modules = _by_module({tensor: header for tensor, header in stored.items() if part_of[tensor] is None})
    matrices = {module: _matrix(module, tensors, config) for module, tensors in modules.items()}
    if not matrices:
        only = f": it changes {', '.join(others)}, and only text parts are served" if others else ""
        raise ConfigurationError(f"{folder / WEIGHTS_FILE} has no matrices{only}")
    _require_targets(config, matrices)
    base = str(config.get("base_model_name_or_path") or "")
    adapter = AdapterFiles(name, folder, digest or _digest(folder, config), base, matrices, others)
    if adapter.rank > max_rank:
        raise ConfigurationError(f"its rank is {adapter.rank}, over max_lora_rank {max_rank}: raise max_lora_rank")
    return adapter


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        value = config.get(key, plain[0])
        if value not in plain:
            raise ConfigurationError(
                f"{key} {value!r} is not supported, only {plain[0]!r} is: merge the adapter into its base model and "
                "serve that"
            )
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ConfigurationError(f"use_rslora must be true or false, got {config['use_rslora']!r:.100}")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigurationError(f"{key} must be an object, got {config[key]!r}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise ConfigurationError(
            f"init_lora_weights {start!r} changes the base model: save the adapter with "
            "path_initial_model_for_weight_conversion"
        )


def _require_targets(config: Mapping[str, Any], modules: Collection[str]) -> None:
    """Raise ConfigurationError if target_modules lists only some of the modules: PEFT would ignore the others. A list
    without any of them has the names of an older version of the model.
    """
    targets = config.get("target_modules")
    names = [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
    others = [module for module in modules if not any(f".{module}".endswith(f".{name}") for name in names)]
    if 0 < len(others) < len(modules):
        raise ConfigurationError(
            f"module {others[0]} is not among the target_modules of {CONFIG_FILE}: "
            "one of the two files is from another adapter"
        )


def _by_module(stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The two tensors of each module. Raises ConfigurationError for tensors that are not a LoRA's."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in _PARTS or not name.endswith(".weight") or len(tensor.shape) != 2:
            raise ConfigurationError(
                f"tensor {name} is not supported: only lora_A and lora_B of linear modules are; train the adapter "
                "without it, or merge it into its base model"
            )
        own = modules.setdefault(module.removeprefix(_PREFIX), {})
        if part in own:
            raise ConfigurationError(
                f"module {module.removeprefix(_PREFIX)} has two tensors {part}, with and without {_PREFIX!r} in front: "
                "save the adapter again"
            )
        own[part] = tensor
    return modules


def _matrix(module: str, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> AdapterMatrix:
    if missing := [part for part in _PARTS if part not in tensors]:
        raise ConfigurationError(f"module {module} has no {missing[0]}.weight")
    a, b = (tensors[part] for part in _PARTS)
    rank = a.shape[0]
    if b.shape[1] != rank or not rank:
        raise ConfigurationError(f"module {module}: lora_A {a.shape} and lora_B {b.shape} have different ranks")
    stated_rank = _of_module(module, config, "rank_pattern", config.get("r"))
    if rank != stated_rank:
        raise ConfigurationError(
            f"module {module} has rank {rank}, and {CONFIG_FILE} says {stated_rank}: one is from another adapter"
        )
    alpha = _of_module(module, config, "alpha_pattern", config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise ConfigurationError(f"lora_alpha of module {module} is {alpha!r:.100}, not a number")
    return AdapterMatrix(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_module(module: str, config: Mapping[str, Any], pattern: str, default: object) -> object:
    """The value of the first key in `pattern` that matches the module's name, or its end, as in PEFT."""
    for key, value in (config.get(pattern) or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error as error:
            raise ConfigurationError(f"{pattern}: {key!r} is not a regular expression: {error}") from error
    return default


def _digest(folder: Path, config: Mapping[str, Any]) -> str:
    """A hash of all that changes what the adapter computes."""
    scales = {key: config.get(key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
    digest = blake2b(repr(scales).encode(), digest_size=16, person=b"tandem-adapter")
    with (folder / WEIGHTS_FILE).open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
