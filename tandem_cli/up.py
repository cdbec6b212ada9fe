"""`tandem up`: starts and supervises a mesh."""

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import tandem
from engine.cores import make_core_table
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError, missing_extra
from mesh.domain.host import is_loopback
from mesh.fork_server.client import ForkServer, can_fork
from mesh.interrupts import run_async
from mesh.line_writer import steady_output
from mesh.parent import end_with
from mesh.process import PARENT_ENV
from mesh.rpc.server import require_free
from mesh.settings import as_flags, load_settings
from router.settings import RouterSettings
from router.tenants import digest_of, new_key
from tandem_cli.configuration.low_code import LowCode, find_written, read_low_code, use_written
from tandem_cli.configuration.up_arguments import add_up_arguments, models_of
from tandem_cli.configuration.up_settings import (
    DEFAULT_HTTP_PORT,
    ROLES,
    SWITCHABLE,
    HandlerChoice,
    UpSettings,
    check_names,
    passed_on,
    roles_of,
    split_by_role,
    split_secrets,
)
from tandem_cli.local_mesh.deployment import Deployment, Overrides, find_draft, join_models, prepare_models
from tandem_cli.local_mesh.display import Display
from tandem_cli.local_mesh.hardware import available_cores
from tandem_cli.local_mesh.launcher import Launcher, LocalLauncher, Programs, with_checkout
from tandem_cli.local_mesh.ports import reach_directly, require_distinct_ports, with_http
from tandem_cli.local_mesh.preparation import limited_download, with_decode_host, with_partition, with_switchable
from tandem_cli.local_mesh.scaling import Scaling
from tandem_cli.local_mesh.service_log import make_log_folder
from tandem_cli.local_mesh.supervisor import MeshFailed, Supervisor
from tandem_cli.local_mesh.trial import Trial
from tandem_cli.local_meshes import RunningMesh, registered
from tandem_cli.parser import CommandParser, given
from tandem_cli.terminal import error_console

_REDIS_S = 5.0

PROGRAMS: Programs = {
    name: (sys.executable, "-m", module)
    for name, module in (*((role, module) for role, (module, _) in ROLES.items()), ("switchable", SWITCHABLE))
}


