"""The one validator for public requests: what a client asked for, checked and completed."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mesh.domain.errors import InvalidRequest
from mesh.domain.sampling import MAX_CHOICES, MAX_RANKED_EVENTS, MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams
from router.claim import Claim
from router.limits import Limits
from router.prompts import ChatPrompt, Prompt, TextPrompt
from router.tenants import ANONYMOUS, Priority, Tenant
from router.text.stream import TextRules

CHAT_ROLES = ("system", "user", "assistant", "tool")

_EMPTY = "the prompt is empty: at least one token is needed"


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """What a client asked for, not yet checked. `prompt` is None if none was given, `priority` if the tenant's holds.

    `best_of`: generate so many, and return the best `num_choices` of them at the end. `ttft_target_s`: a first token
    later than this is of no use.
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
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    client_request_id: str = ""
    tenant: Tenant = ANONYMOUS
    priority: Priority | None = None
    ttft_target_s: float | None = None

    @property
    def num_generated_choices(self) -> int:
        """Choices that are generated, whether returned or not."""
        return self.num_choices if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that keeps every rule. `sampling.max_new_tokens` and `sampling.seed` are set.

    For workers `decoder_prompt` follows the prompt: what an encoder-decoder model's decoder begins with.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    asked: GenerateInput
    claim: Claim = field(default_factory=Claim)
    decoder_prompt: tuple[int, ...] = ()

    @property
    def worker_prompt(self) -> tuple[int, ...]:
        """The prompt as workers get it."""
        return self.prompt_ids + self.decoder_prompt

    @property
    def text_rules(self) -> TextRules:
        """What becomes of its text."""
        return TextRules(
            self.sampling.stop,
            self.asked.include_stop,
            self.sampling.min_new_tokens,
            self.asked.skip_special_tokens,
            self.asked.spaces_between_special_tokens,
        )


def check_shape(asked: GenerateInput, *, max_choices: int) -> None:
    """Rules that need no tokenizer: checked before any work. Raises InvalidRequest."""
    most = min(MAX_CHOICES, max_choices)
    if not 1 <= asked.num_choices <= most:
        raise InvalidRequest(f"num_choices must be in [1, {most}], got {asked.num_choices}")
    if asked.best_of is not None and not asked.num_choices <= asked.best_of <= most:
        raise InvalidRequest(f"best_of must be in [num_choices = {asked.num_choices}, {most}], got {asked.best_of}")
    if not 0 <= asked.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {asked.top_logprobs}")
    if asked.ttft_target_s is not None and not 0 < asked.ttft_target_s < math.inf:
        raise InvalidRequest(f"ttft_target must be > 0, got {asked.ttft_target_s:g} s")


def check_for_encoder(asked: GenerateInput) -> None:
    """What makes no sense where the prompt is read by an encoder. Raises InvalidRequest."""
    if asked.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs: an encoder-decoder model does not predict its prompt")
    if asked.echo:
        raise InvalidRequest("echo: an encoder-decoder model's text does not continue its prompt")


def require_prompt(prompt: Prompt | None) -> Prompt:
    """A prompt must be there, and a conversation's roles known. Raises InvalidRequest."""
    if prompt is None:
        raise InvalidRequest("input is missing: give a prompt, token_ids or chat messages")
    if isinstance(prompt, TextPrompt) and not prompt.text:
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
    """Length and vocabulary of a prompt. Raises InvalidRequest."""
    if not prompt_ids:
        raise InvalidRequest(_EMPTY)
    if len(prompt_ids) > limits.max_input_tokens:
        raise InvalidRequest(
            f"the prompt has {len(prompt_ids)} tokens, at most {limits.max_input_tokens} (max_input_length) are allowed"
        )
    highest = max(prompt_ids)
    if highest >= vocab_size:
        raise InvalidRequest(f"token_ids: token id {highest} is not in the vocabulary of {vocab_size}")


def check_ranked(valid: ValidRequest) -> None:
    """What is ranked is kept until the end, so it has to be small enough. Raises InvalidRequest."""
    asked, max_new = valid.asked, valid.sampling.max_new_tokens or 0
    num_events = asked.num_generated_choices * max_new * (1 + asked.top_logprobs)
    if asked.best_of is not None and num_events > MAX_RANKED_EVENTS:
        raise InvalidRequest(
            f"best_of ({asked.best_of}) * max_new_tokens ({max_new}) * (1 + top_logprobs ({asked.top_logprobs})) "
            f"must be <= {MAX_RANKED_EVENTS}"
        )


def complete_sampling(
    sampling: SamplingParams, *, num_prompt_tokens: int, vocab_size: int, limits: Limits
) -> SamplingParams:
    """Checked parameters, with a seed, and max_new_tokens set: the rest of the budget by default."""
    sampling.validate(vocab_size)
    rest = limits.max_total_tokens - num_prompt_tokens
    max_new = rest if sampling.max_new_tokens is None else sampling.max_new_tokens
    if max_new > rest:
        raise InvalidRequest(
            f"prompt tokens ({num_prompt_tokens}) + max_new_tokens ({max_new}) must be <= max_total_tokens "
            f"({limits.max_total_tokens})"
        )
    seed = random.randint(0, MAX_SEED) if sampling.seed is None else sampling.seed
    completed = replace(sampling, max_new_tokens=max_new, seed=seed)
    completed.validate(vocab_size)
    return completed
