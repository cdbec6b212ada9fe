"""`python -m gateway.handler`: the process that runs a user's code. The gateway starts it."""

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway.handler.server import HandlerServer, load_user_code
from gateway.server import serving_at
from gateway.settings import parse_properties
from mesh.parent import end_with
from mesh.process import ProcessSettings, ServiceProgram, tell_parent, until_stopped
from mesh.settings import setting

log = structlog.get_logger(__name__)

_GRACE_S = 5.0
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True)
class HandlerSettings(ProcessSettings):
    """Settings that the gateway passes as flags."""

    file: str = setting(..., "the user's model.py")
    function: str = setting("handle", "name of the function to call")
    socket: str = setting(..., "Unix socket to listen at")
    router: str = setting("", "router's address, for the handler's own calls")
    gateway_pid: int = setting(..., "process that has started this one, and with which it ends")
    handler_properties: str = setting("{}", "JSON object: the operator's own properties", secret=True)


async def serve(settings: HandlerSettings) -> None:
    """Load the user's code, call it once with an empty Input, then serve until stopped."""
    end_with(settings.gateway_pid, signal.SIGKILL)  # the user's code may be busy when standard input closes
    path = Path(settings.file).resolve()  # noqa: ASYNC240  (nothing else runs yet)
    os.environ["TANDEM_ADDRESS"] = settings.router
    if (requirements := path.with_name("requirements.txt")).is_file():
        log.warning(
            "requirements of the custom handler are not installed: install them yourself",
            file=str(requirements),
        )
    code = load_user_code(path, settings.function)
    properties = {"model_dir": str(path.parent), "device_id": "-1", "router": settings.router}
    properties |= dict.fromkeys(("tensor_parallel_degree", "pipeline_parallel_degree", "cluster_size"), "1")
    handler = HandlerServer(code, parse_properties(settings.handler_properties) | properties)
    await handler.load()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(settings.socket)
        listener.listen(_BACKLOG)
        async with serving_at(handler.app(), listener, _GRACE_S):
            tell_parent("ready", parts=code.parts)
            await until_stopped(settings)


if __name__ == "__main__":
    sys.exit(ServiceProgram("handler", HandlerSettings, serve).main())
