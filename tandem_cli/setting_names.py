"""The names of all settings, to detect misspelled keys in a settings file and in the environment."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields

from mesh.settings import ENV_PREFIX, check_settings_file, suggestion
from tandem_cli.bench_arguments import OpenAISettings
from tandem_cli.connection import ConnectionSettings
from tandem_cli.services import ROLES
from tandem_cli.up_settings import UpSettings

# Kubernetes sets these for every service in a namespace: a service named tandem adds TANDEM_PORT_80_TCP and others.
_KUBERNETES = re.compile(r"TANDEM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")
_OTHER_NAMES = {"config", "pace", "http"}  # the latter two belong to tandem_cli.load_test.paced and to examples/http


def all_names() -> dict[str, list[str]]:
    """The setting names of each component, by the name of its table in a settings file."""
    classes = {"up": UpSettings, "client": ConnectionSettings, "bench": OpenAISettings, **dict(ROLES.values())}
    return {
        component: [field.name for field in fields(settings_class)] for component, settings_class in classes.items()
    }


def check_names(config: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return warnings about unknown variables with the prefix TANDEM_. Raises ConfigurationError for unknown keys of
    the settings file. A component itself rejects variables that misspell one of its settings.
    """
    names = all_names()
    config = config or environ.get(f"{ENV_PREFIX}CONFIG")
    if config:
        check_settings_file(config, names)
    known_names = {name for component_names in names.values() for name in component_names} | _OTHER_NAMES
    return [_warning(variable, known_names) for variable in environ if _is_unknown(variable, known_names)]


def _is_unknown(variable: str, known_names: Collection[str]) -> bool:
    if not variable.startswith(ENV_PREFIX) or _KUBERNETES.fullmatch(variable):
        return False
    return variable.removeprefix(ENV_PREFIX).lower() not in known_names


def _warning(variable: str, known_names: Collection[str]) -> str:
    name = variable.removeprefix(ENV_PREFIX).lower()
    return f"{variable} is not known and has no effect{suggestion(name, known_names)}"
