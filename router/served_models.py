"""All models of a router, by name."""

import asyncio
from collections.abc import Sequence

from mesh.domain.errors import InvalidRequest, LayoutMismatch, MeshError, ModelNotFound
from mesh.domain.worker import WorkerInfo
from router.answer import Answer
from router.journal import Journal
from router.served_model import ServedModel
from router.service import GenerationService
from router.validation import GenerateInput

_MAX_SHOWN_CHARS = 128


class ServedModels:
    """Finds a request's model. A request that names none means the only one there is."""

    def __init__(self, services: Sequence[GenerationService], journal: Journal) -> None:
        self._by_name = {service.model.name: service for service in services}
        self._journal = journal

    async def generate(self, asked: GenerateInput, time_left_s: float | None) -> Answer:
        """See GenerationService.generate; raises what `find` raises, too."""
        try:
            service = self.find(asked.model)
        except MeshError as error:
            self._journal.refused(type(error).__name__)
            raise
        return await service.generate(asked, time_left_s)

    def find(self, name: str) -> GenerationService:
        """Raises ModelNotFound; InvalidRequest without a name where there are several."""
        if name in self._by_name:
            return self._by_name[name]
        served = ", ".join(self._by_name)
        if name:
            raise ModelNotFound(f"model {name[:_MAX_SHOWN_CHARS]!r} is not served here; served: {served}")
        if len(self._by_name) > 1:
            raise InvalidRequest(f"model: name one of those served here: {served}")
        return next(iter(self._by_name.values()))

    def all(self) -> list[GenerationService]:
        """In the order of the settings."""
        return list(self._by_name.values())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end within the grace, then end the rest with a clear error."""
        await asyncio.gather(*(service.drain(grace_s) for service in self.all()))


def require_fits_one(models: Sequence[ServedModel], info: WorkerInfo) -> None:
    """Raise LayoutMismatch, with both values, for a worker of another model, or of another tokenizer."""
    model = next((model for model in models if model.name == info.model), None)
    if model is None:
        names = " and ".join(repr(model.name) for model in models)
        raise LayoutMismatch(f"the router serves model {names}, worker {info.worker_id} {info.model!r}")
    model.require_fits(info)