def add_arguments(parser: CommandParser) -> None:
    parser.set_defaults(programs=PROGRAMS)
    add_up_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start the mesh and serve until a signal arrives. Returns the exit status."""
    if (parent := os.environ.get(PARENT_ENV)) is not None:
        end_with(int(parent), signal.SIGTERM)
    with steady_output():
        return _run(args, Display(error_console()))


def _run(args: argparse.Namespace, display: Display) -> int:
    unknown = check_names(args.config, os.environ)
    written = None if args.serving_properties else find_written(models_of(args))
    path = str(written) if written is not None else args.serving_properties
    low_code = read_low_code(path, os.environ, roles_of(), has_handler=_has_handler(args))
    if written is not None:
        use_written(args, low_code)
    for line in low_code.lines:
        display.line(line)
    for line in (*low_code.warnings, *unknown):
        display.line(line, "yellow")
    settings = with_http(_settings(args, low_code, display), display)
    reach_directly(settings.host)
    trial_key = new_key()
    deployment = _prepare(args, settings, low_code, display)
    with tempfile.TemporaryDirectory(prefix="tandem-cores-") as folder:
        core_table = Path(folder) / "table"
        make_core_table(core_table, max(available_cores()) + 1)
        deployment = replace(deployment, core_table=core_table)
        environ = _child_environ(settings, trial_key, _handler_properties(deployment, low_code))
        deployment = _with_lmi_defaults(deployment, low_code, environ, display)
        deployment = with_decode_host(with_switchable(deployment, environ), environ)
        trial = _check(deployment, environ, trial_key)
        deployment = with_partition(deployment, environ, display)  # which may say how many ranks there are
        if settings.on:
            return _serve_on_ray(deployment, display, trial, programs=args.programs, environ=environ)
        deployment = deployment.with_cores_for_ranks(environ, available_cores()).on_devices(environ)
        for model in deployment.models if deployment.pin else ():
            display.line(model.cores.describe(model.name if len(deployment.models) > 1 else ""))
        return _serve(deployment, display, trial, programs=args.programs, environ=environ)


def _serve_on_ray(
    deployment: Deployment, display: Display, trial: Trial, *, programs: Programs, environ: Mapping[str, str]
) -> int:
    if importlib.util.find_spec("ray") is None:
        raise missing_extra("--on ray needs ray", "ray")
    # These import the engine, which a mesh on this machine does not need here.
    from tandem_cli.on_ray.cluster import connected
    from tandem_cli.on_ray.launch import on_ray

    with connected(deployment.settings.on) as cluster:
        placed = on_ray(deployment, environ, cluster, display)
        scaling = Scaling(placed.spares, trial.client) if placed.spares("") else None
        start = partial(_serve, programs=programs, environ=environ, launcher=placed.launcher, scaling=scaling)
        return start(placed.deployment, display, trial)


def _serve(
    deployment: Deployment,
    display: Display,
    trial: Trial,
    *,
    programs: Programs,
    environ: Mapping[str, str],
    launcher: Callable[[LocalLauncher], Launcher] = lambda local: local,
    scaling: Scaling | None = None,
) -> int:
    names = tuple(model.name for model in deployment.models)
    try:
        with (
            _fork_server(deployment, display, programs, environ) as fork_server,
            _log_folder(deployment.settings, display) as log_dir,
            registered(RunningMesh.of_process(os.getpid(), names, log_dir), display.line) as add_addresses,
        ):

            def on_ready(address: str, http_url: str) -> None:
                add_addresses(address, http_url)
                _announce_ready(address, http_url)

            local = LocalLauncher(programs, environ, log_dir, fork_server)
            supervisor = Supervisor(deployment, launcher(local), display, trial, scaling)
            run_async(supervisor.run(on_ready))
    except MeshFailed as error:
        sys.stderr.write(f"tandem: {error}\n")
        return 1
    return 0


@contextmanager
def _fork_server(
    deployment: Deployment, display: Display, programs: Programs, environ: Mapping[str, str]
) -> Iterator[ForkServer | None]:
    if deployment.settings.no_fork or deployment.settings.on or not can_fork():
        yield None
        return
    public_environ, _ = split_secrets("router", environ)
    fork_server = ForkServer([programs[name] for name in deployment.programs], public_environ, display.line)
    try:
        yield fork_server
    finally:
        fork_server.close()


def _settings(args: argparse.Namespace, low_code: LowCode, display: Display) -> UpSettings:
    values = low_code.of("up") | given(args, (setting.name for setting in fields(UpSettings)))
    if models := models_of(args):
        values["model"] = join_models(models)
    if "@" in values.get("registry_url", ""):
        raise ConfigurationError(
            "--registry-url contains a password, and flags are visible to all users: set TANDEM_REGISTRY_URL instead"
        )
    config = {"config": args.config} if args.config else {}
    origins = {name: origin for name, origin in low_code.origins.get("up", {}).items() if name not in args}
    resolved = load_settings(UpSettings, as_flags(**values | config), prog="up", flag_origins=origins)
    settings = resolved.values
    if args.serving_properties and settings.http_port is None and not settings.no_http:
        settings = replace(settings, http_port=DEFAULT_HTTP_PORT)
    if resolved.origins["model"] != "default":
        return settings
    if low_code.model_folder:
        return replace(settings, model=_model_beside(Path(low_code.model_folder), args.serving_properties))
    if any(low_code.values.values()):
        display.line(f"no key or variable names a model: serving the bundled {settings.model}", "yellow")
    return settings


def _model_beside(folder: Path, properties: str) -> str:
    """The folder of serving.properties, whose checkpoint LMI serves if no key names a model. Raises
    ConfigurationError.
    """
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            f"{properties} names no model: set option.model_id, or put the file beside a checkpoint's config.json"
        )
    return str(folder.resolve())


def _handler_properties(deployment: Deployment, low_code: LowCode) -> dict[str, str]:
    """The keys for a handler. `model_id` is the folder of the model, where the handler finds the tokenizer files."""
    folder = {"model_id": deployment.models[0].folder} if len(deployment.models) == 1 else {}
    return low_code.properties | folder


def _prepare(args: argparse.Namespace, settings: UpSettings, low_code: LowCode, display: Display) -> Deployment:
    """The mesh to start. Downloads the models, once, before any service starts."""
    overrides = Overrides.read(args.set)
    flags_by_role = _flags_by_role(args)
    values = {role: low_code.of(role) | role_flags for role, role_flags in flags_by_role.items()}
    begun_s = time.monotonic()
    with limited_download(settings.model_loading_timeout, display) as on_progress:
        find_draft(values["decode"], settings)
        models = prepare_models(settings, overrides, on_progress)
    download_s = time.monotonic() - begun_s if settings.model_loading_timeout is not None else 0.0
    origins = {
        role: {name: origin for name, origin in role_origins.items() if name not in flags_by_role.get(role, {})}
        for role, role_origins in low_code.origins.items()
    }
    for path in (override.partition("=")[0] for override in overrides.for_all):
        role, _, name = path.partition(".")
        origins.setdefault(role, {})[name.replace("-", "_")] = f"--set {path}"
    pin = hasattr(os, "sched_getaffinity")
    return Deployment(
        settings, models, pin, config=args.config, values=values, value_origins=origins, download_s=download_s
    )


def _flags_by_role(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    flags = given(args, passed_on())
    if adapters := flags.get("adapter"):
        flags["adapter"] = ",".join(adapters)
    return split_by_role(flags, Overrides.read(args.set).for_all)


def _has_handler(args: argparse.Namespace) -> bool:
    options = {"handler": _flags_by_role(args)["gateway"].get("handler"), "config": args.config}
    flags = as_flags(**{name: value for name, value in options.items() if value})
    names = [setting.name for setting in fields(GatewaySettings)]
    return bool(load_settings(HandlerChoice, flags, prog="gateway", names=names).values.handler)


def _with_lmi_defaults(
    deployment: Deployment, low_code: LowCode, environ: Mapping[str, str], display: Display
) -> Deployment:
    """Apply LMI's defaults to router settings that no flag, variable or settings file sets."""
    origins = deployment.origins(deployment.router(), environ)
    unset = {name: value for name, value in low_code.router_defaults.items() if origins[name] == "default"}
    for name, value in unset.items():
        display.line(f"job_queue_size={value} (LMI's default): router.{name} = {value}")
    return replace(deployment, values={**deployment.values, "router": {**deployment.values["router"], **unset}})


