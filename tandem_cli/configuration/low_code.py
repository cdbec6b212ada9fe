"""Low-code configuration: `tandem up` accepts the configuration of LMI, SageMaker and TGI.

serving.properties ─▶ OPTION_* and SERVING_* ─▶ variables of TGI and SageMaker     the first source that sets a key wins
    ─▶ low_code_keys.py maps each key to settings of services
    ─▶ flags of `tandem up`, under its own flags and TANDEM_* variables

This module reads the keys, resolves them, checks for contradictions, and explains the origin of each setting.

The serving.properties that `tandem optimize` writes are read by `tandem up FOLDER` without being told. Files of anybody
else are read with --serving-properties only: they may name a handler, whose code would run.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import javaproperties

from checkpoint.config_json import require_searchable
from mesh.domain.errors import ConfigurationError
from mesh.settings import env_name
from tandem_cli.configuration.low_code_keys import KNOBS, ROPE_NAMES, Knob
from tandem_cli.configuration.low_code_values import flag, number

_OPTION = "OPTION_"
_SERVING = "SERVING_"
_SPECIAL_NAMES = {"OPTION_ENTRYPOINT": "option.entryPoint", "OPTION_ENGINE": "engine"}
# LMI's job_queue_size. It sets both, because waiting requests count as concurrent here.
_LMI_DEFAULTS = {"max_concurrent_requests": "1000", "max_queued_requests": "1000"}
RolesOf = Mapping[str, Iterable[str]]
"""The roles that have each setting, by the name of the setting."""
WRITTEN_BY = "# Written by tandem optimize: tandem up reads it where it lies."
_WRITTEN_KEYS = frozenset(
    {
        "option.model_id",
        "option.quantize",
        "option.dtype",
        "option.prefill_workers",
        "option.decode_workers",
        "option.colocated",
        "option.tensor_parallel_degree",
        "option.speculative_config",
        "option.speculative_draft_model",
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value. `origin` is a file or variable; `folder` is the folder of the file, "" for a variable."""

    key: str
    value: str
    origin: str
    folder: str = ""

    @property
    def label(self) -> str:
        """The key with its origin, for messages."""
        return self.key if self.key == self.origin else f"{self.key} ({self.origin})"

    @property
    def full_label(self) -> str:
        """The key with its value and origin, for messages."""
        return f"{self.key}={self.value} ({self.origin})"


@dataclass
class LowCode:
    """The settings that result from the keys.

    `values` are settings by role, including "up", and `origins` are the keys that they come from. `router_defaults` are
    LMI's defaults for settings that nothing else sets. `model_folder` is the folder of serving.properties, which
    contains the model if no key names one; "" without the file. `properties` are the unchanged keys, for a handler.
    `lines` and `warnings` are messages for the user.
    """

    values: dict[str, dict[str, str]] = field(default_factory=dict)
    origins: dict[str, dict[str, str]] = field(default_factory=dict)
    model_folder: str = ""
    router_defaults: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def of(self, role: str) -> dict[str, str]:
        """The settings of one role, as a dictionary that may be modified."""
        return self.values.setdefault(role, {})


def read_low_code(
    path: str | None, environ: Mapping[str, str], roles_of: RolesOf, *, has_handler: bool = False
) -> LowCode:
    """Resolve all keys. TANDEM_* variables take precedence over them. Raises ConfigurationError.

    `has_handler` means that a handler is configured outside the keys. Keys may configure one as well.
    """
    options = read_options(environ)
    environ = with_rope_scaling(environ)
    layers = (read_properties(path) if path else {}, options)
    merged = {key: entry for layer in reversed(layers) for key, entry in layer.items()}
    low_code = LowCode(model_folder=str(Path(path).parent) if path else "")
    for knob in KNOBS:
        entry = find(knob, layers, environ)
        if entry is not None:
            _apply(knob, entry, low_code, environ)
            if not knob.is_secret:
                low_code.properties[_without_prefix(knob.key)] = entry.value
    secret_keys = {key for knob in KNOBS if knob.is_secret for key in (knob.key, *knob.also)}
    low_code.properties.update(
        {_without_prefix(key): entry.value for key, entry in merged.items() if key not in secret_keys}
    )
    unknown = _pass_through(merged, low_code, roles_of, environ)
    _report_unknown(unknown, low_code, has_handler=has_handler or bool(low_code.of("gateway").get("handler")))
    low_code.warnings += [f"{name} is not known here and has no effect" for name in unknown_variables(environ)]
    _check_mode(merged)
    _check_shards(layers, environ)
    _check_budgets(low_code)
    if (path or options) and not flag(low_code.of("gateway").get("tgi_compat", "false")):
        low_code.router_defaults = dict(_LMI_DEFAULTS)
    return low_code


