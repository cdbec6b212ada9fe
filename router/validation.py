"""Validates the parameters and lengths of public requests, and completes them with defaults."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mesh.domain.cache_hints import NO_HINTS, CacheHints
from mesh.domain.errors import InvalidRequest, TooLarge
from mesh.domain.request import (
    MAX_NUM_CHOICES,
    MAX_PROMPT_LOGPROBS,
    MAX_RANKED_EVENTS,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from router.admission.fair_queue import QueueEntry
from router.tenants import ANONYMOUS, Priority, Tenant
from router.text.chat import ChatPrompt, Prompt, TextPrompt

MAX_CHAT_MESSAGES = 4096
CHAT_ROLES = ("system", "user", "assistant", "tool")
_EMPTY = "the prompt is empty: at least one token is needed"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that hold for a request now. `common_total_tokens`: the longest sequence that all decode workers can
    hold, where the largest of them can hold `max_total_tokens`.
    """

    max_input_tokens: int
    max_total_tokens: int
    common_total_tokens: int

    def default_new_tokens(self, num_prompt_tokens: int) -> int:
        """Return max_new_tokens of a request that does not say it: so many that any decode worker can serve it, unless
        its prompt takes more than half of a small worker."""
        is_common = 2 * num_prompt_tokens <= self.common_total_tokens
        return (self.common_total_tokens if is_common else self.max_total_tokens) - num_prompt_tokens


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A client's parameters, unchecked. `priority` None means the tenant's own.

    `best_of`: generate this many choices and return the best `num_choices` at the end. `ttft_target_s`: a first token
    later than this is worthless to the client. `adapter`: the name of a LoRA adapter, empty for the base model.
    `include_eos`: None means as `include_stop`. `own_bytes`: tokens have their bytes beside the text that they add.
    `cache_hints`: what the client says about the KV afterwards.
    `revision`: the model that the router has chosen for a name that stands for several (traffic.py); empty otherwise.
    """

    prompt: Prompt | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    num_choices: int = 1
    best_of: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    echo: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_eos: bool | None = None
    own_bytes: bool = False
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    client_request_id: str = ""
    tenant: Tenant = ANONYMOUS
    priority: Priority | None = None
    ttft_target_s: float | None = None
    adapter: str = ""
    cache_hints: CacheHints = NO_HINTS
    revision: str = ""

    @property
    def num_generated_choices(self) -> int:
        """Number of choices to generate, returned or not."""
        return self.num_choices if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that has passed all checks. `sampling.max_new_tokens` and `sampling.seed` are set.

    `decoder_prompt`: the decoder's start tokens of an encoder-decoder model, which `worker_prompt` appends.
    `in_reasoning`: the prompt ends within the model's reasoning. `adapter`: the digest of its LoRA adapter, the same in
    all attempts; empty for the base model.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    params: GenerateParams
    queue_entry: QueueEntry = field(default_factory=QueueEntry)
    decoder_prompt: tuple[int, ...] = ()
    in_reasoning: bool = False
    adapter: str = ""

    @property
    def worker_prompt(self) -> tuple[int, ...]:
        """The prompt as it is sent to workers."""
        return self.prompt_ids + self.decoder_prompt


def check_counts(params: GenerateParams, *, max_choices: int) -> None:
    """Check counts and targets, which needs no tokenizer, before any work is done. Raises InvalidRequest."""
    limit = min(MAX_NUM_CHOICES, max_choices)
    if not 1 <= params.num_choices <= limit:
        raise InvalidRequest(f"num_choices must be in [1, {limit}], got {params.num_choices}")
    if params.best_of is not None and not params.num_choices <= params.best_of <= limit:
        raise InvalidRequest(f"best_of must be in [num_choices = {params.num_choices}, {limit}], got {params.best_of}")
    if not 0 <= params.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {params.top_logprobs}")
    if params.ttft_target_s is not None and not 0 < params.ttft_target_s < math.inf:
        raise InvalidRequest(f"ttft_target must be > 0, got {params.ttft_target_s:g} s")


def check_encoder_decoder(params: GenerateParams) -> None:
    """Refuse parameters that make no sense when an encoder reads the prompt. Raises InvalidRequest."""
    if params.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs: an encoder-decoder model does not predict its prompt")
    if params.echo:
        raise InvalidRequest("echo: an encoder-decoder model's text does not continue its prompt")


def require_prompt(prompt: Prompt | None, *, may_be_empty: bool = False) -> Prompt:
    """Return the prompt. Raises InvalidRequest if it is missing, is an empty text, or has messages of unknown roles."""
    if prompt is None:
        raise InvalidRequest("input is missing: give a prompt, token_ids or chat messages")
    if isinstance(prompt, TextPrompt) and not prompt.text and not may_be_empty:
        raise InvalidRequest(_EMPTY)
    if isinstance(prompt, ChatPrompt):
        _check_roles(prompt)
    return prompt


def _check_roles(chat: ChatPrompt) -> None:
    if not chat.messages:
        raise InvalidRequest("chat.messages is empty: at least one message is needed")
    for index, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            raise InvalidRequest(
                f"chat.messages[{index}].role must be one of {', '.join(CHAT_ROLES)}, got {message.role[:64]!r}"
            )


def check_prompt_ids(prompt_ids: Sequence[int], *, vocab_size: int, limits: Limits) -> None:
    """Check the prompt's length and that its ids are in the vocabulary. Raises TooLarge or InvalidRequest."""
    if not prompt_ids:
        raise InvalidRequest(_EMPTY)
    if len(prompt_ids) > limits.max_input_tokens:
        raise TooLarge(
            f"the prompt has {len(prompt_ids)} tokens, at most {limits.max_input_tokens} (max_input_length) are allowed"
        )
    highest = max(prompt_ids)
    if highest >= vocab_size:
        raise InvalidRequest(f"token_ids: token id {highest} is not in the vocabulary of {vocab_size}")


