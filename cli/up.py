"""`tandem up`: a whole mesh with one command."""

import argparse
import asyncio
import importlib.util
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import tandem
from cli.child import Launch, Programs
from cli.display import Display
from cli.model_plans import Overrides, available_cores, find_draft, join_models, plan_models
from cli.services import ROLES, MeshPlan, passed_on, roles_of, split_by_role
from cli.serving import LowCode, read_low_code
from cli.supervisor import MeshFailed, Supervisor
from cli.trial import Trial
from cli.up_settings import HandlerChoice, UpSettings
from gateway.settings import GatewaySettings
from mesh.cores import make_core_table
from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings
from router.api_keys import digest_of, new_key
from router.settings import RouterSettings

NAME = "up"
ABOUT = 'start a router and workers in the foreground; prints "ready HOST:PORT" on stdout once they serve'

_LMI_PORT = 8080

PROGRAMS: Programs = {role: (sys.executable, "-m", module) for role, (module, _) in ROLES.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: own settings, and those of the services under their own names."""
    parser.set_defaults(programs=PROGRAMS)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file; tables: up, router, gateway, prefill_worker, decode_worker"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[MODEL/]ROLE.KEY=VALUE",
        help="a setting for one role, of one model; repeatable",
    )
    parser.add_argument(
        "--serving-properties",
        metavar="FILE",
        help="serving.properties of LMI; OPTION_* and variables of TGI and SageMaker are read in any case",
    )
    for each in fields(UpSettings):
        if not each.metadata["secret"]:
            _add_flag(parser, each)
    services = parser.add_argument_group("settings of the services")
    for roles, each in passed_on().values():
        _add_flag(services, each, f" ({roles})")


def _add_flag(parser: Any, setting: Any, suffix: str = "") -> None:
    about = f"{setting.metadata['about']} (default {setting.default!r}){suffix}".replace("%", "%%")
    bare: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.type is bool else {}
    flag = "--" + setting.name.replace("_", "-")
    more: dict[str, Any] = {"action": "append"} if setting.name == "model" else {}
    parser.add_argument(flag, dest=setting.name, default=argparse.SUPPRESS, metavar="VALUE", help=about, **bare, **more)


def run(args: argparse.Namespace) -> int:
    """Start, serve, stop."""
    display = Display(Console(stderr=True, highlight=False))
    low_code = read_low_code(args.serving_properties, os.environ, roles_of(), has_handler=_has_handler(args))
    for line in low_code.lines:
        display.line(line)
    for line in low_code.warnings:
        display.line(line, "yellow")
    settings = _settings(args, low_code)
    trial_key = new_key()
    environ = _child_environ(settings, trial_key, low_code.properties)
    with tempfile.TemporaryDirectory(prefix="tandem-cores-") as folder:
        core_table = Path(folder) / "table"
        make_core_table(core_table, max(available_cores()) + 1)
        plan = replace(_plan(args, settings, low_code, display), core_table=core_table)
        plan = _with_lmi_defaults(plan, low_code, environ, display)
        trial = _check(plan, environ, trial_key)
        log_dir = _log_dir(settings)
        display.line(f"logs: {log_dir}")
        for model in plan.models if plan.pin else ():
            display.line(model.cores.describe(model.name if len(plan.models) > 1 else ""))
        launch = Launch(args.programs, environ, log_dir, on_event=lambda _: None, on_warning=display.warning)
        return _serve(Supervisor(plan, launch, display, trial))


def _serve(supervisor: Supervisor) -> int:
    try:
        asyncio.run(supervisor.run(_announce_ready))
    except MeshFailed as error:
        sys.stderr.write(f"tandem: {error}\n")
        return 1
    return 0


def _settings(args: argparse.Namespace, low_code: LowCode) -> UpSettings:
    given = low_code.of("up") | {
        each.name: getattr(args, each.name) for each in fields(UpSettings) if each.name in args
    }
    if args.serving_properties:
        given = {"http_port": _LMI_PORT} | given
    if "model" in args:
        given["model"] = join_models(args.model)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    config = [f"--config={args.config}"] if args.config else []
    return load_settings(UpSettings, [*flags, *config], prog=NAME).values


def _plan(args: argparse.Namespace, settings: UpSettings, low_code: LowCode, display: Display) -> MeshPlan:
    """What is to be started. Models that services share are downloaded here, once, before any of them starts."""
    overrides = Overrides.read(args.set)
    values = {role: low_code.of(role) | own for role, own in _flags_by_role(args).items()}
    find_draft(values["decode"], settings)
    try:
        models = plan_models(settings, overrides, lambda name: partial(display.loading, f"download {name}"))
    finally:
        display.loaded()
    return MeshPlan(settings, models, hasattr(os, "sched_getaffinity"), config=args.config, values=values)


def _flags_by_role(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    given = {name: getattr(args, name) for name in passed_on() if name in args}
    return split_by_role(given, Overrides.read(args.set).for_all)


def _has_handler(args: argparse.Namespace) -> bool:
    given = {"handler": _flags_by_role(args)["gateway"].get("handler"), "config": args.config}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    return bool(load_settings(HandlerChoice, flags, prog="gateway").values.handler)


def _with_lmi_defaults(plan: MeshPlan, low_code: LowCode, environ: Mapping[str, str], display: Display) -> MeshPlan:
    """For those of the router's settings that flags, environment and file leave alone."""
    origins = plan.origins(plan.router(), environ)
    left = {name: value for name, value in low_code.router_defaults.items() if origins[name] == "default"}
    for name, value in left.items():
        display.line(f"job_queue_size={value} (LMI's default): router.{name} = {value}")
    return replace(plan, values={**plan.values, "router": {**plan.values["router"], **left}})


def _check(plan: MeshPlan, environ: Mapping[str, str], trial_key: str) -> Trial:
    """Raise ConfigurationError for what would fail later; returns the trial that the router's settings allow."""
    router: RouterSettings = plan.resolve(plan.router(), environ)
    _require_keys_file(router, environ)
    identity = router.load_public_tls()
    tls = tandem.Tls(router.public_tls_cert, identity.name) if identity is not None else False
    for worker in plan.workers("127.0.0.1:1"):
        plan.resolve(worker, environ)
    _require_free_port(plan.settings.host, plan.settings.port)
    gateway = plan.gateway("127.0.0.1:1", router)
    if gateway is not None:
        http: GatewaySettings = plan.resolve(gateway, environ)
        _require_installed("uvicorn")
        _require_free_port(http.host, http.port)
    return Trial(router.prefill_threshold if plan.has_prefill else 0, trial_key, tls)


def _require_keys_file(router: RouterSettings, environ: Mapping[str, str]) -> None:
    """Whoever sets TGI's API_KEY believes that nobody gets in without it."""
    if environ.get("API_KEY") and not router.api_keys_file and not router.allow_anonymous:
        raise ConfigurationError(
            "API_KEY is set, but keys are in a file here: make it with `tandem keys new` and give --api-keys-file, "
            "or --allow-anonymous to serve without keys"
        )


def _require_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigurationError("the HTTP gateway is not installed: pip install 'tandem-serve[gateway]'")


def _require_free_port(host: str, port: int) -> None:
    """Only a first look, for a clear message: the router itself binds the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigurationError(f"cannot listen on {host}:{port}, {reason}: choose another port") from error


def _child_environ(settings: UpSettings, trial_key: str, properties: Mapping[str, str]) -> dict[str, str]:
    given = {"TANDEM_HANDLER_PROPERTIES": json.dumps(properties)} if properties else {}
    environ = (
        given
        | os.environ
        | {
            "TANDEM_MESH_KEY": settings.mesh_key or secrets.token_hex(32),
            "TANDEM_TRIAL_KEY_SHA256": digest_of(trial_key),
        }
    )
    packages = Path(__file__).resolve().parent.parent
    if (packages / "pyproject.toml").exists():  # a checkout that need not be installed
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), environ.get("PYTHONPATH"))))
    return environ


def _log_dir(settings: UpSettings) -> Path:
    if not settings.log_dir:
        return Path(tempfile.mkdtemp(prefix="tandem-"))
    folder = Path(settings.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the log folder {folder}: {error.strerror}") from error
    return folder


def _announce_ready(address: str, http_address: str) -> None:
    sys.stdout.write(f"ready {address}\n")
    if http_address:
        sys.stdout.write(f"http http://{http_address}\n")
    sys.stdout.flush()
