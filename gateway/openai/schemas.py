"""Bodies of OpenAI requests, with vLLM's extensions. validation.py and the router check ranges."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.schema import (
    MAX_MESSAGES,
    AnyJson,
    Bias,
    Body,
    Count,
    Few,
    JsonObject,
    Many,
    Name,
    Real,
    StructuredBody,
    TokenIds,
)

# Wide enough that validation.py reports a seed out of range, in OpenAI's words.
_Seed = Annotated[int, Field(ge=-(2**127), lt=2**127)]


class StreamOptions(Body):
    """Whether a stream reports usage: in a final chunk, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(StructuredBody):
    """Members of both kinds of request. The first group is OpenAI's, the second is extensions."""

    model: Name = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: Bias | None = None
    seed: _Seed | None = None
    stop: str | Few[str] | None = None

    top_k: Count | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    min_tokens: Count | None = None
    stop_token_ids: Few[Count] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    typical_p: Real | None = None
    bad_words: Few[str] | None = None
    truncate_prompt_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool = False
    priority: Literal["batch", "standard", "interactive"] | None = None
    ttft_target: Real | None = None
    return_token_ids: bool = False


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: str | Many[str] | TokenIds | Many[TokenIds]
    max_tokens: Count | None = 16
    echo: bool = False
    logprobs: Count | None = None
    suffix: str | None = None
    best_of: Count | None = None

    @property
    def scores_only(self) -> bool:
        """True if the request only scores its prompt: the prompt is echoed, and nothing is generated."""
        return self.max_tokens == 0 and self.echo

    @property
    def can_stream(self) -> bool:
        """False for options that need a complete answer: scores only, and best_of."""
        return not self.scores_only and self.best_of in (None, self.n or 1)


class ContentPart(Body):
    """A part of a message's content. Only text is supported."""

    type: Name
    text: str = ""


class Message(Body):
    """One turn of the conversation."""

    role: Name
    content: str | Many[ContentPart] | None = None
    tool_calls: Few[JsonObject] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning_content: str | None = None


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Few[JsonObject] | None = None
    tool_choice: AnyJson = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool = True
