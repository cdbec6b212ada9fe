"""The arguments of `tandem up`: its settings and those of the services. `--help` shows what most people need."""

import argparse
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from mesh.settings import flag_options
from tandem_cli.configuration.up_settings import UpSettings, passed_on
from tandem_cli.parser import CommandParser

_FIRST = {
    "clients": ("name", "host", "port", "http_host", "http_port", "api_keys_file"),
    "workers": ("prefill", "decode", "colocated", "quantize"),
}
"""Settings that `--help` shows, by the title of their group."""

_REPEATABLE = ("model", "adapter")
"""Settings with several values, separated by commas, whose flag may be repeated instead."""

_REST = {
    "": "the mesh",
    "router,prefill,decode,gateway": "all services",
    "router,prefill,decode": "router and workers",
    "router,gateway": "router and gateway",
    "router": "the router",
    "prefill,decode": "all workers",
    "prefill": "prefill workers",
    "decode": "decode workers",
    "gateway": "the HTTP gateway",
}
"""Titles of the groups of all other settings, by the roles that have them; "" stands for `tandem up` itself."""


def add_up_arguments(parser: CommandParser) -> None:
    """Declare the settings of `tandem up`, and those of the services under the same names."""
    parser.usage = f"{parser.prog} [MODEL ...] [OPTIONS]"
    parser.epilog = (
        "Each option but --set and --serving-properties is also a variable, TANDEM_<NAME>, and a line of the settings "
        'file. Once the mesh serves, it prints "ready HOST:PORT" on standard output, and the address of its pages.'
    )
    settings = dict(_settings())
    parser.add_argument("models", nargs="*", metavar="MODEL", help=_help_of(settings["model"]))
    parser.add_help_all()
    about = "TOML file; tables: up, router, gateway, prefill_worker, decode_worker"
    parser.add_argument("--config", metavar="FILE", help=about)
    for title, names in _FIRST.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(parser, settings.pop(name), group=group)
    _add_rest(parser, settings)


def _settings() -> Iterator[tuple[str, dict[str, Field[object]]]]:
    """The field of each setting by role, "" for `tandem up` itself; by the setting's name."""
    for setting in fields(UpSettings):
        if not setting.metadata["secret"]:
            yield setting.name, {"": setting}
    yield from passed_on().items()


def _add(parser: CommandParser, field_by_role: dict[str, Field[object]], **options: Any) -> None:
    setting = next(iter(field_by_role.values()))
    repeatable: dict[str, Any] = {"action": "append"} if setting.name in _REPEATABLE else {}
    parser.add_setting(setting, help=_help_of(field_by_role), **repeatable, **options)


def _help_of(field_by_role: dict[str, Field[object]]) -> str:
    """The text of a setting; of each role, if the roles differ in it or in the default."""
    texts = {role: flag_options(setting)["help"] for role, setting in field_by_role.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{role}: {text}" for role, text in texts.items())


def _add_rest(parser: CommandParser, settings: dict[str, dict[str, Field[object]]]) -> None:
    groups = {roles: parser.add_argument_group(title) for roles, title in _REST.items()}
    parser.add_rare(
        "--set",
        group=groups[""],
        action="append",
        default=[],
        metavar="[MODEL/]ROLE.KEY=VALUE",
        help="set a setting of one role, or of one role of one model; repeatable",
    )
    parser.add_rare(
        "--serving-properties",
        group=groups[""],
        metavar="FILE",
        help="serving.properties file of LMI; OPTION_* and variables of TGI and SageMaker are always read",
    )
    for field_by_role in settings.values():
        _add(parser, field_by_role, group=groups[",".join(field_by_role)], is_rare=True)


def models_of(args: argparse.Namespace) -> list[str]:
    """The models that arguments and `--model` name; empty if they name none."""
    return [*args.models, *getattr(args, "model", [])]