def _check(deployment: Deployment, environ: Mapping[str, str], trial_key: str) -> Trial:
    """Check all settings and ports before the start. Raises ConfigurationError; returns the trial request to send."""
    router: RouterSettings = deployment.resolve(deployment.router(), environ)
    _require_keys_file(router, environ)
    _require_redis(deployment.settings.routers, router.registry_url)
    public = router.load_public_tls()
    tls = tandem.Tls(router.public_tls_cert, public.latest.name) if public is not None else False
    deployment.worker_settings(environ)
    _require_credentials("--host", deployment.settings.host, router, is_open=router.allow_anonymous)
    require_distinct_ports(deployment, router.metrics_host)
    for port in deployment.settings.router_ports or (0,):
        require_free(deployment.settings.host, port)
    gateway = deployment.gateway(["127.0.0.1:1"], router)
    if gateway is not None:
        http: GatewaySettings = deployment.resolve(gateway, environ)
        _require_credentials("--http-host", http.host, router, is_open=http.allow_anonymous)
        require_free(http.host, http.port)
    return Trial(router.prefill_threshold if deployment.has_prefill else 0, trial_key, tls)


def _require_keys_file(router: RouterSettings, environ: Mapping[str, str]) -> None:
    """Reject TGI's API_KEY if it would not protect the mesh: users who set it expect that clients need a key."""
    if environ.get("API_KEY") and not router.api_keys_file and not router.allow_anonymous:
        raise ConfigurationError(
            "API_KEY is set, but Tandem reads keys from a file: create it with `tandem keys new` and set "
            "--api-keys-file, or set --allow-anonymous to serve without keys"
        )


def _require_credentials(flag: str, host: str, router: RouterSettings, *, is_open: bool) -> None:
    """Reject an address at which the router would not start, or the gateway would refuse every call."""
    if not (is_loopback(host) or router.api_keys_file or is_open):
        raise ConfigurationError(
            f"{flag} {host} lets other machines in, so clients need keys: set --api-keys-file (see: tandem keys), or "
            "--allow-anonymous behind a proxy that authenticates"
        )


def _require_redis(num_routers: int, url: str) -> None:
    """Check that Redis answers. Several routers share their workers and permits through it."""
    if num_routers > 1 and not url:
        raise ConfigurationError(
            f"--routers {num_routers} needs --registry-url redis://HOST:PORT/0: several routers share their workers "
            "and the cap on requests in Redis"
        )
    if not url:
        return
    if importlib.util.find_spec("redis") is None:
        raise missing_extra("registry_url needs redis", "redis")
    from mesh.redis_connection import FAILURES, cause_of, open_redis

    async def ping() -> None:
        async with open_redis(url, timeout_s=_REDIS_S) as redis:
            await redis.ping()

    try:
        run_async(ping())
    except FAILURES as error:  # the message has host and port, never the URL, which may contain a password
        raise ConfigurationError(f"the Redis of registry_url does not answer: {cause_of(error)}") from error


def _child_environ(settings: UpSettings, trial_key: str, properties: Mapping[str, str]) -> dict[str, str]:
    handler_environ = {"TANDEM_HANDLER_PROPERTIES": json.dumps(properties)} if properties else {}
    mesh_environ = {
        "TANDEM_MESH_KEY": settings.mesh_key or secrets.token_hex(32),
        "TANDEM_TRIAL_KEY_SHA256": digest_of(trial_key),
    }
    if settings.registry_url:
        mesh_environ["TANDEM_REGISTRY_URL"] = settings.registry_url
    return with_checkout(handler_environ | os.environ | mesh_environ)


@contextmanager
def _log_folder(settings: UpSettings, display: Display) -> Iterator[Path]:
    """The folder for logs. A temporary folder is removed at the end, unless there were failures or warnings."""
    if settings.log_dir:
        folder = _create_log_folder(settings.log_dir)
        display.line(f"logs: {folder}")
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="tandem-"))
    display.line(f"logs: {folder}")
    is_clean = False
    try:
        yield folder
        is_clean = not display.has_warned
    finally:
        if is_clean:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            display.line(f"logs are kept in {folder}")


def _create_log_folder(path: str) -> Path:
    folder = Path(path)
    try:
        make_log_folder(folder)
    except OSError as error:
        raise ConfigurationError(f"cannot create the log folder {folder}: {error.strerror}") from error
    return folder


def _announce_ready(address: str, http_url: str) -> None:
    sys.stdout.write(f"ready {address}\n")
    if http_url:
        sys.stdout.write(f"chat {http_url}\n")
    sys.stdout.flush()
