"""The request with which `tandem up` tries a mesh that has started."""

from dataclasses import dataclass, field

import tandem

_TRIAL_S = 120.0
_TRIAL_TEXT = "Hello"


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial request, sent before the mesh is reported as ready: two tokens of each model, through all parts.

    Its prompt is longer than `prefill_threshold`, so that a prefill worker takes part.
    """

    prefill_threshold: int = 0
    api_key: str | None = field(default=None, repr=False)
    tls: tandem.Tls | bool = False

    def client(self, address: str) -> tandem.AsyncClient:
        """A client for the routers at `address`, with the key of the trial."""
        return tandem.AsyncClient(address, api_key=self.api_key, tls=self.tls, timeout=_TRIAL_S)

    async def __call__(self, address: str) -> None:
        """Send the request to each model of the router at `address`. Raises TandemError if one fails."""
        async with self.client(address) as client:
            for model in await client.models():
                await self._try(client, model)

    async def _try(self, client: tandem.AsyncClient, model: tandem.Model) -> None:
        ids = [token.id for token in await client.tokenize(prompt=_TRIAL_TEXT, model=model.name)] or [0]
        repeats = self.prefill_threshold // len(ids) + 1
        prompt = (ids * repeats)[: min(model.max_input_tokens, model.max_total_tokens - 2)]
        await client.generate(token_ids=prompt, model=model.name, max_new_tokens=2, ignore_eos=True)
