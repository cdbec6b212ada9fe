"""From keys to settings, with checks of what contradicts, and lines that say what came from where."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cli.serving.conversions import flag
from cli.serving.knobs import KNOBS, Knob
from cli.serving.sources import Given, find, known_keys, read_options, read_properties
from mesh.domain.errors import ConfigurationError

RolesOf = Mapping[str, Iterable[str]]
"""The services' own settings: name to the roles that have it."""

# LMI's job_queue_size. Both: what waits is in service, too.
_LMI_DEFAULTS = {"max_concurrent_requests": "1000", "max_queued_requests": "1000"}


@dataclass
class LowCode:
    """What the keys mean.

    `values` are settings by role, "up" included. `router_defaults` are LMI's, for what nobody sets, in whatever way.
    `properties` are the keys as given, for a handler. `lines` and `warnings` are to be shown.
    """

    values: dict[str, dict[str, str]] = field(default_factory=dict)
    router_defaults: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def of(self, role: str) -> dict[str, str]:
        """Settings of one role."""
        return self.values.setdefault(role, {})


def read_low_code(
    path: str | None, environ: Mapping[str, str], roles_of: RolesOf, *, has_handler: bool = False
) -> LowCode:
    """Resolve everything. What a TANDEM_* variable sets is left to it. Raises ConfigurationError.

    With `has_handler` a handler is named elsewhere; what is in the keys may name one, too.
    """
    options = read_options(environ)
    layers = (read_properties(path) if path else {}, options)
    merged = {key: given for layer in reversed(layers) for key, given in layer.items()}
    found = LowCode()
    for knob in KNOBS:
        given = find(knob, layers, environ)
        if given is not None:
            _apply(knob, given, found, environ)
            if not knob.is_secret:
                found.properties[_bare(knob.key)] = given.value
    found.properties.update({_bare(key): given.value for key, given in merged.items()})
    unknown = _pass_through(merged, found, roles_of, environ)
    _say_whose(unknown, found, has_handler=has_handler or bool(found.of("gateway").get("handler")))
    _check_mode(merged)
    _check_budgets(found)
    if (path or options) and not flag(found.of("gateway").get("tgi_compat", "false")):
        found.router_defaults = dict(_LMI_DEFAULTS)
    return found


def _apply(knob: Knob, given: Given, found: LowCode, environ: Mapping[str, str]) -> None:
    if knob.is_secret:
        given = replace(given, value="***")
    try:
        value = knob.convert(given.value)
        spread = knob.spread(given.value) if knob.spread else {}
    except ConfigurationError as error:
        raise ConfigurationError(f"{given.key}={given.value} ({given.origin}): {error}") from None
    if knob.is_file and value:
        value = str(Path(given.folder, value))
    for target, part in spread.items():
        _set(given, (target,), part, found, environ)
    if not knob.targets and not knob.spread:
        found.warnings.append(f"{given.key}={given.value} ({given.origin}) has no effect: {knob.note}")
        return
    _set(given, knob.targets, value, found, environ)


def _pass_through(
    merged: Mapping[str, Given], found: LowCode, roles_of: RolesOf, environ: Mapping[str, str]
) -> list[Given]:
    """`option.NAME` for settings that services have under just this name. Returns those that nobody has."""
    known, unknown = set(known_keys()), []
    for key, given in merged.items():
        if key in known:
            continue
        name = _bare(key)
        roles = roles_of.get(name, ()) if key.startswith("option.") else ()
        if roles:
            _set(given, tuple(f"{role}.{name}" for role in roles), given.value, found, environ)
        else:
            unknown.append(given)
    return unknown


def _say_whose(unknown: list[Given], found: LowCode, *, has_handler: bool) -> None:
    for given in unknown:
        named = f"{given.key} ({given.origin})"
        if has_handler:
            found.lines.append(f"{named} is for the handler")
        else:
            found.warnings.append(f"{named} is not known here and has no effect")


def _bare(key: str) -> str:
    return key.removeprefix("option.")


def _set(given: Given, targets: tuple[str, ...], value: str, found: LowCode, environ: Mapping[str, str]) -> None:
    for target in targets:
        role, _, name = target.partition(".")
        own = f"TANDEM_{name.upper()}"
        if environ.get(own):
            found.lines.append(f"{given.key}={given.value} ({given.origin}): {target} stays as {own} has it")
        else:
            found.of(role)[name] = value
            found.lines.append(f"{given.key}={given.value} ({given.origin}): {target} = {value}")


def _check_mode(merged: Mapping[str, Given]) -> None:
    """LMI is either asynchronous or has a rolling batch."""
    mode, batch = merged.get("option.async_mode"), merged.get("option.rolling_batch")
    if mode and batch and mode.value.lower() == "true" and batch.value not in ("disable", "auto"):
        raise ConfigurationError(
            f"option.async_mode=true and option.rolling_batch={batch.value} contradict each other: "
            "async mode needs option.rolling_batch=disable"
        )


def _check_budgets(found: LowCode) -> None:
    """TGI's rules, in TGI's words."""
    prefill = _integer(found, "prefill", "max_batch_prefill_tokens")
    total = _integer(found, "decode", "max_batch_total_tokens")
    longest = _integer(found, "router", "max_total_tokens")
    longest_input = _integer(found, "router", "max_input_length")
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


def _integer(found: LowCode, role: str, name: str) -> int | None:
    """None if it is not set; what is no number, the service itself refuses."""
    text = found.of(role).get(name, "")
    return int(text) if text.isdecimal() else None
