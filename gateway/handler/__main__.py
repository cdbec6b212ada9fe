"""`python -m gateway.handler`: the process that a user's code runs in. The gateway starts it."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway.handler.server import HandlerServer
from gateway.handler.user_code import load_user_code
from gateway.server import serving_at
from gateway.settings import parse_properties
from mesh.process import ProcessSettings, ServiceProgram, announce, until_stopped
from mesh.settings import setting

log = structlog.get_logger(__name__)

_GRACE_S = 5.0
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True)
class HandlerSettings(ProcessSettings):
    """What the gateway hands over."""

    file: str = setting(..., "the user's model.py")
    function: str = setting("handle", "name of the function to call")
    socket: str = setting(..., "Unix socket to listen at")
    router: str = setting("", "router's address, for the handler's own calls")
    handler_properties: str = setting("{}", "JSON object: the operator's own properties", secret=True)


async def serve(settings: HandlerSettings) -> None:
    """Load the code, call it once, serve."""
    path = Path(settings.file).resolve()  # noqa: ASYNC240  (nothing else runs yet)
    os.environ["TANDEM_ADDRESS"] = settings.router
    if (requirements := path.with_name("requirements.txt")).is_file():
        log.warning("requirements of the custom handler are not installed: do it yourself", file=str(requirements))
    code = load_user_code(path, settings.function)
    own = {"model_dir": str(path.parent), "device_id": "-1", "router": settings.router}
    own |= dict.fromkeys(("tensor_parallel_degree", "pipeline_parallel_degree", "cluster_size"), "1")
    handler = HandlerServer(code, parse_properties(settings.handler_properties) | own)
    await handler.load()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(settings.socket)
        listener.listen(_BACKLOG)
        async with serving_at(handler.app(), listener, _GRACE_S):
            announce("ready", parts=code.parts)
            await until_stopped(settings)


if __name__ == "__main__":
    sys.exit(ServiceProgram("handler", HandlerSettings, serve).main())
