"""The generation services of a router by the names of their models: also by a name that stands for several, or that of
an adapter."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from mesh.domain.errors import InvalidRequest, ModelNotFound
from router.answer_stream import Answer
from router.journal import Journal
from router.served_model import ModelStatus
from router.service import GenerationService
from router.traffic import Traffic, conversation_key
from router.validation import GenerateParams
from router.workers.mesh_view import shown

_MAX_SHOWN_CHARS = 128


class ServiceDirectory:
    """All models of a router, by name. A request without a name means the only model."""

    def __init__(self, services: Sequence[GenerationService], journal: Journal, traffic: Traffic) -> None:
        self._by_name = {service.model.name: service for service in services}
        self.counting_refusals = journal.counting_refusals
        self._traffic = traffic

    async def generate(self, params: GenerateParams, time_left_s: float | None) -> Answer:
        """Start generating with the request's model. Raises the errors of `find` and GenerationService.generate."""
        name, begun_s = self._public_name(params.model), time.monotonic()
        if params.adapter or not self._is_served(name):
            await asyncio.gather(*(service.adapters_known() for service in self.all()))
            time_left_s = None if time_left_s is None else time_left_s - (time.monotonic() - begun_s)
        params = self._with_revision(params, name)
        service = self.find(params.model)
        answer = await service.generate(_with_adapter(params, service.model.name), time_left_s)
        if params.revision:
            self._traffic.began(name, params.revision)
        return answer

    def _is_served(self, name: str) -> bool:
        """True for the name of a model, or of several, that needs no adapter."""
        return not name or name in self._by_name or bool(self._traffic.revisions(name))

    def _with_revision(self, params: GenerateParams, name: str) -> GenerateParams:
        """Choose the model that answers, if `name` stands for several revisions."""
        if not self._traffic.revisions(name):
            return params  # without the hash of a prompt that may be long
        model = self._traffic.choose(name, conversation_key(params.prompt, params.tenant.name))
        return replace(params, model=model, revision=model)

    def _public_name(self, name: str) -> str:
        """The only name that clients need if they give none."""
        names = self._traffic.public_names()
        return names[0] if not name and len(names) == 1 else name

    def _shared_names(self) -> list[str]:
        """The names that stand for several models."""
        return [name for name in self._traffic.public_names() if name not in self._by_name]

    def status(self, name: str) -> ModelStatus:
        """Return the model with its present limits; for a name that stands for several, the one with the largest share.
        Raises the errors of `find`.
        """
        name = self._public_name(name)
        revisions = [self._by_name[model].status() for model in self._traffic.revisions(name)]
        if not revisions:
            return self.find(name).status()
        return replace(
            revisions[0],
            model=replace(revisions[0].model, name=name),
            ready=any(revision.ready for revision in revisions),
            max_concurrent_requests=sum(revision.max_concurrent_requests for revision in revisions),
            since_unix_s=min(revision.since_unix_s for revision in revisions),
        )

    def all_statuses(self) -> list[ModelStatus]:
        """All models, in the order of the settings, after the names that stand for several of them."""
        return [self.status(name) for name in (*self._shared_names(), *self._by_name)]

    def find(self, name: str) -> GenerationService:
        """The service of a model, also by the name of one of its adapters, or by one that stands for several models.
        Raises ModelNotFound; InvalidRequest if the name is empty and there are several models, or if several models
        have such an adapter.
        """
        name = self._public_name(name)
        for known in (name, *self._traffic.revisions(name)):
            if known in self._by_name:
                return self._by_name[known]
        adapters = [(adapter, service) for service in self.all() for adapter in service.status().adapters]
        with_it = [service for adapter, service in adapters if adapter == name]
        if len(with_it) > 1:
            models = ", ".join(service.model.name for service in with_it)
            raise InvalidRequest(f"model: {models} have an adapter {name!r}: name one of them, and the adapter")
        if with_it:
            return with_it[0]
        served = shown([*self._shared_names(), *self._by_name, *(adapter for adapter, _ in adapters)])
        if name:
            raise ModelNotFound(f"model {name[:_MAX_SHOWN_CHARS]!r} is not served here; served: {served}")
        if len(self._by_name) > 1:
            raise InvalidRequest(f"model: name one of those served here: {served}")
        return next(iter(self._by_name.values()))

    def all(self) -> list[GenerationService]:
        """All services, in the order of the settings."""
        return list(self._by_name.values())

    async def drain(self, grace_s: float) -> None:
        """Drain all models at the same time; see GenerationService.drain."""
        await asyncio.gather(*(service.drain(grace_s) for service in self.all()))


def _with_adapter(params: GenerateParams, model: str) -> GenerateParams:
    """The parameters, whose adapter may stand in place of the model's name. Raises InvalidRequest for two adapters."""
    if params.model in ("", model):
        return params
    if params.adapter not in ("", params.model):
        raise InvalidRequest(
            f"model {params.model[:_MAX_SHOWN_CHARS]!r} is an adapter, and adapter names another: give one of them"
        )
    return replace(params, adapter=params.model)