def check_best_of(valid: ValidRequest) -> None:
    """Bound the memory of `best_of`: ranked choices are kept until the end. Raises InvalidRequest."""
    params, max_new = valid.params, valid.sampling.max_new_tokens or 0
    num_events = params.num_generated_choices * max_new * (1 + params.top_logprobs)
    if params.best_of is not None and num_events > MAX_RANKED_EVENTS:
        raise InvalidRequest(
            f"best_of ({params.best_of}) * max_new_tokens ({max_new}) * (1 + top_logprobs ({params.top_logprobs})) "
            f"must be <= {MAX_RANKED_EVENTS}"
        )


def check_prompt_logprobs(params: GenerateParams, num_prompt_tokens: int) -> None:
    """Bound the memory of the prompt's log-probs: they are kept until the first token. Raises InvalidRequest."""
    num_logprobs = num_prompt_tokens * (1 + params.top_logprobs)
    if params.prompt_logprobs and num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs: prompt tokens ({num_prompt_tokens}) * (1 + top_logprobs ({params.top_logprobs})) "
            f"must be <= {MAX_PROMPT_LOGPROBS}"
        )


def with_stop_strings(params: GenerateParams, stop_strings: tuple[str, ...]) -> GenerateParams:
    """Return parameters whose answer ends with the model's stop strings, too. As in transformers, those of the request
    take their place. An answer that ignores end tokens, or has a structure, does not end with them.
    """
    sampling = params.sampling
    if not stop_strings or sampling.stop or sampling.ignore_eos or sampling.structure is not None:
        return params
    return replace(params, sampling=replace(sampling, stop=stop_strings))


def complete_sampling(
    sampling: SamplingParams,
    *,
    num_prompt_tokens: int,
    vocab_size: int,
    limits: Limits,
    spellings: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """Return parameters with a seed, max_new_tokens and the spellings of their bad words. Raises TooLarge or
    InvalidRequest.

    `sampling` has passed SamplingParams.validate, so only what is added is checked here.
    """
    if spellings:
        sampling = replace(sampling, bad_word_ids=(*sampling.bad_word_ids, *spellings))
        sampling.validate_bad_words(vocab_size)
    max_new = sampling.max_new_tokens
    if max_new is None:
        max_new = limits.default_new_tokens(num_prompt_tokens)
    if num_prompt_tokens + max_new > limits.max_total_tokens:
        raise TooLarge(
            f"prompt tokens ({num_prompt_tokens}) + max_new_tokens ({max_new}) must be <= max_total_tokens "
            f"({limits.max_total_tokens})"
        )
    seed = random.randint(0, MAX_SEED) if sampling.seed is None else sampling.seed
    completed = replace(sampling, max_new_tokens=max_new, seed=seed)
    completed.validate_lengths()
    return completed