def _apply(knob: Knob, entry: Entry, low_code: LowCode, environ: Mapping[str, str]) -> None:
    if knob.is_secret:
        entry = replace(entry, value="***")
    try:
        value = knob.convert(entry.value)
        spread = knob.spread(entry.value) if knob.spread else {}
    except ConfigurationError as error:
        raise ConfigurationError(f"{entry.full_label}: {error}") from None
    if knob.is_file and value:
        value = str(Path(entry.folder, value))
    for target, part in spread.items():
        _set(entry, (target,), part, low_code, environ)
    if not knob.targets and not knob.spread:
        low_code.warnings.append(f"{entry.full_label} has no effect: {knob.note}")
        return
    _set(entry, knob.targets, value, low_code, environ)


def _pass_through(
    merged: Mapping[str, Entry], low_code: LowCode, roles_of: RolesOf, environ: Mapping[str, str]
) -> list[Entry]:
    """Apply `option.NAME` to services that have a setting NAME. Returns the keys that no service has."""
    known_names, unknown = set(known_keys()), []
    for key, entry in merged.items():
        if key in known_names:
            continue
        name = _without_prefix(key)
        roles = roles_of.get(name, ()) if key.startswith("option.") else ()
        if roles:
            _set(entry, tuple(f"{role}.{name}" for role in roles), entry.value, low_code, environ)
        else:
            unknown.append(entry)
    return unknown


def _report_unknown(unknown: list[Entry], low_code: LowCode, *, has_handler: bool) -> None:
    for entry in unknown:
        if has_handler:
            low_code.lines.append(f"{entry.label} is for the handler")
        else:
            low_code.warnings.append(f"{entry.label} is not known here and has no effect")


def _without_prefix(key: str) -> str:
    return key.removeprefix("option.")


def _set(entry: Entry, targets: tuple[str, ...], value: str, low_code: LowCode, environ: Mapping[str, str]) -> None:
    for target in targets:
        role, _, name = target.partition(".")
        variable = env_name(name)
        if environ.get(variable):
            low_code.lines.append(f"{entry.full_label}: {target} stays as {variable} has it")
        else:
            low_code.of(role)[name] = value
            low_code.origins.setdefault(role, {})[name] = entry.label
            low_code.lines.append(f"{entry.full_label}: {target} = {value}")


def _check_mode(merged: Mapping[str, Entry]) -> None:
    """Reject async mode together with a rolling batch, as LMI does."""
    mode, batch = merged.get("option.async_mode"), merged.get("option.rolling_batch")
    if mode and batch and mode.value.lower() == "true" and batch.value not in ("disable", "auto"):
        raise ConfigurationError(
            f"option.async_mode=true and option.rolling_batch={batch.value} contradict each other: "
            "async mode needs option.rolling_batch=disable"
        )


def _check_shards(layers: tuple[Mapping[str, Entry], ...], environ: Mapping[str, str]) -> None:
    """Reject a degree together with TGI's SHARDED=false."""
    by_key = {knob.key: knob for knob in KNOBS}
    sharded = find(by_key["option.sharded"], layers, environ)
    degree = find(by_key["option.tensor_parallel_degree"], layers, environ)
    if sharded and degree and not flag(sharded.value) and degree.value not in ("1", "max"):
        raise ConfigurationError(
            f"{sharded.key}={sharded.value} and {degree.key}={degree.value} contradict each other: set one of them"
        )


def _check_budgets(low_code: LowCode) -> None:
    """Check the token budgets with the rules and messages of TGI."""
    prefill = _integer(low_code, "prefill", "max_batch_prefill_tokens")
    total = _integer(low_code, "decode", "max_batch_total_tokens")
    longest = _integer(low_code, "router", "max_total_tokens")
    longest_input = _integer(low_code, "router", "max_input_length")
    if longest_input and longest and longest_input >= longest:
        raise ConfigurationError("`max_input_tokens` must be < `max_total_tokens`")
    if prefill and total and prefill > total:
        raise ConfigurationError(
            f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: {prefill} and {total}"
        )
    if longest and total and longest > total:
        raise ConfigurationError(
            f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {longest} and {total}"
        )


