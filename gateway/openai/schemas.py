"""Bodies of OpenAI requests, with the extensions that vLLM's clients send. Ranges are the router's to check."""

from typing import Any, Literal

from pydantic import Field

from gateway.schema import Body
from gateway.structures import StructuredBody


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(StructuredBody):
    """Members that both kinds of request have. The first group is OpenAI's, the second ours."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    typical_p: float | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool = False
    priority: Literal["batch", "standard", "interactive"] | None = None
    ttft_target: float | None = None
    return_token_ids: bool = False


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def scores_only(self) -> bool:
        """True if nothing is to be generated: the prompt comes back, with its log-probs if they are asked for."""
        return self.max_tokens == 0 and self.echo


class ContentPart(Body):
    """A part of a message's content; only text can be served."""

    type: str
    text: str = ""


class Message(Body):
    """A turn of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
