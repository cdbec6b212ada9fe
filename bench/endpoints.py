"""What is measured: a mesh behind its router, or another server; opened for a while."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import tandem
from bench.load import Target
from bench.meshes import own_mesh
from bench.plan import Arm
from bench.targets import mesh_target
from mesh.domain.errors import ConfigurationError
from tandem.sync import ClientOptions


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An open connection. `blocking` makes a client for threads; None where there is none."""

    target: Target
    vocab_size: int
    max_total_tokens: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    as_text: bool = False
    blocking: Callable[[], tandem.Client] | None = None


Opener = Callable[[], AbstractAsyncContextManager[Endpoint]]


@dataclass(frozen=True)
class OpenAIServer:
    """Where another server is, and how it wants its prompts."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    vocab_size: int = 1000
    as_text: bool = False


@asynccontextmanager
async def mesh_endpoint(address: str, model: str | None, options: ClientOptions) -> AsyncIterator[Endpoint]:
    """A mesh that runs already. Refusals are counted, so nothing is tried twice."""
    options = {**options, "max_retries": 0}
    async with tandem.AsyncClient(address, **options) as client:
        served = await client.model(model or "")
        workers = [{"id": each.worker_id, "role": each.role, "device": each.device} for each in await client.workers()]
        yield Endpoint(
            mesh_target(client, model),
            served.vocab_size,
            served.max_total_tokens,
            {"server": f"grpc://{address}", "model": served.name, "workers": workers},
            blocking=lambda: tandem.Client(address, **options),
        )


@asynccontextmanager
async def own_endpoint(arm: Arm) -> AsyncIterator[Endpoint]:
    """A mesh started for this and stopped afterwards."""
    async with own_mesh(arm.up, arm.pace) as address, mesh_endpoint(address, None, {}) as endpoint:
        endpoint.about["up"] = list(arm.up)
        if arm.pace:
            endpoint.about["pace"] = arm.pace
        yield endpoint


@asynccontextmanager
async def openai_endpoint(server: OpenAIServer) -> AsyncIterator[Endpoint]:
    """An OpenAI-compatible server that runs already. Raises ConfigurationError without the extra that this needs."""
    try:
        from bench.openai import OpenAITarget
    except ImportError as error:
        raise ConfigurationError("--openai needs the extra: pip install 'tandem-serve[bench]'") from error
    async with OpenAITarget(server.url, server.model, api_key=server.api_key) as target:
        about = {"server": server.url, "model": server.model}
        yield Endpoint(target, server.vocab_size, about=about, as_text=server.as_text)
