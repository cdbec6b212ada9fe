"""An OpenAI-compatible server as a target: streamed answers over HTTP.

Prompts and token ids go to /v1/completions, conversations to /v1/chat/completions. An answer is complete if it has a
finish reason. Any other end, such as a stream that just stops, is a failure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2

from tandem_cli.load_test.figures import Failed, Refused
from tandem_cli.load_test.jobs import Job
from tandem_cli.load_test.load_generator import OnToken, TokenCounts

_TOO_MANY_REQUESTS = 429
_TIMEOUT_S = 600.0
_FINISH_REASONS = ("length", "stop", "eos_token", "stop_sequence")
_END = "[DONE]"
_MAX_ERROR_CHARS = 200


class OpenAITarget:
    """A `Target` (see load_generator.py) for one server. Use it as a context manager."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A connection pool smaller than the load would queue requests in the client.
        self._client = httpx2.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
            headers=headers,
            timeout=_TIMEOUT_S,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def __call__(self, job: Job, on_token: OnToken) -> TokenCounts:
        path = "chat/completions" if job.messages is not None else "completions"
        completion = _Completion(on_token)
        try:
            async with self._client.stream("POST", path, json=_body(job, self._model)) as response:
                await _require_success(response)
                async for event in httpx2.EventSource(response):
                    if event.data != _END:
                        completion.add(event.data)
        except httpx2.HTTPError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        return completion.reply()


def _body(job: Job, model: str) -> dict[str, object]:
    prompt = list(job.token_ids) if job.token_ids is not None else job.prompt
    body: dict[str, object] = {"messages": list(job.messages)} if job.messages is not None else {"prompt": prompt}
    body |= {"model": model, "max_tokens": job.max_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if job.ignore_eos:
        body["ignore_eos"] = True  # not part of OpenAI's API, but common among servers
    return body


async def _require_success(response: httpx2.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")[:_MAX_ERROR_CHARS]
    kind = Refused if response.status_code == _TOO_MANY_REQUESTS else Failed
    raise kind(f"HTTP {response.status_code}: {text}")


@dataclass(slots=True)
class _Completion:
    """Collects the messages of one stream."""

    on_token: OnToken
    num_messages: int = 0
    reason: str | None = None
    usage: Mapping[str, Any] | None = None

    def add(self, data: str) -> None:
        """Add one message. Raises Failed for an error message, and for one that is not a completion."""
        try:
            message = json.loads(data)
            error, choices = message.get("error"), message.get("choices") or ()
            usage = message.get("usage")
        except (ValueError, AttributeError) as broken:
            raise Failed(f"not a completion: {data[:_MAX_ERROR_CHARS]}") from broken
        if error:
            raise Failed(f"the stream ended with: {str(error)[:_MAX_ERROR_CHARS]}")
        self.usage = usage or self.usage
        for choice in choices:
            self.reason = choice.get("finish_reason") or self.reason
            if _has_token(choice):
                self.num_messages += 1
                self.on_token()

    def reply(self) -> TokenCounts:
        """Token counts from the server; without them, messages are counted instead. Raises Failed for an incomplete
        answer.
        """
        if self.reason not in _FINISH_REASONS:
            raise Failed(f"the answer ended with: {self.reason}" if self.reason else "the stream broke off")
        usage = self.usage or {}
        return TokenCounts(usage.get("completion_tokens") or self.num_messages, usage.get("prompt_tokens") or 0)


def _has_token(choice: Mapping[str, Any]) -> bool:
    """True if a message has tokens. A text is empty while a part of a character is held back; the first message of a
    chat has a role and no token.
    """
    if "delta" in choice:
        delta = choice["delta"]
        return bool(delta.get("content") or delta.get("reasoning_content"))
    return bool(choice.get("text")) or choice.get("finish_reason") is None
