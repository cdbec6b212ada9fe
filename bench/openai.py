"""Any OpenAI-compatible server as a target: streamed answers over HTTP.

Prompts and token ids go to /v1/completions, conversations to /v1/chat/completions. A whole answer is one that had a
finish reason; everything else, such as a stream that just stops, has failed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2

from bench.jobs import Job
from bench.load import OnToken, Reply
from bench.records import Failed, Refused

_TOO_MANY_REQUESTS = 429
_WHOLE = ("length", "stop", "eos_token", "stop_sequence")
_END = "[DONE]"
_SHOWN = 200


class OpenAITarget:
    """A Target of bench.load; to be used as a context manager."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Without limits: a pool smaller than the load would queue requests here.
        self._client = httpx2.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
            headers=headers,
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def __call__(self, job: Job, on_token: OnToken) -> Reply:
        """Send one job."""
        path = "chat/completions" if job.messages is not None else "completions"
        answer = _Answer(on_token)
        try:
            async with self._client.stream("POST", path, json=_body(job, self._model)) as response:
                await _require_success(response)
                async for event in httpx2.EventSource(response):
                    if event.data != _END:
                        answer.add(event.data)
        except httpx2.HTTPError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        return answer.reply()


def _body(job: Job, model: str) -> dict[str, Any]:
    prompt = list(job.token_ids) if job.token_ids is not None else job.prompt
    asked: dict[str, Any] = {"messages": list(job.messages)} if job.messages is not None else {"prompt": prompt}
    asked |= {"model": model, "max_tokens": job.max_tokens, "temperature": 0}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if job.ignore_eos:
        asked["ignore_eos"] = True  # not OpenAI's own, but known to the servers one would measure
    return asked


async def _require_success(response: httpx2.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")[:_SHOWN]
    kind = Refused if response.status_code == _TOO_MANY_REQUESTS else Failed
    raise kind(f"HTTP {response.status_code}: {text}")


@dataclass(slots=True)
class _Answer:
    """Reads the messages of one stream."""

    on_token: OnToken
    num_messages: int = 0
    reason: str | None = None
    usage: Mapping[str, Any] | None = None

    def add(self, data: str) -> None:
        """Take one message. Raises Failed if it is an error, or not what this protocol has."""
        try:
            message = json.loads(data)
            error, choices = message.get("error"), message.get("choices") or ()
            usage = message.get("usage")
        except (ValueError, AttributeError) as broken:
            raise Failed(f"not a completion: {data[:_SHOWN]}") from broken
        if error:
            raise Failed(f"the stream ended with: {str(error)[:_SHOWN]}")
        self.usage = usage or self.usage
        for choice in choices:
            self.reason = choice.get("finish_reason") or self.reason
            if _has_token(choice):
                self.num_messages += 1
                self.on_token()

    def reply(self) -> Reply:
        """The server's counts; without them, messages are taken for tokens. Raises Failed for half an answer."""
        if self.reason not in _WHOLE:
            raise Failed(f"the answer ended with: {self.reason}" if self.reason else "the stream broke off")
        usage = self.usage or {}
        return Reply(usage.get("completion_tokens") or self.num_messages, usage.get("prompt_tokens") or 0)


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Texts may be empty while half a character is held back; a chat's first message has a role and no token."""
    if "delta" in choice:
        delta = choice["delta"]
        return bool(delta.get("content") or delta.get("reasoning_content"))
    return bool(choice.get("text")) or choice.get("finish_reason") is None