def _integer(low_code: LowCode, role: str, name: str) -> int | None:
    """An integer setting; None if it is unset or not a number, which the service itself rejects."""
    text = low_code.of(role).get(name, "")
    return int(text) if text.isdecimal() else None


def read_properties(path: str) -> dict[str, Entry]:
    """Read a file in Java's properties format. Raises ConfigurationError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        entries = javaproperties.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    name, folder = Path(path).name, str(Path(path).parent)
    return {key: Entry(key, value.strip(), name, folder) for key, value in entries.items()}


def read_options(environ: Mapping[str, str]) -> dict[str, Entry]:
    """Keys from OPTION_* variables: OPTION_FOO_BAR is option.foo_bar. Empty variables count as unset."""
    return {
        entry.key: entry
        for entry in (
            Entry(_SPECIAL_NAMES.get(name, f"option.{name.removeprefix(_OPTION).lower()}"), value.strip(), name)
            for name, value in environ.items()
            if name.startswith(_OPTION) and value.strip()
        )
    }


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """SERVING_* variables that are not in the table."""
    known_names = {name for knob in KNOBS for name in knob.env}
    return [name for name in environ if name.startswith(_SERVING) and environ[name].strip() and name not in known_names]


def find(knob: Knob, layers: tuple[Mapping[str, Entry], ...], environ: Mapping[str, str]) -> Entry | None:
    """The entry for a knob, from the first layer that has one, else from a variable. Raises ConfigurationError if names
    of the knob in one layer contradict each other.
    """
    for layer in layers:
        entries = [layer[key] for key in (knob.key, *knob.also) if key in layer]
        if entries:
            return _require_agreement(entries)
    entries = [Entry(name, environ[name].strip(), name) for name in knob.env if environ.get(name, "").strip()]
    return _require_agreement(entries) if entries else None


def with_rope_scaling(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Join TGI's ROPE_SCALING and ROPE_FACTOR to one variable, in JSON. As in TGI, a factor alone means linear scaling.

    Raises ConfigurationError.
    """
    kind, factor = (environ.get(name, "").strip() for name in ROPE_NAMES[:2])
    if kind.startswith("{") or not (kind or factor):
        return environ
    scaling = {"rope_type": kind or "linear", "factor": number(factor or "1", "ROPE_FACTOR: ")}
    joined_name = " and ".join(name for name, value in zip(ROPE_NAMES[:2], (kind, factor), strict=True) if value)
    return {name: value for name, value in environ.items() if name not in ROPE_NAMES} | {
        joined_name: json.dumps(scaling)
    }


def known_keys() -> Iterator[str]:
    """All names of keys in serving.properties that the table contains."""
    for knob in KNOBS:
        yield from (knob.key, *knob.also)


def _require_agreement(entries: list[Entry]) -> Entry:
    """The first entry. Raises ConfigurationError if another one has a different value."""
    for other in entries[1:]:
        if other.value != entries[0].value:
            raise ConfigurationError(
                f"{entries[0].key}={entries[0].value} and {other.key}={other.value} contradict each other: "
                "set one of them"
            )
    return entries[0]


def find_written(models: Sequence[str]) -> Path | None:
    """The file in the folder of the only model, if `tandem optimize` wrote it. Raises ConfigurationError for keys that
    it does not write.
    """
    if len(models) != 1 or "=" in models[0]:
        return None
    require_searchable(Path(models[0]))
    path = Path(models[0]) / "serving.properties"
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0] != WRITTEN_BY:
        return None
    for line in lines[1:]:
        key = line.partition("=")[0].strip()
        if key and key not in _WRITTEN_KEYS:
            raise ConfigurationError(
                f"{path} has {key}, which tandem optimize does not write: give --serving-properties"
            )
    return path


def use_written(args: argparse.Namespace, low_code: LowCode) -> None:
    """Serve as was measured: without LMI's defaults, and the model that the file names, if it names one."""
    low_code.router_defaults.clear()
    if "model" in low_code.of("up"):
        args.models = []
        vars(args).pop("model", None)
